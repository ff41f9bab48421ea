"""Starts the ranks of a comparison and drives them, turn by turn."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import bps_rdma
from bps_rdma.bench.ranks import Ranks
from bps_rdma.errors import BpsError
from bps_rdma.launch.environment import LocalJob
from bps_rdma.launch.process import Children
from bps_rdma.launch.run import spawn_helpers
from bps_rdma.torch.compare import member
from bps_rdma.torch.compare.contenders import ALONE, SYNCS, Contender

_ANSWER_SECONDS = 600.0
_WARMUP = 3  # steps: the first meets new memory, the second rebuilds buckets
# Sums of the same numbers in another order; only with more than two ranks do the contenders differ in that.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Plan:
    """What is compared.

    Attributes:
        model: one of models.MODELS.
        samples, length: of a rank's batch: samples of so many words.
        rounds: how often every contender has its turn.
        steps: of training in one turn, timed.
        threads: of torch in each rank.
    """

    model: str
    samples: int
    length: int
    ranks: int
    rounds: int
    steps: int
    threads: int
    contenders: tuple[Contender, ...]
    kinds: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Times:
    """What was measured: seconds[contender][round] are the steps of a turn, the slowest rank's each."""

    plan: Plan
    parameters: int
    seconds: dict[Contender, list[list[float]]]


def run_comparison(plan: Plan, job: LocalJob, listener: Callable[[str, float], None]) -> Times:
    """All rounds; each begins with another contender, so that nobody always follows the same one.

    Raises BpsError when a rank fails, or the weights of two contenders differ.
    """
    seconds: dict[Contender, list[list[float]]] = {one: [] for one in plan.contenders}
    digests: dict[Contender, list[float]] = {}
    with Children() as children:
        spawn_helpers(children, job)
        ranks = _start(children, plan, job)
        parameters = ranks.hear()[0]["parameters"]
        done, total = 0, plan.rounds * len(plan.contenders)
        for number in range(plan.rounds):
            turn = number % len(plan.contenders)
            for contender in plan.contenders[turn:] + plan.contenders[:turn]:
                listener(f"round {number + 1} of {plan.rounds}: {contender.label}", done / total)
                answers = ranks.ask(do="turn", steps=plan.steps, warmup=_WARMUP, **asdict(contender))
                seconds[contender].append([max(of) for of in zip(*(a["seconds"] for a in answers), strict=True)])
                if contender.kind not in (ALONE, *SYNCS.values()):
                    for rank, answer in enumerate(answers):
                        _check(contender, rank, answer["digest"], digests)
                done += 1
        ranks.ask(do="end")
        while children.running and (ended := children.wait(60.0)):
            for child in ended:
                if child.status:
                    raise BpsError(child.describe_end(), "what it wrote before is above")
    return Times(plan, parameters, seconds)


def _start(children: Children, plan: Plan, job: LocalJob) -> Ranks:
    ranks = Ranks(children, _ANSWER_SECONDS)
    said = json.dumps({name: getattr(plan, name) for name in ("model", "samples", "length", "threads", "kinds")})
    for rank in range(plan.ranks):
        ours, theirs = socket.socketpair()
        env = job.worker(rank) | {member.CHANNEL: str(theirs.fileno()), member.PLAN: said}
        env |= {"OMP_NUM_THREADS": str(plan.threads)}
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo otherwise looks up this host's name, which may have none
        root = str(Path(bps_rdma.__file__).parent.parent)
        code = (
            f"import sys; sys.path = [p for p in sys.path if p] + [{root!r}]; "
            f"from {member.__name__} import main; main()"
        )
        ranks.add(children.spawn(f"rank {rank}", [sys.executable, "-c", code], env, [theirs.fileno()]), ours)
        theirs.close()
    return ranks


def _check(contender: Contender, rank: int, digest: list[float], digests: dict[Contender, list[float]]) -> None:
    """All contenders, and all ranks, must have come to the same weights."""
    for other, expected in digests.items():
        worst = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(digest, expected, strict=True))
        if worst > _TOLERANCE:
            raise BpsError(
                f"weights of {contender.label!r} on rank {rank} are {worst:.2g} off those of {other.label!r}",
                "one of the two does not average gradients as it should: please report it",
            )
    digests.setdefault(contender, digest)
