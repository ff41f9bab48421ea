# SPDX-License-Identifier: Apache-2.0
"""Checks that parameters are registered in the order in which forward uses them, as overlapped gathers assume.

With `overlap_param_gather`, Megatron gathers one bucket group of parameters after the other, and begins with the next
one when forward needs the one before. If a module is registered after one that forward uses later, the gather of its
bucket group begins only when forward already waits for it, and does not overlap with computation.
"""

from __future__ import annotations

import warnings
from typing import Any


def register_in_order_of_use(model: Any) -> int:
    """Registers the output projection of each attention last, as forward uses it; Megatron does so before the others.

    Call it on each chunk of a model before Megatron's DistributedDataParallel wraps it, on all ranks.

    Do not add the call, or take it away, in a run that continues from a checkpoint made otherwise, unless its optimizer
    state goes by names (fully_reshardable). The state of a plain optimizer goes by index, and checkpoints of the kinds
    dp_reshardable and dp_zero go by offsets: state would be loaded for other parameters, without an error.

    Returns:
        How many have been moved.
    """
    moved = 0
    for module in model.modules():
        children = module._modules
        if "linear_proj" in children and "core_attention" in children and list(children)[-1] != "linear_proj":
            children["linear_proj"] = children.pop("linear_proj")
            moved += 1
    return moved


def watch_order(ddp: Any) -> None:
    """Warns if the first forward needs bucket groups in another order than that of their gathers; checks only that one.

    Args:
        ddp: a DistributedDataParallel of Megatron's; checked only if it gathers parameters during forward.
    """
    config = ddp.ddp_config
    if not (config.use_distributed_optimizer and config.overlap_param_gather):
        return
    places = _gather_order(ddp.bucket_groups) | _gather_order(ddp.expert_parallel_bucket_groups)
    watch = _Watch()
    handles = []
    for name, module in ddp.module.named_modules():
        own = [ddp.param_to_bucket_group.get(parameter) for parameter in module.parameters(recurse=False)]
        needs = [places[group] for group in dict.fromkeys(own) if group in places]
        if needs:
            handles.append(module.register_forward_pre_hook(watch.of(name, needs)))

    def end(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        # The same on all ranks that train the same part of the model.
        if watch.message and ddp.intra_dp_cp_group.rank() == 0:
            warnings.warn(watch.message, stacklevel=2)

    handles.append(ddp.register_forward_hook(end))


def _gather_order(groups: list[Any]) -> dict[Any, tuple[int, int]]:
    """Each bucket group -> (its chain, its place there). The first of a chain follows no other one."""
    following = {group: group.next_param_gather_bucket_group for group in groups}
    places: dict[Any, tuple[int, int]] = {}
    for first in following.keys() - set(following.values()):
        group, place = first, 0
        while group is not None and group not in places:
            places[group] = (id(first), place)
            group, place = following.get(group), place + 1
    return places


class _Watch:
    """Records which module first needed each bucket group, until one is out of order."""

    def __init__(self) -> None:
        self.message = ""
        self._met: dict[tuple[int, int], str] = {}
        self._last: dict[int, int] = {}  # chain -> the last place that has been needed

    def of(self, name: str, needs: list[tuple[int, int]]) -> Any:
        def hook(*_: Any) -> None:
            for chain, place in needs:
                if self.message or (chain, place) in self._met:
                    continue
                last = self._last.get(chain, -1)
                if place < last:
                    early = self._met[chain, last]
                    self.message = (
                        f"forward uses {early} before {name}, but {name} was registered first, and its parameters are "
                        f"gathered first: the gather for {early} begins when forward waits for it, too late. "
                        f"Register {early} before {name}, as bps_rdma.megatron.register_in_order_of_use() does with "
                        "attention, or make buckets larger, so that one bucket has both. Change no order in a run that "
                        "continues from a checkpoint made without it, unless its optimizer state goes by names "
                        "(fully_reshardable)"
                    )
                self._met[chain, place] = name
                self._last[chain] = max(last, place)

        return hook
