# SPDX-License-Identifier: Apache-2.0
"""LoRA under full recomputation: layers that would never train are named, and cured."""

import warnings
from typing import Any

import cpu
import harness
import pytest
import torch
import torch.distributed as dist
from gpt import Setup, Training

from bps_rdma import megatron


class Lora(torch.nn.Module):
    """A frozen linear layer of Megatron's with a small trained one beside it, which begins as nothing."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base
        self.a = torch.nn.Linear(base.weight.shape[1], 4, bias=False)
        self.b = torch.nn.Linear(4, base.weight.shape[0], bias=False)
        torch.nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> Any:
        out, bias = self.base(x)
        return out + self.b(self.a(x)), bias


def with_lora(chunk: torch.nn.Module) -> None:
    """Everything is frozen but what is put beside the attention's linear layers."""
    chunk.requires_grad_(False)
    for layer in chunk.decoder.layers:
        layer.self_attention.linear_qkv = Lora(layer.self_attention.linear_qkv)
        layer.self_attention.linear_proj = Lora(layer.self_attention.linear_proj)


def cured(chunk: torch.nn.Module) -> None:
    with_lora(chunk)
    megatron.let_embeddings_pass_gradients(chunk)


def three_ways(bps: Any, pp: int) -> dict[str, Any]:
    """Not cured, cured, and cured on stock Megatron: results, warnings and how many B matrices have been trained."""
    setup = Setup(pp=pp, recompute=True, shared_embeddings=False, steps=5)
    cpu.install()
    dist.init_process_group("gloo")
    found: dict[str, Any] = {"stage": 0}
    for name, prepare, ours in (("ill", with_lora, True), ("cured", cured, True), ("stock", cured, False)):
        with (
            warnings.catch_warnings(record=True) as said,
            megatron.enabled(use_dpu_reduce=ours, cure_frozen_embeddings=False),
        ):
            warnings.simplefilter("always")
            training = Training(setup, prepare)
            for _ in range(setup.steps):
                training.step()
        trained = [
            bool(parameter.any())
            for chunk in training.model
            for key, parameter in chunk.named_parameters()
            if key.endswith(".b.weight")
        ]
        texts = [str(one.message) for one in said if "got no gradient" in str(one.message)]
        found[name] = (training.result(), texts, trained)
    found["first"] = training.model[0].module.pre_process
    found["speaks"] = training.model[0].intra_dp_cp_group.rank() == 0
    return found


@pytest.mark.parametrize(("workers", "pp"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.long)])
def test_frozen_embedding_under_full_recomputation(workers, pp):
    ranks = harness.run(three_ways, pp, workers=workers, init=False)
    assert sum(one["first"] for one in ranks) == 2
    for one in ranks:
        _, said, trained = one["ill"]
        if one["first"]:
            assert not any(trained), "the first stage trains by itself: nothing is left to cure"
        assert bool(said) == (one["first"] and one["speaks"])
        if said:
            (message,) = said
            assert message.startswith(
                f"{4 * 4 // pp} trained parameters got no gradient in this step, decoder.layers.0."
            )
            assert "let_embeddings_pass_gradients" in message
        result, said, trained = one["cured"]
        assert all(trained)
        assert said == []
        assert result == one["stock"][0]
        # Data comes again every two steps.
        if result.losses:
            assert result.losses[4] < result.losses[0]
            ill = one["ill"][0].losses
            assert (ill[4] == ill[0]) == (pp == 1)
