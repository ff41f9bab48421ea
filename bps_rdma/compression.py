# SPDX-License-Identifier: Apache-2.0
"""The methods by which tensors can travel compressed, and what each makes of numbers; see docs/compression.md.

Operations take the text of a method as `compression=`; this module is for looking at methods without a job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bps_rdma import _core
from bps_rdma.errors import InvalidArgumentError

__all__ = ["METHODS", "Codec", "Method", "register"]


class Codec:
    """A method with its parameters.

    Args:
        text: as operations take it: "int8", "topk:k=0.01,feedback=1".

    Attributes:
        text: the same.
        feedback: whether operations add to a round what the ones before it lost. encode() does not.
        momentum: what operations multiply the momentum with; 0: none. encode() uses none.

    Raises:
        InvalidArgumentError: there is no such method or parameter; says what there is.
    """

    def __init__(self, text: str) -> None:
        self._codec = _core.Codec(text)
        self.text = text
        self.feedback: bool = self._codec.feedback
        self.momentum: float = self._codec.momentum

    def encoded_size(self, elements: int) -> int:
        """The bytes of a code of so many elements; an operation sends 128 more with each partition."""
        return int(self._codec.encoded_size(elements))

    def encode(self, array: Any, seed: int = 0) -> bytes:
        """The code of float32 elements, taken as flat. Random methods draw from `seed`, 64 bits.

        Raises:
            InvalidArgumentError: the function of a method that is written in Python has failed.
        """
        code: bytes = self._codec.encode(np.ascontiguousarray(array, np.float32).tobytes(), seed)
        return code

    def decode(self, code: bytes, elements: int) -> npt.NDArray[np.float32]:
        """Returns the values that the other ranks get: `elements` of them, flat.

        Raises:
            InvalidArgumentError: no array of this length has such a code, or the function of a method that is written
                in Python has failed.
        """
        return np.frombuffer(bytearray(self._codec.decode(code, elements)), np.float32)


def register(
    name: str,
    encode: Callable[[npt.NDArray[np.float32], int], Any],
    decode: Callable[[npt.NDArray[np.uint8], int], Any],
    *,
    block: int,
    block_bytes: int,
) -> None:
    """Adds a method that is written in Python, to be used as `compression="name"`, or "name:feedback=1" and so on.

    For trying an idea: loops of all workers call the functions, one at a time in each process, while the program's own
    Python waits. Call it in every worker before the first declaration that names it. Only for jobs without dedicated
    servers: those have no Python, and declarations are refused with InvalidArgumentError.

    Args:
        name: small letters, digits and underscores.
        encode: encode(array, seed): the code of a partition, a flat float32 array, as bytes or a uint8 array; equal
            arguments must give equal codes. A code of n elements has ceil(n / block) * block_bytes bytes.
        decode: decode(code, elements): what a code, a uint8 array, stands for, as so many float32.
        block: elements.
        block_bytes: bytes of the code of each block. The last block may have fewer elements.

    Neither may call bps_rdma: that raises InvalidArgumentError within it, because the call would wait for the loop that
    runs the function. What they raise is reported by sys.unraisablehook, with its traceback, and the operation raises
    InvalidArgumentError on all ranks, which names the codec, the exception and the rank. The job goes on.

    Raises:
        InvalidArgumentError: the name is taken, or an argument makes no sense.
    """
    if block < 1 or block_bytes < 1:
        raise InvalidArgumentError(f"block={block}, block_bytes={block_bytes}", "pass numbers of at least 1")

    def encoded(floats: bytes, seed: int) -> bytes:
        return bytes(encode(np.frombuffer(floats, np.float32), seed))

    def decoded(code: bytes, elements: int) -> bytes:
        return np.ascontiguousarray(decode(np.frombuffer(code, np.uint8), elements), np.float32).tobytes()

    _core.add_codec(name, encoded, decoded, block, block_bytes)


class Method(NamedTuple):
    """A method of compression.

    Attributes:
        summary: what it does, in a line.
        bytes_per_element: of a large partition, with the parameters' defaults; float32 has 4.
        parameters: its own parameters with their defaults, as they are written after its name.
    """

    summary: str
    bytes_per_element: float
    parameters: str = ""


METHODS = {
    "bf16": Method("rounded to bfloat16", 2),
    "fp16": Method("rounded to float16; from 65520 on infinite", 2),
    "mxfp8": Method("8-bit floats E4M3 with a power of two per 32 elements (OCP MX)", 33 / 32),
    "fp8": Method("8-bit floats E4M3 with a float32 scale per row", 1 + 4 / 1024, "row=1024"),
    "int8": Method("8-bit integers with a float32 scale per 256 elements", 260 / 256),
    "int4": Method("4-bit integers with a bfloat16 scale per 128 rotated elements", 66 / 128),
    "onebit": Method("signs, and the mean magnitude", 1 / 8, "scaling=1"),
    "topk": Method("the elements of largest magnitude", 0.08, "k=0.01"),
    "randomk": Method("elements drawn at random", 0.04, "k=0.01"),
    "dithering": Method("magnitudes rounded at random to a few levels", 0.5, "k=4,partition=linear,normalize=max"),
}
