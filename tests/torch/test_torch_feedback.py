# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of compressed training in the torch face: model, optimizer, and what compression remembers."""

import io
from typing import Any

import harness
import pytest
import simulated
import torch
from torch import nn

from bps_rdma import TopK
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.torch import DistributedDataParallel, DistributedOptimizer

TCP = {"BPS_TRANSPORT": "tcp", "BPS_MIN_COMPRESS_BYTES": "1024"}
HOW = TopK(k=0.05, feedback=True, momentum=0.5)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 30))


def train(
    bps: Any, face: str, steps: range, saved: list[bytes] | None, saves: bool, staged: bool = False
) -> tuple[bytes, bytes]:
    if staged:
        simulated.install(immediate=True)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    compressed: Any
    if face == "optimizer":
        forward = net
        compressed = optimizer = DistributedOptimizer(optimizer, net.named_parameters(), compression=HOW)
    else:
        compressed = forward = DistributedDataParallel(net, strategy=face, bucket_mb=0.01, compression=HOW)
    if saved is not None:
        state = torch.load(io.BytesIO(saved[bps.rank()]), weights_only=True)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        compressed.load_compression_state_dict(state["compression"])
    for step in steps:
        torch.manual_seed(100 * step + bps.rank())
        optimizer.zero_grad()
        forward(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
    file = io.BytesIO()
    if saves:
        state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state | {"compression": compressed.compression_state_dict()}, file)
    return b"".join(p.detach().numpy().tobytes() for p in net.parameters()), file.getvalue()


def goes_on_bit_by_bit(face: str, staged: bool) -> None:
    where: dict[str, Any] = harness.on_hosts("ab") | {"env": TCP | {"BPS_GPU_CHUNK_BYTES": "4096"}}
    whole = harness.run(train, face, range(20), None, False, staged, **where)
    first = harness.run(train, face, range(10), None, True, staged, **where)
    saved = [state for _, state in first]
    second = harness.run(train, face, range(10, 20), saved, False, staged, **where)
    assert {weights for weights, _ in whole} == {weights for weights, _ in second}
    forgetful = [io.BytesIO() for _ in saved]
    for state, file in zip(saved, forgetful, strict=True):
        found = torch.load(io.BytesIO(state), weights_only=True)
        pieces = [piece for unit in found["compression"]["units"].values() for piece in unit.values()]
        assert len(pieces) > (2 if staged else 0), pieces
        for piece in pieces:
            for key in set(piece) - {"saved_by"}:
                piece[key].zero_()
        torch.save(found, file)
    others = harness.run(train, face, range(10, 20), [file.getvalue() for file in forgetful], False, staged, **where)
    assert {weights for weights, _ in whole} != {weights for weights, _ in others}


@pytest.mark.parametrize(
    "face", ["optimizer", *(pytest.param(face, marks=pytest.mark.long) for face in ("bucketed", "flat"))]
)
def test_training_goes_on_bit_by_bit(face: str) -> None:
    goes_on_bit_by_bit(face, False)


def test_training_on_a_device_goes_on_bit_by_bit() -> None:
    """Each chunk of a bucket is an operation of its own, with a memory of its own."""
    goes_on_bit_by_bit("bucketed", True)


def other_model(bps: Any, saved: bytes) -> None:
    state = torch.load(io.BytesIO(saved), weights_only=True)["compression"]
    ddp = DistributedDataParallel(nn.Linear(3, 3), compression=HOW)
    with pytest.raises(InvalidArgumentError, match="parameters"):
        ddp.load_compression_state_dict(state)
    ddp = DistributedDataParallel(model(), bucket_mb=100, strategy="overlap", compression=HOW)
    with pytest.raises(InvalidArgumentError, match="other buckets"):
        ddp.load_compression_state_dict(state)


def test_states_of_other_models_are_refused() -> None:
    saved = harness.run(train, "bucketed", range(2), None, True, workers=1, env=TCP)[0][1]
    harness.run(other_model, saved, workers=1, env=TCP)
