# SPDX-License-Identifier: Apache-2.0
"""Saves and loads the adapters of a model without the model.

A file holds whole matrices by the numbers and names of layers, so that another size of tensor or pipeline parallelism
can load it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from bps_rdma.errors import MismatchError
from bps_rdma.files import replacing
from bps_rdma.megatron.lora_layers import adapters


def lora_state(models: Iterable[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """The adapters of the whole model, on the CPU; every rank of a model (tensor and pipeline ranks) calls it."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    mine = [(layer, layer.a.detach().cpu(), layer.b.detach().cpu()) for layer in adapters(models)]
    group = parallel_state.get_model_parallel_group()
    found: list[list[tuple[str, torch.Tensor, torch.Tensor]]] = [[] for _ in range(group.size())]
    dist.all_gather_object(found, [(layer.name, a, b) for layer, a, b in mine], group=group)
    parts: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for one in found:  # in the order of tensor ranks, among those of a stage
        for name, a, b in one:
            parts.setdefault(name, []).append((a, b))
    joins = {layer.name: layer for layer, _, _ in mine}
    # Each stage knows how to join its own.
    whole = {}
    for name, layer in joins.items():
        firsts, seconds = zip(*parts[name], strict=True)
        whole[f"{name}.a"] = firsts[0] if layer.is_column else layer.join(firsts)
        whole[f"{name}.b"] = layer.join(seconds) if layer.is_column else seconds[0]
    stages: list[dict[str, torch.Tensor]] = [{} for _ in range(group.size())]
    dist.all_gather_object(stages, whole, group=group)
    return {name: matrix for stage in stages for name, matrix in stage.items()}


def save_lora(models: Iterable[torch.nn.Module], file: str | os.PathLike[str]) -> None:
    """Write the adapters to a file; every rank calls it, and rank 0 writes."""
    import torch.distributed as dist

    state = lora_state(models)
    if dist.get_rank() == 0:
        with replacing(Path(file)) as out:
            torch.save(state, out)
    dist.barrier()


def load_lora(models: Iterable[torch.nn.Module], file: str | os.PathLike[str]) -> int:
    """Load adapters that any size of parallelism has saved; returns how many this rank has.

    Raises:
        MismatchError: the file is of other layers, or of another rank of the adapters.
    """
    state = torch.load(file, weights_only=True)
    loaded = 0
    for layer in adapters(models):
        wanted = {"a": layer.a, "b": layer.b}
        for key, parameter in wanted.items():
            whole = state.get(f"{layer.name}.{key}")
            if whole is None:
                raise MismatchError(f"{os.fspath(file)} has no adapter of {layer.name}", "add the same targets")
            part = layer.cut(whole) if (key == "b") == layer.is_column else whole
            if part.shape != parameter.shape:
                raise MismatchError(
                    f"{layer.name}.{key} in {os.fspath(file)} is {list(whole.shape)}, which does not fit "
                    f"{list(parameter.shape)} on this rank", "use the rank and the model that it was saved with",
                )  # fmt: skip
            with torch.no_grad():
                parameter.copy_(part)
        loaded += 1
    return loaded
