# SPDX-License-Identifier: Apache-2.0
"""One rank of a benchmark that launch.py drives, as a separate process.

Requests and answers are lines of JSON over the socket whose descriptor is in BPS_BENCH_CHANNEL, so that the library
that is measured carries nothing else. An error is sent as an answer: {"error", "hint", "kind"}.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import bps_rdma
from bps_rdma.errors import BpsError
from bps_rdma.tools.bench.baselines import Implementation, PushPull
from bps_rdma.tools.bench.bound import Bound
from bps_rdma.tools.bench.measure import CaseRunner
from bps_rdma.tools.bench.peers import make_peer
from bps_rdma.tools.bench.plan import MPI_BASELINES, Plan

CHANNEL = "BPS_BENCH_CHANNEL"  # descriptor of the socket; for MPI ranks the path of a socket to connect to
PLAN = "BPS_BENCH_PLAN"  # the plan as JSON
SHARED = "BPS_BENCH_SHARED"  # "descriptor size" of the memory for the upper bound; absent without a bound


def main() -> None:
    """Serve the launcher until it sends `end` or has gone; exits with 1 after an error."""
    plan = Plan.from_json(os.environ[PLAN])

    def join() -> list[Implementation]:
        bps_rdma.init()
        implementations: list[Implementation] = [make_ours(plan)]
        implementations += [make_peer(name) for name in plan.compare if name not in MPI_BASELINES]
        if shared := os.environ.get(SHARED):
            descriptor, size = map(int, shared.split())
            implementations.append(Bound(descriptor, size))
        return implementations

    channel = socket.socket(fileno=int(os.environ[CHANNEL]))
    with channel, channel.makefile("r") as requests, channel.makefile("w") as answers:
        sys.exit(serve(plan, join, requests, answers))


def make_ours(plan: Plan) -> PushPull:
    """bps_rdma, with tensors in the memory that the plan names."""
    if plan.memory != "cuda":
        return PushPull(prepared=plan.prepared)
    from bps_rdma.tools.bench.on_gpu import PushPullOnGpu

    return PushPullOnGpu(prepared=plan.prepared)


def serve(plan: Plan, join: Callable[[], Sequence[Implementation]], requests: TextIO, answers: TextIO) -> int:
    """Answer the launcher's requests with the implementations that `join` returns; returns the exit status."""
    try:
        _serve(plan, join(), requests, answers)
    except BpsError as error:
        _answer(answers, error=error.message, hint=error.hint, kind=type(error).__name__)
    except MemoryError as error:
        _answer(answers, error=f"out of memory: {error}", hint="measure smaller --sizes", kind="MemoryError")
    except BrokenPipeError:  # the launcher has ended
        pass
    else:
        return 0
    return 1


def _serve(plan: Plan, implementations: Sequence[Implementation], requests: TextIO, answers: TextIO) -> None:
    routes = bps_rdma.metrics()["transports"] if bps_rdma.is_initialized() else []
    _answer(answers, routes=routes)
    runner: CaseRunner | None = None
    for line in requests:
        request = json.loads(line)
        if request["do"] == "case":
            runner = CaseRunner(plan.cases[request["index"]], plan.memory, implementations)
            _answer(answers, ready=request["index"])
        elif request["do"] == "rounds":
            assert runner is not None
            _answer(answers, runs=runner.run(request["count"], request.get("only")), checked=runner.checked)
        else:
            break
    bps_rdma.shutdown()
    _answer(answers, ended=True)


def _answer(answers: TextIO, **values: Any) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()
