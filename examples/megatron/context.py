# SPDX-License-Identifier: Apache-2.0
"""Context parallelism without a GPU: attention over a sequence whose parts lie on several ranks.

Megatron has it only in kernels for GPUs. As there, the sequence is cut into twice as many pieces as there are ranks,
and rank r has the pieces r and 2 * size - 1 - r, so that the causal mask leaves all ranks the same amount of work.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist


def own_part(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The parts of this rank, of tensors of shape (samples, length)."""
    return [tensor[:, _positions(tensor.shape[1], _rank())].contiguous() for tensor in tensors]


def mean(loss: torch.Tensor) -> torch.Tensor:
    """The mean of the losses of all ranks that share a sequence."""
    total = loss.clone()
    dist.all_reduce(total, group=_group())
    return total / _size()


class Attention(torch.nn.Module):
    """Causal attention; takes the place of Megatron's `core_attention`."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.scale = 1 / math.sqrt(config.kv_channels)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Tensors of shape (own length, samples, heads, width); the result has the last two flattened."""
        length = query.shape[0] * _size()
        mine = _positions(length, _rank())
        theirs = torch.cat([_positions(length, rank) for rank in range(_size())])
        scores = torch.einsum("sbhd,tbhd->bhst", query, _Gather.apply(key)) * self.scale
        weights = scores.masked_fill(theirs[None, :] > mine[:, None], -math.inf).softmax(-1)
        return torch.einsum("bhst,tbhd->sbhd", weights, _Gather.apply(value)).flatten(2)


class _Gather(torch.autograd.Function):
    """The parts of all ranks, one after the other; backward sums what all ranks have for this rank's part."""

    @staticmethod
    def forward(_: Any, part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(_size())]
        dist.all_gather(parts, part.contiguous(), group=_group())
        return torch.cat(parts)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=_group())
        return total.chunk(_size())[_rank()]


def _positions(length: int, rank: int) -> torch.Tensor:
    pieces = torch.arange(length).chunk(2 * _size())
    return torch.cat([pieces[rank], pieces[2 * _size() - 1 - rank]])


def _group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


def _size() -> int:
    return int(_group().size())


def _rank() -> int:
    return int(_group().rank())
