"""One rank of a bench that launch.py drives, as a process of its own.

Requests and answers are lines of JSON over the socket whose number is in BPS_BENCH_CHANNEL; nothing about the
measuring goes through the library that is measured. An error is an answer, too: {"error", "hint", "kind"}.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any, TextIO

import bps_rdma
from bps_rdma.bench.bound import Bound
from bps_rdma.bench.contenders import Contender, Ours
from bps_rdma.bench.measure import CaseRunner
from bps_rdma.bench.peers import make_peer
from bps_rdma.bench.plan import Plan
from bps_rdma.errors import BpsError

CHANNEL = "BPS_BENCH_CHANNEL"  # descriptor of the socket
PLAN = "BPS_BENCH_PLAN"  # as JSON
SHARED = "BPS_BENCH_SHARED"  # "descriptor size" of the memory for the bound; absent: no bound


def main() -> None:
    """Serve the launcher until it says `end` or is gone; exits with 1 after an error."""
    channel = socket.socket(fileno=int(os.environ[CHANNEL]))
    with channel, channel.makefile("r") as requests, channel.makefile("w") as answers:
        try:
            _serve(Plan.from_json(os.environ[PLAN]), requests, answers)
        except BpsError as error:
            _answer(answers, error=error.message, hint=error.hint, kind=type(error).__name__)
            sys.exit(1)
        except BrokenPipeError:  # the launcher is gone
            sys.exit(1)


def _serve(plan: Plan, requests: TextIO, answers: TextIO) -> None:
    bps_rdma.init()
    contenders: list[Contender] = [Ours()]
    contenders += [make_peer(name) for name in plan.compare]
    if shared := os.environ.get(SHARED):
        descriptor, size = map(int, shared.split())
        contenders.append(Bound(descriptor, size))
    _answer(answers, routes=bps_rdma.metrics()["transports"])
    runner: CaseRunner | None = None
    for line in requests:
        request = json.loads(line)
        if request["do"] == "case":
            runner = CaseRunner(plan.cases[request["index"]], plan.memory, contenders)
            _answer(answers, ready=request["index"])
        elif request["do"] == "rounds":
            assert runner is not None
            _answer(answers, times=runner.run(request["count"]), checked=runner.checked)
        else:
            break
    bps_rdma.shutdown()
    _answer(answers, ended=True)


def _answer(answers: TextIO, **values: Any) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()
