# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's peft on Megatron's layers, by a layer that is registered with it; its own fails without us, too."""

from collections.abc import Callable
from typing import Any

import cpu
import harness
import pytest
import torch
import torch.distributed as dist
from gpt import Setup, Training

from bps_rdma import megatron

peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
STEPS = 4
TARGETS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


class Adapter(torch.nn.Module, peft.tuners.lora.LoraLayer):
    """peft's LoRA beside a linear layer of Megatron's that is not cut, which returns its output and its bias."""

    def __init__(self, base_layer: Any, adapter_name: str, config: Any, **options: Any) -> None:
        super().__init__()
        peft.tuners.lora.LoraLayer.__init__(self, base_layer)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, options["r"], options["lora_alpha"], config=config)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        out, bias = self.base_layer(x)
        (name,) = self.active_adapters
        return out + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name], bias


def registered(chunk: Any) -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS)
    config._register_custom_module({ColumnParallelLinear: Adapter, RowParallelLinear: Adapter})
    peft.inject_adapter_in_model(config, chunk)


def pefts_own(chunk: Any) -> None:
    config = peft.LoraConfig(target_modules=TARGETS, megatron_config=chunk.config, megatron_core="megatron.core")
    peft.inject_adapter_in_model(config, chunk)


def made(carried: bool, prepare: Callable[[Any], None]) -> Training:
    cpu.install()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with megatron.enabled(use_dpu_reduce=carried):
        return Training(Setup(shared_embeddings=False, overlap=True, steps=STEPS), prepare)


def trained(bps: Any, carried: bool) -> tuple[list[float], list[float], dict[str, torch.Tensor], int]:
    training = made(carried, registered)
    for _ in range(STEPS):
        training.step()
    named = [each for chunk in training.model for each in chunk.named_parameters()]
    state = {name: parameter.detach().clone() for name, parameter in named if parameter.requires_grad}
    operations = bps.metrics()["total"]["operations"] if bps.is_initialized() else 0
    training.close()
    return training.losses, training.norms, state, operations


def test_adapters_of_peft_train_as_on_stock_megatron():
    stock, ours = (harness.run(trained, carried, workers=2, init=False) for carried in (False, True))
    for (losses, norms, state, none), (*found, weights, operations) in zip(stock, ours, strict=True):
        assert found == [losses, norms]
        assert none == 0
        assert operations >= STEPS
        assert len(state) == 4 * 4 * 2
        assert all(torch.equal(matrix, weights[name]) for name, matrix in state.items())
        assert all(matrix.any() for name, matrix in state.items() if "lora_B" in name), "which began as zeros"


@pytest.mark.long  # says when the page has to change
@harness.on_ranks(workers=1, init=False)
def test_pefts_own_layer_fails_without_us(bps: Any) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  that of stock Megatron
        made(False, pefts_own)
    assert repr(caught.value) == "KeyError('fan_in_fan_out')"
