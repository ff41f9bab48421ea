# SPDX-License-Identifier: Apache-2.0
"""Chooses how tensors are sent: `Compression.none`, `.fp16` or `.bf16`, as in BytePS, or a method of the core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bps_rdma.operations.options import EXACT, NONE, text_of


class Compressor:
    """Converts a tensor to the dtype that is sent, and the result back.

    Attributes:
        dtype: in which floating-point tensors of 32 or 64 bits are sent; None: all tensors are sent in their own dtype.
        method: the text of a method by which float32 travels between hosts, as in "int8:feedback=1" (see
            docs/compression.md), or "exact" (docs/exact.md); None: what BPS_COMPRESSION and BPS_EXACT say.
    """

    def __init__(self, dtype: torch.dtype | None = None, method: str | None = None) -> None:
        self.dtype = dtype
        self.method = method

    def method_for(self, dtype: torch.dtype, elements: int, smallest: int) -> str | None:
        """The method for a tensor that is sent in `dtype`; only from `smallest` bytes on."""
        if self.method is None or self.method == EXACT:
            return self.method
        return self.method if dtype == torch.float32 and elements * 4 >= smallest else NONE

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which tensors of `dtype` are sent. Servers sum it in float32 and round once."""
        return self.dtype if self.dtype is not None and dtype in (torch.float32, torch.float64) else dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """(the tensor to send, the context for decompress()); the tensor itself where its dtype is the one sent."""
        return tensor.to(self.wire_dtype(tensor.dtype)), tensor.dtype

    def decompress(self, tensor: torch.Tensor, context: torch.dtype) -> torch.Tensor:
        """The tensor in its own dtype again."""
        return tensor.to(context)


class Compression:
    """The compressors: `none`; `fp16` (10 bits of mantissa, largest value 65504); `bf16` (7 bits, float32's range)."""

    none = Compressor()
    fp16 = Compressor(torch.float16)
    bf16 = Compressor(torch.bfloat16)


AnyCompression = Compressor | str | Mapping[str, Any]  # callers may pass any of these


def compressor_of(compression: AnyCompression, exact: bool | None = None) -> Compressor:
    """A compressor; of a text or BytePS's parameters, that of the method. With `exact`, one whose sums are exact.

    Raises:
        InvalidArgumentError: it is none of these, or has a method, and is to be exact.
    """
    if not isinstance(compression, Compressor):
        return Compressor(method=text_of(compression, exact))
    return compression if exact is None else Compressor(compression.dtype, text_of(compression.method, exact))
