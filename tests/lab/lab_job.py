# SPDX-License-Identifier: Apache-2.0
"""A job of lab_worker.py on hosts of the lab, with default settings but for what a test sets."""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
from lab import Host, Process

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
_ports = itertools.count(20100)


class OnHost:
    """A process on a host of the lab, as a member of a job."""

    pid = None

    def __init__(self, process: Process) -> None:
        self.lines = process.lines  # with the moments at which they came
        self.wait, self.kill, self.end = process.wait, process.kill, process.abandon
        self._process = process

    @property
    def status(self) -> int | None:
        return self._process.status

    def output(self) -> str:
        return self._process.text()[-1500:]  # ranks tell of every round


class Job(harness.Members):
    """Ranks on `workers`, each host named equally often; dedicated servers on `servers`, the
    first of which hosts the scheduler, or servers inside the workers. Ends with its `with` block."""

    def __init__(
        self, workers: Sequence[Host], servers: Sequence[Host], *work: object, env: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self.workers, self.servers, self._work = workers, servers, [str(word) for word in work]
        self.ranks = [f"rank {rank}" for rank in range(len(workers))]
        root = (servers or workers)[0].rails[0]
        machines = len({host.index for host in workers})
        self._env = {
            "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT / "tests/shared")]),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(len(workers)),
            "LOCAL_WORLD_SIZE": str(len(workers) // machines),
            "BPS_NUM_WORKERS": str(machines),
            "MASTER_ADDR": root,
            "MASTER_PORT": str(next(_ports)),
            "BPS_JOB_ID": "lab",
            "BPS_SECRET": secrets.token_hex(16),
            "BPS_ROOT_URI": root,
            "BPS_ROOT_PORT": str(next(_ports)),
            "BPS_TRANSPORT": "rdma" if machines == len(workers) else "shm,rdma",
        }
        if servers:
            self._env["BPS_NUM_SERVERS"] = str(len(servers))
        self._env |= env or {}

    def __enter__(self) -> Job:
        if self.servers:
            self._start_helper("scheduler", self.servers[0])
            for index, host in enumerate(self.servers):
                self._start_helper(f"server {index}", host)
        hosts = [host.index for host in self.workers]
        for rank, host in enumerate(self.workers):
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(hosts[:rank].count(host.index)),
                "BPS_WORKER_ID": str(sorted(set(hosts)).index(host.index)),
            }
            script = str(ROOT / "tests/lab/lab_worker.py")
            self.add(self.ranks[rank], OnHost(host.start(sys.executable, script, *self._work, env=self._env | env)))
        return self

    def _start_helper(self, member: str, host: Host) -> None:
        role = member.split(maxsplit=1)[0]
        self.add(member, OnHost(host.start(harness.binary(f"bps-{role}"), env=self._env | {"DMLC_ROLE": role})))

    # ---- What the ranks say

    def events(self, rank: int, kind: str) -> list[dict[str, Any]]:
        """Of one kind: ready, round or error; `at` is the moment when it was heard of here."""
        lines = list(self.processes[self.ranks[rank]].lines)
        found = [{"at": at} | json.loads(line) for at, line in lines if line.startswith("{")]
        return [event for event in found if event["event"] == kind]

    def await_lines(self, pattern: str) -> None:
        """Waits until every rank has written a line that matches."""
        for rank in self.ranks:
            lines = self.processes[rank].lines
            self.eventually(
                lambda lines=lines: any(re.search(pattern, line) for _, line in list(lines)),  # type: ignore[misc]
                what=f"{pattern!r} of {rank}", of=[rank],
            )  # fmt: skip

    def await_round(self, number: int) -> None:
        """Waits until every rank has finished that round."""
        self.await_lines(f'"round": {number},')

    def finish(self, timeout: float = 90) -> None:
        """Waits for everybody, and fails unless all ended as they should, with right sums."""
        self.succeed(timeout)
        ranks = range(len(self.ranks))
        assert [self.events(rank, "error") for rank in ranks] == [[]] * len(self.ranks), self.report()
        wrong = [event for rank in ranks for event in self.events(rank, "round") if event["wrong"]]
        assert wrong == [], self.report()

    def loss(self, rank: int, timeout: float) -> dict[str, Any]:
        """The error with which a rank ended, as an event."""
        found = self.eventually(
            lambda: self.events(rank, "error"), timeout, f"the news of the loss at rank {rank}", [f"rank {rank}"]
        )
        assert found[0]["kind"] == "PeerLostError", found
        return found[0]

    def init_seconds(self) -> float:
        """Of the slowest rank."""
        return max(float(self.events(rank, "ready")[0]["seconds"]) for rank in range(len(self.ranks)))

    def partitions(self) -> set[float]:
        """Per round, as each rank counted them."""
        ranks = range(len(self.ranks))
        return {self.events(rank, "counted")[0]["partitions"] / len(self.events(rank, "round")) for rank in ranks}

    def shares(self) -> list[float]:
        """The part of all sums of each worker, and then of each dedicated server."""
        return list(self.events(0, "counted")[0]["shares"])

    def goodput(self, nbytes: int, skip: int = 2) -> list[float]:
        """Mbit/s of a worker: lower quartile, median, upper quartile of the rounds after the first ones."""
        by_rank = [[event["seconds"] for event in self.events(rank, "round")] for rank in range(len(self.ranks))]
        slowest = [max(times) for times in zip(*by_rank, strict=True)][skip:]
        return sorted(nbytes * 8 / 1e6 / seconds for seconds in statistics.quantiles(slowest, n=4))
