# SPDX-License-Identifier: Apache-2.0
"""LoRA beside parallel linear layers: the same training however the model is cut, saved alone, loaded and merged."""

import logging
import os
from pathlib import Path
from typing import Any

import cpu
import harness
import pytest
import torch
import torch.distributed as dist
from gpt import Setup, Training

from bps_rdma import megatron
from bps_rdma.errors import InvalidArgumentError, MismatchError

STEPS = 4
LONG = bool(os.environ.get("BPS_TEST_ALL"))


def started(setup: Setup, **options: Any) -> Training:
    cpu.install()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with megatron.enabled(use_dpu_reduce=True):
        return Training(setup, lambda chunk: megatron.add_lora(chunk, rank=4, alpha=8, **options))


def loss_of(training: Training) -> float:
    """On all samples of the data, which come again every two runs."""
    losses = [float(one["loss"]) for _ in range(2) for one in training.run(forward_only=True)]
    return sum(losses)


def trained(bps: Any, setup: Setup, file: Path | None = None) -> dict[str, Any]:
    training = started(setup)
    gradients = []  # of each step
    for _ in range(STEPS):
        training.step()
        gradients.append(gradients_of(training))
    state = megatron.lora_state(training.model)
    if file:
        megatron.save_lora(training.model, file)
    before = loss_of(training)
    found = {"losses": training.losses, "norms": training.norms, "state": state, "gradients": gradients}
    found["merged"] = (before, megatron.merge_lora(training.model), loss_of(training), loss_of(training) == before)
    training.close()
    return found


def gradients_of(training: Training) -> dict[str, torch.Tensor]:
    """Of each trained parameter of this rank, in the last step."""
    return {
        name: parameter.main_grad.clone()
        for chunk in training.model
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }


def shape(**sizes: Any) -> Setup:
    return Setup(shared_embeddings=False, steps=STEPS, **sizes)


def ranks_of(setup: Setup, *args: Any, dp: int = 1) -> list[dict[str, Any]]:
    return harness.run(trained, setup, *args, workers=dp * setup.tp * setup.pp, init=False)


def the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == pytest.approx(other["losses"], abs=1e-5)
    assert one["norms"] == pytest.approx(other["norms"], rel=1e-4)
    assert one["state"].keys() == other["state"].keys()
    for name, matrix in one["state"].items():
        assert torch.allclose(matrix, other["state"][name], atol=1e-5), name


def loads(bps: Any, setup: Setup, file: Path) -> tuple[dict[str, torch.Tensor], int, str]:
    training = started(setup, seed=7)
    loaded = megatron.load_lora(training.model, file)
    state = megatron.lora_state(training.model)
    training.close()
    with megatron.enabled(use_dpu_reduce=True):
        other = Training(setup, lambda chunk: megatron.add_lora(chunk, rank=3))
    with pytest.raises(MismatchError) as raised:
        megatron.load_lora(other.model, file)
    dist.barrier()  # other ranks may still be connecting to this one
    return state, loaded, str(raised.value)


def test_every_cut_of_the_tensors_trains_the_same(tmp_path):
    whole, *_ = ranks_of(shape(), tmp_path / "whole.pt")
    assert whole["losses"][-1] < whole["losses"][0]
    assert len(whole["state"]) == 4 * 4 * 2
    for setup in (shape(tp=2), shape(tp=2, sp=True)) if LONG else (shape(tp=2, sp=True),):
        for one in ranks_of(setup, tmp_path / "cut.pt"):
            the_same(one, whole)
            before, merged, after, _ = one["merged"]
            assert merged == 16
            assert after == pytest.approx(before, abs=1e-4)
    # What was saved by one size of parallelism, another one loads.
    for state, loaded, refused in harness.run(loads, shape(tp=2, pp=2), tmp_path / "whole.pt", workers=4, init=False):
        assert loaded == 8
        assert state.keys() == whole["state"].keys()
        assert all(torch.equal(matrix, whole["state"][name]) for name, matrix in state.items())
        assert "which does not fit [3, " in refused


@pytest.mark.parametrize(
    "sizes",
    [
        {"pp": 2},
        *(pytest.param(sizes, marks=pytest.mark.long) for sizes in ({}, {"tp": 2}, {"tp": 2, "pp": 2, "sp": True})),
    ],
)
def test_full_recomputation_trains_every_stage(sizes):
    plain = ranks_of(shape(**sizes), dp=1)
    again = ranks_of(shape(recompute=True, **sizes), dp=1)
    for one, other in zip(plain, again, strict=True):
        assert all(gradient.any() for gradient in one["gradients"][-1].values())
        for gradients, wanted in zip(other["gradients"], one["gradients"], strict=True):
            assert gradients.keys() == wanted.keys()
            assert len(wanted) == len(one["state"]) // sizes.get("pp", 1)  # the state is that of all stages
            assert [name for name in wanted if not torch.equal(gradients[name], wanted[name])] == []
        the_same(other, one)


def heard(bps: Any, setup: Setup, cure: bool) -> list[str]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bps_rdma").addHandler(handler)
    cpu.install()
    dist.init_process_group("gloo")
    for _ in range(2):
        with megatron.enabled(use_dpu_reduce=True, cure_frozen_embeddings=cure):
            Training(setup, lambda chunk: megatron.add_lora(chunk, cure_frozen_embeddings=False))
    dist.barrier()  # the other rank may still be connecting to this one
    return [text for text in texts if "frozen" in text]


def test_the_cure_is_said_once_and_can_be_switched_off():
    cured = harness.run(heard, shape(pp=2, recompute=True), True, workers=2, init=False)
    assert [len(texts) for texts in cured] == [1, 0]
    assert "cure_frozen_embeddings=False" in cured[0][0]
    assert harness.run(heard, shape(recompute=True), False, workers=1, init=False) == [[]]
    assert harness.run(heard, shape(), True, workers=1, init=False) == [[]]


def refuses(bps: Any) -> list[str]:
    said = []
    for setup, options in ((shape(), {"targets": ["nothing"]}), (shape(experts=2), {"targets": ["linear_fc1"]})):
        with pytest.raises(InvalidArgumentError) as raised:
            started(setup, **options)
        said.append(str(raised.value))
    return said


def test_layers_that_cannot_have_an_adapter():
    ((nothing, expert),) = harness.run(refuses, workers=1, init=False)
    assert "no layer is called nothing" in nothing
    assert "that cannot have an adapter" in expert
