# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a comparison and lets the methods take turns."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import bps_rdma
from bps_rdma.errors import BpsError
from bps_rdma.launch.environment import LocalJob
from bps_rdma.launch.process import Children
from bps_rdma.launch.run import spawn_helpers
from bps_rdma.tools.compare import member
from bps_rdma.tools.compare.baselines import ALONE, SYNCS, TrainingMethod
from bps_rdma.tools.compare.memory import Bytes
from bps_rdma.tools.ranks import Ranks

_ANSWER_SECONDS = 600.0
WARMUP = 3  # steps: the first one touches new memory, the second one rebuilds buckets
# With more than two ranks, methods add the same numbers in different orders.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Comparison:
    """One comparison: a model, its ranks, and the methods.

    Attributes:
        model: one of models.MODELS.
        samples, length: of a rank's batch: number of samples, and tokens per sample.
        rounds: number of turns of every method.
        steps: timed training steps in one turn.
        threads: of torch in each rank.
        device: cpu; or cuda: one after the other, ranks take the GPUs that there are.
        optimizer: one of baselines.OPTIMIZERS.
        profiles: folder for a trace of each method and rank; None: none are made.
    """

    model: str
    samples: int
    length: int
    ranks: int
    rounds: int
    steps: int
    threads: int
    methods: tuple[TrainingMethod, ...]
    kinds: tuple[str, ...] = field(default=())
    device: str = "cpu"
    optimizer: str = "sgd"
    profiles: Path | None = None


@dataclass(frozen=True)
class Times:
    """Measurements.

    Attributes:
        seconds: seconds[method][round] lists the steps of a turn, each with the time of the slowest rank.
        memory: bytes that a training holds on the rank that holds most; see memory.py.
    """

    plan: Comparison
    parameters: int
    seconds: dict[TrainingMethod, list[list[float]]]
    memory: dict[TrainingMethod, Bytes] = field(default_factory=dict)


def run_comparison(plan: Comparison, job: LocalJob, listener: Callable[[str, float], None]) -> Times:
    """Run all rounds. Each starts with another method, so that no method always follows the same one.

    Raises BpsError when a rank fails, or the weights of two methods differ.
    """
    seconds: dict[TrainingMethod, list[list[float]]] = {one: [] for one in plan.methods}
    digests: dict[TrainingMethod, list[float]] = {}
    memory: dict[TrainingMethod, Bytes] = {}
    with Children() as children:
        spawn_helpers(children, job)
        ranks = _start(children, plan, job)
        parameters = ranks.gather()[0]["parameters"]
        done, total = 0, plan.rounds * len(plan.methods)
        for number in range(plan.rounds):
            turn = number % len(plan.methods)
            for method in plan.methods[turn:] + plan.methods[:turn]:
                listener(f"round {number + 1} of {plan.rounds}: {method.label}", done / total)
                answers = ranks.request(do="turn", steps=plan.steps, warmup=WARMUP, **asdict(method))
                seconds[method].append([max(of) for of in zip(*(a["seconds"] for a in answers), strict=True)])
                held = [answer["memory"] for answer in answers]
                memory[method] = {what: max(one[what] for one in held) for what in held[0]}
                if method.kind not in (ALONE, *SYNCS.values()):
                    for rank, answer in enumerate(answers):
                        _check(method, rank, answer["digest"], digests)
                done += 1
        if plan.profiles is not None:
            _record(plan, plan.profiles, ranks, listener)
        ranks.request(do="end")
        while children.running and (ended := children.wait(60.0)):
            for child in ended:
                if child.status:
                    raise BpsError(child.describe_end(), "see its output above")
    return Times(plan, parameters, seconds, memory)


def _record(plan: Comparison, folder: Path, ranks: Ranks, listener: Callable[[str, float], None]) -> None:
    for method in plan.methods:
        if method.kind in SYNCS.values():
            continue
        listener(f"profile of {method.label}", 1.0)
        stem = str(folder.absolute() / method.label.replace(" ", "-"))
        ranks.request(do="record", steps=plan.steps, warmup=WARMUP, stem=stem, **asdict(method))


def _start(children: Children, plan: Comparison, job: LocalJob) -> Ranks:
    ranks = Ranks(children, _ANSWER_SECONDS)
    told = ("model", "samples", "length", "threads", "kinds", "device", "optimizer")
    said = json.dumps({name: getattr(plan, name) for name in told})
    for rank in range(plan.ranks):
        ours, theirs = socket.socketpair()
        env = job.worker(rank) | {member.CHANNEL: str(theirs.fileno()), member.PLAN: said}
        env |= {"OMP_NUM_THREADS": str(plan.threads)}
        env.setdefault("KINETO_LOG_LEVEL", "9")  # torch's profiler tells on stderr when it starts and stops
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo resolves the host name, which may fail
        root = str(Path(bps_rdma.__file__).parent.parent)
        code = (
            f"import sys; sys.path = [p for p in sys.path if p] + [{root!r}]; "
            f"from {member.__name__} import main; main()"
        )
        ranks.add(children.spawn(f"rank {rank}", [sys.executable, "-c", code], env, [theirs.fileno()]), ours)
        theirs.close()
    return ranks


def _check(method: TrainingMethod, rank: int, digest: list[float], digests: dict[TrainingMethod, list[float]]) -> None:
    """Check that all methods, on all ranks, have reached the same weights."""
    for other, expected in digests.items():
        worst = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(digest, expected, strict=True))
        if worst > _TOLERANCE:
            raise BpsError(
                f"the weights of {method.label!r} on rank {rank} differ from those of {other.label!r} by {worst:.2g}",
                "one of the two does not average gradients correctly; please report it",
            )
    digests.setdefault(method, digest)
