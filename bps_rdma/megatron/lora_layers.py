# SPDX-License-Identifier: Apache-2.0
"""LoRA for Megatron's parallel linear layers: a frozen layer, and beside it a trained product of two small matrices.

The first matrix, A, is drawn by a generator of its own from the layer's number and name, whole, and then cut; the
second one, B, begins as zeros. So a model starts from the same adapters at every size of tensor and pipeline
parallelism.

* Beside a ColumnParallelLinear each rank has the whole A, and the rows of B are cut. Between them is a copy, whose
  backward pass sums; with sequence parallelism, a gather.
* Beside a RowParallelLinear the columns of A are cut, and each rank has the whole B. Between them is a sum; with
  sequence parallelism, a sum that is scattered.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.megatron.lora import cure_frozen_embedding

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class LoraLinear(torch.nn.Module):
    """base(x) + alpha / rank * B(A(x)); `base` is a ColumnParallelLinear or RowParallelLinear of Megatron's."""

    def __init__(self, base: Any, name: str, rank: int, alpha: float, seed: int) -> None:
        """`name` is the same at every size of parallelism."""
        super().__init__()
        from megatron.core import tensor_parallel
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear

        self.base = base
        self.name = name
        self.scale = alpha / rank
        self.is_column = isinstance(base, ColumnParallelLinear)
        # A gated layer has two matrices of the same size, one below the other, and each is cut.
        self.matrices = 2 if name.endswith("linear_fc1") and base.config.gated_linear_unit else 1
        weight = base.weight
        rows, columns = weight.shape  # those that this rank has
        self.a = torch.nn.Parameter(weight.new_empty(rank, columns))
        self.b = torch.nn.Parameter(weight.new_zeros(rows, rank))
        width = columns if self.is_column else columns * base.tp_group.size()
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        drawn = torch.empty(rank, width, device="cpu").uniform_(-(width**-0.5), width**-0.5, generator=generator)
        with torch.no_grad():
            self.a.copy_(drawn if self.is_column else self.cut(drawn))
        cut, whole = (self.b, self.a) if self.is_column else (self.a, self.b)
        # Megatron's norm of all gradients counts whole ones once.
        tensor_parallel.set_tensor_model_parallel_attributes(cut, True, self.cut_dim, 1)
        tensor_parallel.set_tensor_model_parallel_attributes(whole, False, -1, 1)
        if base.sequence_parallel:
            whole.sequence_parallel = True  # type: ignore[attr-defined]  # Megatron sums its gradient over tensor ranks

    @property
    def cut_dim(self) -> int:
        """The dimension in which one of the matrices is cut."""
        return 0 if self.is_column else 1

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The layer's output and bias, as Megatron's layers return them."""
        from megatron.core import tensor_parallel as tp

        out, bias = self.base(x)
        low = linear(x, self.a)
        if self.is_column:
            between = tp.gather_from_sequence_parallel_region, tp.copy_to_tensor_model_parallel_region
        else:
            between = tp.reduce_scatter_to_sequence_parallel_region, tp.reduce_from_tensor_model_parallel_region
        low = between[0 if self.base.sequence_parallel else 1](low)
        return out + self.scale * linear(low, self.b), bias

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the matrix that is cut."""
        group = self.base.tp_group
        parts = [matrix.chunk(group.size(), self.cut_dim)[group.rank()] for matrix in whole.chunk(self.matrices)]
        return torch.cat(parts)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole matrix, from the parts of all tensor ranks."""
        matrices = zip(*(part.chunk(self.matrices) for part in parts), strict=True)
        return torch.cat([torch.cat(matrix, self.cut_dim) for matrix in matrices])

    @torch.no_grad()
    def merge(self) -> Any:
        """Add the product to the frozen weight; returns the layer, which needs the adapter no more."""
        self.base.weight += self.scale * (self.b @ self.a)
        return self.base


def add_lora(
    chunk: torch.nn.Module, rank: int = 8, alpha: float = 16, targets: Iterable[str] = TARGETS, seed: int = 0,
    *, cure_frozen_embeddings: bool = True,
) -> int:  # fmt: skip
    """Freeze a model of Megatron's, and put adapters beside its linear layers; before it is wrapped by Megatron's DDP.

    Load the pretrained weights before this call.

    Args:
        chunk: a GPTModel, or a chunk of one.
        rank: of the adapters.
        alpha: their output is scaled by alpha / rank.
        targets: names of the linear layers.
        seed: of the first matrices.
        cure_frozen_embeddings: under full recomputation the first stage would otherwise never train; see enable().

    Returns:
        The number of adapters in this chunk.

    Raises:
        InvalidArgumentError: a layer of these names cannot have an adapter, or none has such a name.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    if rank < 1:
        raise InvalidArgumentError(f"rank is {rank}", "use 1 or more")
    names = set(targets)
    layers = [
        (f"layers.{layer.layer_number}.{name}", *_owner(layer, name))
        for layer in chunk.modules()
        if hasattr(layer, "layer_number") and hasattr(layer, "self_attention")
        for name, _ in layer.named_modules()
        if name.rsplit(".", 1)[-1] in names
    ]
    for name, owner, attribute in layers:
        base = getattr(owner, attribute)
        supported = isinstance(base, (ColumnParallelLinear, RowParallelLinear))
        if not supported or base.is_expert or getattr(base, "gather_output", False):
            raise InvalidArgumentError(
                f"{name} is a {type(base).__name__} that cannot have an adapter",
                "adapters are for ColumnParallelLinear and RowParallelLinear (the local layer spec), not for experts",
            )
    if not layers and any(True for module in chunk.modules() if hasattr(module, "self_attention")):
        raise InvalidArgumentError(f"no layer is called {' or '.join(sorted(names))}", f"use some of {TARGETS}")
    chunk.requires_grad_(False)
    for name, owner, attribute in layers:
        base = getattr(owner, attribute)
        setattr(owner, attribute, LoraLinear(base, name, rank, alpha, seed))
    if cure_frozen_embeddings:
        cure_frozen_embedding(chunk, getattr(chunk, "config", None))
    return len(layers)


def adapters(models: Iterable[torch.nn.Module]) -> Iterator[LoraLinear]:
    """All adapters of some chunks, wrapped or not."""
    for model in models:
        yield from (module for module in model.modules() if isinstance(module, LoraLinear))


def merge_lora(models: Iterable[torch.nn.Module]) -> int:
    """Add all adapters to their frozen layers, and remove them; returns how many there were."""
    merged = 0
    for model in models:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, LoraLinear):
                    setattr(module, name, child.merge())
                    merged += 1
    return merged


def _owner(layer: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return layer.get_submodule(path), attribute
