# SPDX-License-Identifier: Apache-2.0
"""Models in bfloat16 and float16 whose gradients travel compressed."""

import functools
import io
from typing import Any

import harness
import pytest
import simulated
import torch
from torch import nn

from bps_rdma import Compression, Int4, Int8, TopK
from bps_rdma.torch import DistributedDataParallel, DistributedOptimizer, broadcast_parameters

TCP = {"BPS_TRANSPORT": "tcp", "BPS_MIN_COMPRESS_BYTES": "1024"}
FACES = ("bucketed", "overlap", "optimizer")


def wrapped(face: str, model: nn.Module, optimizer: torch.optim.Optimizer, compression: Any) -> tuple[Any, Any, Any]:
    """(what is called, what steps, what has the state of compression)."""
    options = {} if compression is None else {"compression": compression}
    if face == "optimizer":
        made = DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)
        return model, made, made
    ddp = DistributedDataParallel(model, strategy=face, **options)
    return ddp, optimizer, ddp


def trained(bps: Any, face: str, dtype: str, compression: Any) -> tuple[float, int]:
    """The last loss, and the bytes that this rank has sent in a step."""
    half = getattr(torch, dtype)
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)).to(half)
    broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    forward, stepped, _ = wrapped(face, model, optimizer, compression)
    generator = torch.Generator().manual_seed(bps.rank())
    bps.barrier()
    before = bps.metrics()["total"]["data_bytes"]
    steps = 300
    for _ in range(steps):
        x = torch.randn(32, 64, generator=generator)
        stepped.zero_grad()
        nn.functional.mse_loss(forward(x.to(half)).float(), teacher(x).detach()).backward()
        stepped.step()
    sent = bps.metrics()["total"]["data_bytes"] - before
    everybody = bps.all_gather(torch.cat([one.detach().flatten() for one in model.parameters()])).view(bps.size(), -1)
    assert torch.equal(everybody[0], everybody[-1]), "replicas drift apart"
    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(7))
    return float(nn.functional.mse_loss(model(x.to(half)).float(), teacher(x))), sent // steps


@functools.cache
def plain(face: str, dtype: str) -> list[tuple[float, int]]:
    return harness.run(trained, face, dtype, None, workers=2, servers=1, env=TCP)


METHODS = ((Int8(), 0.55), (TopK(k=0.1, feedback=True), 0.45), (Int4(feedback=True), 0.3))


def forms() -> list[Any]:
    """Each face and each method once; all pairs of them, and float16, are for `ci/test --all`."""
    short = {(face, method[0], "bfloat16") for face, method in zip(FACES, METHODS, strict=True)}
    return [
        pytest.param(
            face,
            *method,
            dtype,
            marks=[] if (face, method[0], dtype) in short else pytest.mark.long,
            id=f"{face}-{method[0].text}-{dtype}",
        )
        for face in FACES
        for method in METHODS
        for dtype in ("bfloat16", "float16")
    ]


@pytest.mark.parametrize(("face", "compression", "ratio", "dtype"), forms())
def test_training_reaches_about_the_same_loss_with_fewer_bytes(
    face: str, compression: Compression, ratio: float, dtype: str
) -> None:
    as_it_is = plain(face, dtype)
    compressed = harness.run(trained, face, dtype, compression, workers=2, servers=1, env=TCP)
    untrained = 0.15  # a model that says zero
    assert as_it_is[0][0] < untrained / 5
    assert compressed[0][0] < as_it_is[0][0] + untrained / 20, (as_it_is, compressed)
    for (_, sent), (_, plainly) in zip(compressed, as_it_is, strict=True):
        assert sent < ratio * plainly, (compressed, as_it_is)


def some_steps(bps: Any, face: str, staged: bool, which: range, saved: list[bytes] | None) -> tuple[bytes, bytes]:
    if staged:
        simulated.install(immediate=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 30)).to(torch.bfloat16)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    forward, stepped, compressed = wrapped(face, net, optimizer, TopK(k=0.05, feedback=True, momentum=0.5))
    if saved is not None:
        state = torch.load(io.BytesIO(saved[bps.rank()]), weights_only=True)
        net.load_state_dict(state["model"])
        compressed.load_compression_state_dict(state["compression"])
    for step in which:
        torch.manual_seed(100 * step + bps.rank())
        stepped.zero_grad()
        forward(torch.randn(8, 40, dtype=torch.bfloat16)).float().square().mean().backward()
        stepped.step()
    file = io.BytesIO()
    remembered = compressed.compression_state_dict()
    pieces = [value for unit in remembered["units"].values() for piece in unit.values() for value in piece.values()]
    assert pieces
    assert {value.dtype for value in pieces} == {torch.float32, torch.int64}
    torch.save({"model": net.state_dict(), "compression": remembered}, file)
    return b"".join(p.detach().view(torch.int16).numpy().tobytes() for p in net.parameters()), file.getvalue()


@pytest.mark.parametrize(
    ("face", "staged"),
    [
        ("bucketed", False),
        ("optimizer", False),
        ("bucketed", True),
        pytest.param("overlap", False, marks=pytest.mark.long),
    ],
)
def test_training_goes_on_bit_by_bit(face: str, staged: bool) -> None:
    """On the CPU, and staged from a device, where each chunk of a bucket is an operation of its own."""
    where: dict[str, Any] = harness.on_hosts("ab") | {"env": TCP | {"BPS_GPU_CHUNK_BYTES": "4096"}}
    whole = harness.run(some_steps, face, staged, range(10), None, **where)
    first = harness.run(some_steps, face, staged, range(5), None, **where)
    second = harness.run(some_steps, face, staged, range(5, 10), [state for _, state in first], **where)
    assert {weights for weights, _ in whole} == {weights for weights, _ in second}


def doubles(bps: Any) -> None:
    model = nn.Linear(200, 200).double()
    forward, _, _ = wrapped("overlap", model, torch.optim.SGD(model.parameters(), 0.1), Int8())
    forward(torch.ones(1, 200).double()).sum().backward()
    assert bps.metrics()["total"]["compressed_bytes"] == 0


def test_gradients_that_are_not_compressed_are_named_once() -> None:
    with harness.start(doubles, workers=2, env=TCP) as running:
        outcomes = running.outcomes()
    said = [line for each in outcomes for line in each.output.splitlines() if "is not compressed" in line]
    assert not any(each.error for each in outcomes), outcomes
    (line,) = said
    assert "'ddp 0.bias' is not compressed by 'int8': it is float64" in line
