"""What travels instead of a tensor: `Compression.none`, `.fp16` or `.bf16`, under the names of BytePS and Horovod."""

from __future__ import annotations

import torch


class Compressor:
    """Turns a tensor into what is sent, and what came back into a tensor.

    Attributes:
        dtype: what floating-point tensors of 32 or 64 bits are sent as; None: everything as it is.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which tensors of `dtype` travel. Servers sum it in float32 and round once."""
        return self.dtype if self.dtype is not None and dtype in (torch.float32, torch.float64) else dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """(what to send, what decompress() needs); the tensor itself where nothing is to be done."""
        return tensor.to(self.wire_dtype(tensor.dtype)), tensor.dtype

    def decompress(self, tensor: torch.Tensor, context: torch.dtype) -> torch.Tensor:
        """The tensor in its own dtype again."""
        return tensor.to(context)


class Compression:
    """The compressors: `none`; `fp16` (10 bits of mantissa, largest value 65504); `bf16` (7 bits, float32's range)."""

    none = Compressor()
    fp16 = Compressor(torch.float16)
    bf16 = Compressor(torch.bfloat16)
