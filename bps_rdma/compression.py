# SPDX-License-Identifier: Apache-2.0
"""The methods by which tensors can travel compressed, and what each makes of numbers; see docs/compression.md.

Operations take an object such as Int8(feedback=True) as `compression=`. Settings have its text. Codec is for looking at
methods without a job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from bps_rdma import _core
from bps_rdma.errors import InvalidArgumentError

__all__ = [
    "BFloat16", "Codec", "Compression", "Dithering", "Float16", "Fp8", "Int4", "Int8", "MxFp8", "OneBit", "RandomK",
    "Registered", "TopK", "Uncompressed", "register",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Compression:
    """How tensors travel between hosts: the kind of Int8(), TopK(k=0.1) and the others. See docs/compression.md.

    Args:
        feedback: add to a round what the ones before it lost by encoding.
        momentum: workers send gradients with Nesterov momentum of this factor, from 0 to 1; 0: without. It compresses
            within a host as well, so that all contributions get the same. What travels uncompressed, as small tensors
            do, gets none: a warning names such a tensor.
        everywhere: also within a host, where it saves nothing; for tests.
        seed: another sequence for methods that draw random numbers; 64 bits.

    Attributes:
        text: the same as settings write it, as in "int8:feedback=1". Parameters that have their default are left out.
        none: nothing is asked for, and BPS_COMPRESSION decides; under BytePS's name.
        fp16: Float16(), under BytePS's name.
        bf16: BFloat16().

    Raises:
        InvalidArgumentError: a parameter is out of range.
    """

    feedback: bool = False
    momentum: float = 0.0
    everywhere: bool = False
    seed: int = 0
    text: str = field(init=False, repr=False, compare=False)

    _method: ClassVar[str] = ""
    none: ClassVar[None] = None
    fp16: ClassVar[Float16]
    bf16: ClassVar[BFloat16]

    def __post_init__(self) -> None:
        """Makes the text, and checks it."""
        method = self._name()
        if not method:
            raise InvalidArgumentError("Compression is no method itself", "use Int8(), BFloat16() or another one")
        changed = [f"{name}={_written(value)}" for name, value in self._changed() if name != "method"]
        text = method + (":" + ",".join(changed) if changed else "")
        if method != "none":
            _core.Codec(text)
        object.__setattr__(self, "text", text)

    @staticmethod
    def from_text(text: str) -> Compression:
        """The object of a text, as settings and command lines have it: "int8:feedback=1".

        Raises:
            InvalidArgumentError: there is no such method or parameter; says what there is.
        """
        if text == Uncompressed._method:
            return Uncompressed()
        _core.Codec(text)
        method, _, parameters = text.partition(":")
        given = [one.split("=") for one in parameters.split(",") if one]
        kind = next((each for each in Compression.__subclasses__() if each._method == method), Registered)
        read = {each.name: _READ[type(each.default)] for each in fields(kind) if each.init and each.name != "method"}
        values: dict[str, Any] = {name: read[name](value) for name, value in given}
        return kind(**values) if kind is not Registered else Registered(method=method, **values)

    @property
    def spelled(self) -> str:
        """The call that makes this object, without what has its default: "bps_rdma.Int8(feedback=True)"."""
        where = "bps_rdma.compression" if isinstance(self, Registered) else "bps_rdma"  # the one that needs an import
        values = ", ".join(f"{name}={value!r}" for name, value in self._changed())
        return f"{where}.{type(self).__name__}({values})"

    def _changed(self) -> list[tuple[str, Any]]:
        """Parameters that do not have their default; those of the method come first."""
        ordered = sorted(fields(self), key=lambda each: each.name in _COMMON)
        pairs = [(each.name, getattr(self, each.name), each.default) for each in ordered if each.init]
        return [(name, value) for name, value, default in pairs if value != default]

    def _name(self) -> str:
        return self._method


_COMMON = ("feedback", "momentum", "everywhere", "seed")


def _written(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


# How a text gives a parameter whose default has this type.
_READ: dict[type, Callable[[str], Any]] = {
    bool: lambda text: int(text) == 1,
    int: int,
    str: str,
    float: lambda text: int(text) if text.isdigit() else float(text),
}


@dataclass(frozen=True, kw_only=True)
class BFloat16(Compression):
    """Rounded to bfloat16: half of the bytes of float32, and its range. 16-bit floats travel as they are."""

    _method: ClassVar[str] = "bf16"


@dataclass(frozen=True, kw_only=True)
class Float16(Compression):
    """Rounded to float16: half of the bytes of float32; from 65520 on infinite. 16-bit floats travel as they are."""

    _method: ClassVar[str] = "fp16"


@dataclass(frozen=True, kw_only=True)
class MxFp8(Compression):
    """8-bit floats E4M3 with a power of two per 32 elements (OCP MX)."""

    _method: ClassVar[str] = "mxfp8"


@dataclass(frozen=True, kw_only=True)
class Fp8(Compression):
    """8-bit floats E4M3 with a float32 scale per row.

    Args:
        row: elements of a row.
    """

    row: int = 1024
    _method: ClassVar[str] = "fp8"


@dataclass(frozen=True, kw_only=True)
class Int8(Compression):
    """8-bit integers with a float32 scale per 256 elements: the first thing to try on a slow link."""

    _method: ClassVar[str] = "int8"


@dataclass(frozen=True, kw_only=True)
class Int4(Compression):
    """4-bit integers with a bfloat16 scale per 128 rotated elements; use it with feedback."""

    _method: ClassVar[str] = "int4"


@dataclass(frozen=True, kw_only=True)
class OneBit(Compression):
    """Signs, and the mean magnitude; use it with feedback.

    Args:
        scaling: False: signs stand for 1 and -1.
    """

    scaling: bool = True
    _method: ClassVar[str] = "onebit"


@dataclass(frozen=True, kw_only=True)
class TopK(Compression):
    """The elements of largest magnitude; use it with feedback.

    Args:
        k: below 1 a share of the elements, else their number.
    """

    k: float = 0.01
    _method: ClassVar[str] = "topk"


@dataclass(frozen=True, kw_only=True)
class RandomK(Compression):
    """Elements drawn at random; use it with feedback.

    Args:
        k: below 1 a share of the elements, else their number.
    """

    k: float = 0.01
    _method: ClassVar[str] = "randomk"


@dataclass(frozen=True, kw_only=True)
class Dithering(Compression):
    """Magnitudes rounded at random to a few levels, so that the expected value is right; without feedback.

    Args:
        k: number of levels.
        partition: how the levels lie: at equal distances, or at powers of two.
        normalize: what the magnitudes are divided by.
    """

    k: int = 4
    partition: Literal["linear", "natural"] = "linear"
    normalize: Literal["max", "l2"] = "max"
    _method: ClassVar[str] = "dithering"


@dataclass(frozen=True, kw_only=True)
class Uncompressed(Compression):
    """The tensor travels as it is, whatever BPS_COMPRESSION and BPS_EXACT say."""

    _method: ClassVar[str] = "none"

    def __post_init__(self) -> None:
        """Refuses parameters, which would have no effect."""
        super().__post_init__()
        if self.text != self._method:
            raise InvalidArgumentError(f"{self.text!r}: nothing is encoded", "pass Uncompressed()")


@dataclass(frozen=True, kw_only=True)
class Registered(Compression):
    """A method that register() has added.

    Args:
        method: its name.
    """

    method: str

    def _name(self) -> str:
        return self.method


Compression.fp16, Compression.bf16 = Float16(), BFloat16()


class Codec:
    """A method with its parameters.

    Args:
        how: as operations take it: Int8(), or a text as in "topk:k=0.01,feedback=1".

    Attributes:
        text: the same as a text.
        feedback: whether operations add to a round what the ones before it lost. encode() does not.
        momentum: what operations multiply the momentum with; 0: none. encode() uses none.

    Raises:
        InvalidArgumentError: there is no such method or parameter; says what there is.
    """

    def __init__(self, how: Compression | str) -> None:
        self.text = how.text if isinstance(how, Compression) else how
        self._codec = _core.Codec(self.text)
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
) -> Registered:
    """Adds a method that is written in Python, to be used as Registered(method="name", feedback=True) and so on.

    For trying an idea: loops of all workers call the functions, one at a time in each process, while the program's own
    Python waits. Call it in every worker before the first declaration that names it. Only for jobs without dedicated
    servers: those have no Python, and declarations are refused with InvalidArgumentError.

    Args:
        name: small letters, digits and underscores.
        encode: encode(array, seed): the code of a partition, a flat float32 array also of 16-bit tensors, as bytes or a
            uint8 array; equal arguments must give equal codes. A code of n elements has ceil(n / block) * block_bytes
            bytes.
        decode: decode(code, elements): what a code, a uint8 array, stands for, as so many float32.
        block: elements.
        block_bytes: bytes of the code of each block. The last block may have fewer elements.

    Returns:
        Registered(method=name), to be passed as `compression`.

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
    return Registered(method=name)
