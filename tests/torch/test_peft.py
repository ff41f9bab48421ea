# SPDX-License-Identifier: Apache-2.0
"""Adapters of Hugging Face's peft under DistributedDataParallel: frozen weights beside trained ones."""

from typing import Any

import harness
import pytest
import torch
import training

import bps_rdma.torch

pytest.importorskip("peft", reason="peft is not installed: pip install peft")


def adapted() -> Any:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["first", "last"], init_lora_weights="gaussian")
    return peft.get_peft_model(training.Plain(), config)


def trained(bps: Any, ranks: int, rank: int) -> dict[str, torch.Tensor]:
    import peft

    model: Any = adapted()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    ddp = bps.DistributedDataParallel(model) if ranks > 1 else model
    for step in range(4):
        optimizer.zero_grad()
        own = training.batch(step)[rank::ranks]
        ddp(own).square().mean().backward()
        optimizer.step()
    return peft.get_peft_model_state_dict(model)


def on_ranks(bps: Any) -> dict[str, torch.Tensor]:
    return trained(bps_rdma.torch, bps.size(), bps.rank())


@pytest.mark.long  # peft is imported for 8 s by each process; test_ddp.py has frozen parameters
def test_adapters_train_as_in_one_process():
    wanted = trained(None, 1, 0)
    for found in harness.run(on_ranks, workers=2):
        assert found.keys() == wanted.keys()
        for name, matrix in wanted.items():
            assert torch.allclose(found[name], matrix, atol=1e-6), name
    assert any(matrix.any() for name, matrix in wanted.items() if "lora_B" in name)
