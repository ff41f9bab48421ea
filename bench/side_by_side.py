# SPDX-License-Identifier: Apache-2.0
"""What comparisons have in common: ranks of a program, jobs that wait for their turn, and figures with quartiles."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bps_rdma.launch.environment import LocalJob, find_binary


def said_by_ranks(job: LocalJob, words: Sequence[str], **settings: str) -> list[Any]:
    """Starts this program as each rank of the job, with these words, and returns what each prints last, as JSON."""
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | settings
    ranks = [
        subprocess.Popen([sys.executable, sys.argv[0], *words], env=job.worker(rank) | env, stdout=subprocess.PIPE)
        for rank in range(job.workers)
    ]
    texts = [rank.communicate()[0].decode() for rank in ranks]
    if any(rank.returncode != 0 for rank in ranks):
        sys.exit("error: a rank failed")
    return [json.loads(text.splitlines()[-1]) for text in texts]


def slowest(times: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """The times of the slowest rank, by name and round, of those of each rank."""
    return {name: [max(each) for each in zip(*(one[name] for one in times), strict=True)] for name in times[0]}


def ratios(above: Iterable[float], below: Iterable[float]) -> list[float]:
    """Of neighbouring rounds."""
    return [a / b for a, b in zip(above, below, strict=True)]


def quartiles(values: Iterable[float]) -> str:
    """The median, and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


class Job:
    """One server, and workers that say when they are ready, and then answer each line of JSON by another one.

    Args:
        job: how many workers, and over which transport.
        words: with which this program is such a worker.
        settings: of all members.
        hosts: a letter for the host on which each worker believes it is; "": on one.
    """

    def __init__(self, job: LocalJob, words: Sequence[str], settings: Mapping[str, str], hosts: str = "") -> None:
        self.others = [
            subprocess.Popen([find_binary(f"bps-{role}")], env=job.role(role) | settings)
            for role in ("scheduler", "server")
        ]
        self.workers = [
            subprocess.Popen(
                [sys.executable, sys.argv[0], *words],
                env=job.worker(rank) | settings | ({"BPS_HOST_ID": hosts[rank]} if hosts else {}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(job.workers)
        ]
        assert self._answers() == ["ready"] * job.workers

    def ask(self, command: Any) -> list[Any]:
        """What each worker answers."""
        for process in self.workers:
            assert process.stdin
            print(json.dumps(command), file=process.stdin, flush=True)
        return self._answers()

    def _answers(self) -> list[Any]:
        found = []
        for process in self.workers:
            assert process.stdout
            line = process.stdout.readline()
            if not line:
                sys.exit("error: a worker has ended")
            found.append(json.loads(line))
        return found

    def end(self) -> None:
        """Waits until all members have ended."""
        for process in self.workers:
            assert process.stdin
            process.stdin.close()
        for process in (*self.workers, *self.others):
            process.wait(30)
