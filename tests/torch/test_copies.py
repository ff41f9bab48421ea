# SPDX-License-Identifier: Apache-2.0
"""Copies of what synchronises gradients: they work as those of torch, and are trained for themselves."""

import copy
import io
from collections.abc import Callable
from typing import Any

import harness
import torch
import training
from torch import nn

from bps_rdma.torch import CrossBarrier, DiLoCo, DistributedDataParallel, DistributedOptimizer, ShardedOptimizer

Made = tuple[nn.Module, Any]  # the module to call, its optimizer


def saved(value: Any) -> Any:
    """As another process would load it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def makes(bps: Any) -> dict[str, Callable[[nn.Module], Made]]:
    def adam(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def sharded(model: nn.Module) -> Made:
        return DistributedDataParallel(model), ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)

    return {
        "ddp": lambda model: (DistributedDataParallel(model), adam(model)),
        "ddp overlap": lambda model: (DistributedDataParallel(model, strategy="overlap", group=bps.new_group([0, 1])),
                                      adam(model)),
        "sharded": sharded,
        "optimizer": lambda model: (model, DistributedOptimizer(adam(model), model.named_parameters())),
        "passes": lambda model: (model, DistributedOptimizer(adam(model), None, backward_passes_per_step=2)),
        "cross barrier": lambda model: (model, CrossBarrier(model, adam(model))),
        "diloco": lambda model: (model, DiLoCo(adam(model), model.named_parameters(), every=2)),
    }  # fmt: skip


def passes_of(name: str) -> int:
    return 2 if name == "passes" else 1


def step(name: str, made: Made, x: torch.Tensor) -> None:
    model, optimizer = made
    optimizer.zero_grad()
    for part in x.chunk(passes_of(name)):
        (training.loss_of(model(part)) / passes_of(name)).backward()
    optimizer.step()


def settled(name: str, made: Made) -> Made:
    if name in ("cross barrier", "diloco"):
        made[1].synchronize()
    return made


@harness.on_ranks(workers=2)
def test_a_copy_is_trained_by_itself(bps: Any) -> None:
    """An original and its copy are trained by turns, each on its own batches, as two in one process are."""
    for way in (copy.deepcopy, saved):
        for name, make in makes(bps).items():
            reference: Made = (training.seeded(training.Plain), None)
            reference = reference[0], torch.optim.AdamW(reference[0].parameters(), lr=0.01)
            original = make(training.seeded(training.Plain))
            for number in range(4):
                step(name, reference, training.batch(number))
                step(name, original, training.share_of(bps, number))
            both = [original, way(settled(name, original))]
            references = [reference, copy.deepcopy(reference)]
            for number in range(4, 8):
                for which in (0, 1):
                    at = number + 10 * which
                    step(name, references[which], training.batch(at))
                    step(name, both[which], training.share_of(bps, at))
            for which in (0, 1):
                model = settled(name, both[which])[0]
                model = getattr(model, "module", model)
                assert training.same_everywhere(bps, model), (name, way)
                if name != "diloco":
                    assert training.distance(references[which][0], model) < 1e-4, (name, way, which)
            first, second = (getattr(made[0], "module", made[0]) for made in both)
            assert training.distance(first, second) > 1e-3, (name, way)


@harness.on_ranks(workers=2)
def test_a_copy_has_names_of_its_own(bps: Any) -> None:
    model = training.seeded(training.Plain)
    original = DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), every=1)
    both = [original, copy.deepcopy(original)]
    for optimizer in both:
        optimizer.step()
    assert both[0]._fragments[0].name != both[1]._fragments[0].name


@harness.on_ranks(workers=2, env={"BPS_ASYNC": "1"})
def test_a_copy_of_weights_that_servers_keep(bps: Any) -> None:
    """The weights of a copy are not those of the original, on the servers either; each has a rank's change."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer: Any = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    assert optimizer.compression_state_dict() == {}
    optimizer.load_compression_state_dict({})
    for way in (copy.deepcopy, saved):
        made = way((model, optimizer))
        for (m, o), by in (((model, optimizer), 1.0), (made, 10.0)):
            m.weight.grad = torch.full((1, 4), by)
            o.step()
        bps.barrier()
        optimizer.unstore_weights()
        made[1].unstore_weights()
        assert torch.equal(made[0].weight, model.weight - 9.0 * bps.size())
        optimizer.store_weights()


@harness.on_ranks(workers=2)
def test_a_copy_on_one_rank(bps: Any) -> None:
    """A copy that one rank keeps, as of the mean weights or for a checkpoint, and evaluates: others need not know."""
    from torch.optim.swa_utils import AveragedModel

    for name, make in makes(bps).items():
        model, optimizer = make(training.seeded(training.Images if name == "ddp" else training.Plain))
        kept: list[Any] = []
        for number in range(4):
            step(name, (model, optimizer), training.batch(number + 10 * bps.rank()))
            if bps.rank() == 1:
                settled(name, (model, optimizer))
                before = bps.metrics()["total"]["operations"]
                if not kept:
                    kept = [AveragedModel(model), copy.deepcopy(model), saved(model), saved((model, optimizer))[0]]
                kept[0].update_parameters(model)
                for each in kept:
                    each.eval()
                    with torch.no_grad():
                        assert each(training.batch(0)).shape == (training.SAMPLES, 4)
                assert bps.metrics()["total"]["operations"] == before
            elif name == "diloco" or name == "cross barrier":
                settled(name, (model, optimizer))


@harness.on_ranks(workers=2)
def test_a_copy_without_a_job(bps: Any) -> None:
    """What was saved is loaded and evaluated, and stepped, by a process alone."""
    made = makes(bps)
    files = [saved(settled(name, make(training.seeded(training.Plain)))) for name, make in made.items()]
    bps.shutdown()
    for name, (model, optimizer) in zip(made, [copy.deepcopy(each) for each in files], strict=True):
        model(training.batch(0)).sum()
        assert optimizer.param_groups[0]["lr"] == 0.01, name
        optimizer.zero_grad()
