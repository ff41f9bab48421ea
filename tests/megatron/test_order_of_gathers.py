# SPDX-License-Identifier: Apache-2.0
"""Gathers of parameters in another order than forward's are named, once."""

import warnings
from dataclasses import replace
from typing import Any

import cpu
import harness
import pytest
import torch
import torch.distributed as dist
from gpt import Setup, Training

from bps_rdma import megatron

GATHERED = Setup(distributed_optimizer=True, overlap=True, overlap_gather=True, in_order=False, bucket=1000, steps=3)


def in_order(chunk: torch.nn.Module) -> None:
    """Attention's output projection is registered last; what is computed stays the same."""
    for layer in chunk.decoder.layers:
        modules = layer.self_attention._modules
        modules["linear_proj"] = modules.pop("linear_proj")


def out_of_order(chunk: torch.nn.Module) -> None:
    """It is registered first, as megatron-core does itself, up to 0.16 at least."""
    for layer in chunk.decoder.layers:
        modules = layer.self_attention._modules
        for name in [name for name in modules if name != "linear_proj"]:
            modules[name] = modules.pop(name)


def untouched(_: torch.nn.Module) -> None:
    """As examples/megatron/gpt.py makes it with in_order, by register_in_order_of_use()."""


def messages(bps: Any, setup: Setup, prepare: Any) -> tuple[list[str], bool]:
    """What is said about the order in three steps, and whether the results are stock's."""
    cpu.install()
    dist.init_process_group("gloo")
    stock = Training(setup, prepare)
    for _ in range(setup.steps):
        stock.step()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with megatron.enabled():
            ours = Training(setup, prepare)
        before = hooks(ours)
        ours.step()
        if setup.overlap_gather:
            assert hooks(ours) < before, "the hooks are still there"
        assert hooks(ours) == hooks(stock)
        for _ in range(setup.steps - 1):
            ours.step()
    same = stock.result() == ours.result()
    return [str(one.message) for one in found if "was registered first" in str(one.message)], same


def hooks(training: Training) -> int:
    return sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks)
        for chunk in training.model
        for module in chunk.modules()
    )


@pytest.mark.parametrize("prepare", [in_order, untouched])
def test_in_order(prepare):
    setup = replace(GATHERED, in_order=prepare is untouched)
    assert harness.run(messages, setup, prepare, workers=2, init=False) == [([], True)] * 2


def test_what_is_moved():
    def attention(*names: str) -> torch.nn.Module:
        return torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in names})

    model = torch.nn.ModuleList(
        [attention("core_attention", "linear_proj", "linear_qkv"), attention("linear_proj", "linear_fc1")]
    )
    assert megatron.register_in_order_of_use(model) == 1
    assert [list(each._modules) for each in model] == [
        ["core_attention", "linear_qkv", "linear_proj"], ["linear_proj", "linear_fc1"],
    ]  # fmt: skip
    assert megatron.register_in_order_of_use(model) == 0


def test_out_of_order():
    (said, same), (silent, also) = harness.run(messages, GATHERED, out_of_order, workers=2, init=False)
    assert same
    assert also
    assert silent == [], "every rank says the same thing"
    (message,) = said
    attention = "decoder.layers.0.self_attention"
    assert message.startswith(f"forward uses {attention}.linear_qkv before {attention}.linear_proj, but ")


@pytest.mark.long
def test_without_gathers_order_does_not_matter():
    setup = Setup(distributed_optimizer=True, overlap=True, bucket=1000, steps=1)
    assert harness.run(messages, setup, out_of_order, workers=2, init=False) == [([], True)] * 2
