# SPDX-License-Identifier: Apache-2.0
"""The dtype in which tensors are sent: `Compression.none`, `.fp16` or `.bf16`, as in BytePS and Horovod."""

from __future__ import annotations

import torch


class Compressor:
    """Converts a tensor to the dtype that is sent, and the result back.

    Attributes:
        dtype: in which floating-point tensors of 32 or 64 bits are sent; None: all tensors are sent in their own dtype.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

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
