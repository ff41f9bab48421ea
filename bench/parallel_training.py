# SPDX-License-Identifier: Apache-2.0
"""Compares steps of FSDP2, tensor parallelism and pipelines on the torch backend bps with the same steps on gloo.

    .venv/bin/python bench/parallel_training.py [--rounds 21] [--steps 5] [--width 512] [--ranks 2] [--json FILE]
    PYTHONPATH=.venv/frameworks .venv/bin/python bench/parallel_training.py \\
        --kinds trainer accelerate fabric zero-1 zero-2 zero-3 --steps 10

The models are those of examples/frameworks, but wider. Each is trained twice in the same processes, once over groups of
either backend. Turns of both alternate, and ratios compare neighbouring turns, so that other work on the machine
disturbs both. The time of a turn is that of its slowest rank. With two ranks all losses must be equal, bit for bit.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from side_by_side import ratios, said_by_ranks, slowest

from bps_rdma.launch.environment import LocalJob
from bps_rdma.tools.bench.stats import quantile

EXAMPLES = Path(__file__).parents[1] / "examples" / "frameworks"
KINDS = ("fsdp", "tensor_parallel", "GPipe", "1F1B")
OF_FRAMEWORKS = ("trainer", "accelerate", "fabric", "zero-1", "zero-2", "zero-3")  # in framework_steps.py
BACKENDS = ("bps", "gloo")


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trainer(kind: str, backend: str, width: int) -> Callable[[int], float]:
    """Makes the model of an example over groups of a backend. The result makes the step of a number."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    rank, size = dist.get_rank(), dist.get_world_size()
    if kind == "fsdp":
        fsdp = example(kind)
        model, optimizer = fsdp.make(init_device_mesh("cpu", (size,), mesh_dim_names=("data",),
                                                      backend_override={"data": backend}), width)  # fmt: skip

        def step(number: int) -> float:
            generator = torch.Generator().manual_seed(number * size + rank)
            inputs, targets = torch.randn(32, 8, generator=generator), torch.randn(32, 2, generator=generator)
            return fsdp.step(model, optimizer, inputs, targets)

    elif kind == "tensor_parallel":
        tensor = example(kind)
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"),
                                backend_override={"data": backend, "tensor": backend})  # fmt: skip
        model, optimizer = tensor.make(mesh, width)

        def step(number: int) -> float:
            generator = torch.Generator().manual_seed(number * size + mesh["data"].get_local_rank())
            return tensor.step(model, optimizer, torch.randn(4, 16, width, generator=generator), mesh)

    else:
        pipeline = example("pipeline")
        schedule, optimizer = pipeline.make(kind, width, dist.new_group(backend=backend))
        place = {0: "first", size - 1: "last"}.get(rank, "between")

        def step(number: int) -> float:
            inputs = torch.randn(64, width, generator=torch.Generator().manual_seed(number))
            return pipeline.step(schedule, optimizer, inputs, place)

    return step


def trained_on(kind: str, backend: str, width: int) -> Callable[[range], list[float]]:
    """Makes the model of a kind over a backend. The result makes steps of these numbers, and returns their losses."""
    import torch.distributed as dist

    if kind in KINDS:
        step = trainer(kind, backend, width)
        return lambda numbers: [step(number) for number in numbers]
    import framework_steps

    group = dist.group.WORLD if backend == "bps" else dist.new_group(backend=backend)
    with framework_steps.default_group(group):
        assert dist.get_backend() == backend
        turn = framework_steps.MAKERS[kind](backend, width)

    def on_group(numbers: range) -> list[float]:
        with framework_steps.default_group(group):
            return turn(numbers)

    return on_group


def rank_main(kinds: list[str], rounds: int, steps: int, width: int) -> None:
    import torch.distributed as dist

    import bps_rdma.torch  # noqa: F401  registers the backend

    dist.init_process_group("bps")
    found = []
    for kind in kinds:
        trainers = {backend: trained_on(kind, backend, width) for backend in BACKENDS}
        times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        losses: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        for turn in range(-1, rounds):  # the first one warms up
            numbers = range((turn + 1) * steps, (turn + 2) * steps)
            for backend in BACKENDS if turn % 2 else reversed(BACKENDS):
                dist.barrier()
                begin = time.perf_counter()
                losses[backend] += trainers[backend](numbers)
                if turn >= 0:
                    times[backend].append((time.perf_counter() - begin) / steps)
        assert dist.get_world_size() > 2 or losses["bps"] == losses["gloo"], f"{kind}: losses differ"
        assert len(losses["bps"]) == (rounds + 1) * steps, f"{kind}: {len(losses['bps'])} steps"
        found.append({"kind": kind, "times": times})
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def measure(ranks: int, options: list[str]) -> list[dict[str, Any]]:
    """Seconds per step of the slowest rank, by kind, backend and turn."""
    said = said_by_ranks(LocalJob(workers=ranks), ["--rank-main", *options])
    return [each[0] | {"times": slowest([one["times"] for one in each])} for each in zip(*said, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS + OF_FRAMEWORKS, default=KINDS, help="what is trained")
    parser.add_argument("--ranks", type=int, default=2, help="an even number")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--width", type=int, default=512, help="of the layers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-main", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_main:
        rank_main(options.kinds, options.rounds, options.steps, options.width)
        return
    rows = []
    passed_on = [f"--{name}={getattr(options, name)}" for name in ("rounds", "steps", "width")]
    for found in measure(options.ranks, [*passed_on, "--kinds", *options.kinds]):
        times = found["times"]
        row: dict[str, Any] = {"kind": found["kind"]}
        measured = {f"{backend}_ms": [1e3 * seconds for seconds in times[backend]] for backend in BACKENDS}
        for name, values in {**measured, "ratio": ratios(times["gloo"], times["bps"])}.items():
            row[name] = statistics.median(values)
            row[f"{name}_lower"], row[f"{name}_upper"] = quantile(values, 0.25), quantile(values, 0.75)
        rows.append(row)
        print(
            "{kind:>15}: bps {bps_ms:7.2f} ms ({bps_ms_lower:.2f} to {bps_ms_upper:.2f}), "
            "gloo {gloo_ms:7.2f} ms ({gloo_ms_lower:.2f} to {gloo_ms_upper:.2f}): "
            "{ratio:.2f} times as fast ({ratio_lower:.2f} to {ratio_upper:.2f})".format(**row)
        )
    if options.json:
        said = {"ranks": options.ranks, "rounds": options.rounds, "steps": options.steps, "width": options.width}
        options.json.write_text(json.dumps(said | {"cores": os.cpu_count(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
