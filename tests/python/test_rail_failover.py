# SPDX-License-Identifier: Apache-2.0
"""A network interface that fails in the middle of a job, over TCP: two namespaces that two networks join.

It costs a moment and no round, no byte changes that should not, and the interface is used again when it is back.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cluster
import network
import numpy as np
import pytest
from test_rails import FIRST, MEMBERS, MIB, SECOND, enter, sent

PAD = 1024  # words around an array, which nobody may write to
HELD = 4  # results that must stay what they were after the call
WORDS = MIB  # of an array: eight partitions
SMALL = 16  # arrays of 4 KiB that are under way beside it


@pytest.fixture
def networks() -> Iterator[network.Network]:
    if reason := network.why_not():
        pytest.skip(f"no network namespaces here: {reason}")
    with network.Network(MEMBERS) as made:
        yield made


def expected(number: int) -> int:
    return 2 * (number % 1000) + 1  # of two ranks


def rounds_until_told(bps: Any, namespaces: list[str], folder: str) -> dict[str, Any]:
    """Sums until the file `stop` exists. For each round: when it began, and what had been sent by then."""
    enter(namespaces[int(os.environ["RANK"])])
    bps.init()
    rank = bps.rank()
    told = Path(folder, "stop")
    blocks = [np.full(WORDS + 2 * PAD, -7, np.float32) for _ in range(HELD)]
    held: dict[int, tuple[np.ndarray, int]] = {}
    log: list[tuple[float, dict[str, int]]] = []
    try:
        for number in range(1_000_000):
            block = blocks[number % HELD]
            array = block[PAD:-PAD]
            array[:] = rank + number % 1000
            small = [np.full(1024, rank + number % 1000 + i, np.float32) for i in range(SMALL)]
            log.append((time.monotonic(), sent()))
            handles = [bps.push_pull_async(one, average=False, name=f"s{i}") for i, one in enumerate(small)]
            bps.push_pull_inplace(array, average=False, name="x")
            sums = [handle.wait() for handle in handles]
            assert (array == expected(number)).all()
            for i, one in enumerate(sums):
                assert (one == expected(number) + 2 * i).all()
            held[number % HELD] = (array, expected(number))
            for result, value in held.values():
                assert (result == value).all(), "changed after its call had returned"
            for one in blocks:
                assert (one[:PAD] == -7).all()
                assert (one[-PAD:] == -7).all()
            if rank == 0:
                Path(folder, "next").write_text(str(number))
                Path(folder, "next").rename(Path(folder, "round"))  # never seen half written
            over = bps.push_pull(np.array([float(rank == 0 and told.exists())]), average=False, name="stop")
            if over[0] > 0:
                break
        return {"log": log, "counters": bps.metrics()["total"]}
    finally:
        bps.shutdown()


class Running:
    """The job, and what the test does to its network meanwhile."""

    def __init__(self, job: cluster.Job, folder: Path) -> None:
        self.job = job
        self.folder = folder

    def round(self) -> int:
        try:
            return int((self.folder / "round").read_text())
        except FileNotFoundError:
            return -1

    def more(self, rounds: int) -> None:
        """Returns when so many more rounds are over."""
        before = self.round()
        self.until(lambda: self.round() >= before + rounds)

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + 60 * cluster.PATIENCE
        while not holds():
            if time.monotonic() > end or any(rank.exitcode is not None for rank in self.job.ranks):
                self.job.results(timeout=1)
                raise AssertionError("nothing went on")
            time.sleep(0.01)

    def until_all_say(self, pattern: str) -> None:
        """Returns when each rank has logged it: the worker of its rail to the other one's server."""
        said = re.compile(pattern)
        self.until(lambda: all(said.search(self.job.log(f"rank {rank}")) for rank in range(2)))

    def results(self) -> list[dict[str, Any]]:
        (self.folder / "stop").touch()
        return list(self.job.results())


@pytest.fixture
def start(networks, tmp_path):
    jobs = []

    def begin(**env: str) -> Running:
        common = {
            "BPS_TRANSPORT": "tcp",
            "BPS_INTERFACE": f"{FIRST},{SECOND}",
            "BYTEPS_PUSH_THREAD": "1",
            "BYTEPS_SERVER_ENGINE_THREAD": "1",
            "BPS_LOG_LEVEL": "info",
            "BPS_HEARTBEAT_TIMEOUT": "30",  # of the scheduler, which may be reached by the interface that fails
            "MASTER_ADDR": networks.address(MEMBERS[0], FIRST),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            **env,
        }
        namespaces = [networks.namespace(member) for member in MEMBERS]
        job = cluster.start(rounds_until_told, namespaces, str(tmp_path), workers=2, env=common, init=False)
        jobs.append(job)
        running = Running(job.__enter__(), tmp_path)
        running.until(lambda: running.round() >= 10)
        return running

    yield begin
    for job in jobs:
        job.__exit__(None, None, None)


def carried(log: list[Any], since: float) -> dict[str, int]:
    """Bytes that left by each interface in the rounds that began after `since`."""
    sent_then = [one for began, one in log if began > since]
    return {name: sent_then[-1][name] - sent_then[0][name] for name in sent_then[0]}


def longest(results: list[dict[str, Any]]) -> float:
    """What the slowest round took beyond the usual, with what the test itself does after it."""
    durations = np.concatenate([np.diff([began for began, _ in result["log"]]) for result in results])
    return float(durations.max() - np.median(durations))


Act = Callable[[network.Network], None]
FAILURES: dict[str, tuple[Act, Act]] = {
    "link down": (lambda n: n.set_link(MEMBERS[1], SECOND, "down"), lambda n: n.set_link(MEMBERS[1], SECOND, "up")),
    "silent": (lambda n: n.cut(MEMBERS[1], SECOND, "both"), lambda n: n.mend(SECOND)),
    "nothing goes out": (lambda n: n.cut(MEMBERS[1], SECOND, "out"), lambda n: n.mend(SECOND)),
    "nothing comes in": (lambda n: n.cut(MEMBERS[1], SECOND, "in"), lambda n: n.mend(SECOND)),
    "the first": (lambda n: n.set_link(MEMBERS[1], FIRST, "down"), lambda n: n.set_link(MEMBERS[1], FIRST, "up")),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_an_interface_fails_and_comes_back(networks, start, failure):
    fail, mend = FAILURES[failure]
    running = start()
    fail(networks)
    running.until_all_say("a rail to .* is lost: .*; the other rails are used")
    lost_at = time.monotonic()
    running.more(30)
    survived_at = time.monotonic()
    mend(networks)
    lost, left = (FIRST, SECOND) if failure == "the first" else (SECOND, FIRST)
    running.until_all_say("a connection to .* that was lost is back")
    back_at = time.monotonic()
    running.more(30)
    results = running.results()
    repeated = sum(result["counters"]["repeated"] for result in results)  # perhaps only control messages were under way
    print(
        f"{failure}: the longest round took {longest(results):.2f} s more than the others, {repeated} writes repeated"
    )
    assert longest(results) < 5 * cluster.PATIENCE, "about 0.7 s on a quiet machine"
    for result in results:
        assert result["counters"]["paths_lost"] >= 1
        used = carried([entry for entry in result["log"] if entry[0] < survived_at], lost_at)
        assert used[lost] < used[left] / 10, "the other one carries everything"
        used = carried(result["log"], back_at)
        assert used[lost] > 0.25 * used[left], "it is used again"


def test_an_interface_that_flaps(networks, start):
    running = start()
    for _ in range(4):
        networks.set_link(MEMBERS[1], SECOND, "down")
        running.more(5)
        networks.set_link(MEMBERS[1], SECOND, "up")
        running.more(5)
    results = running.results()
    print(f"flaps: the longest round took {longest(results):.2f} s more than the others")


def test_a_rank_that_is_stopped_for_a_while_loses_no_rail(start):
    running = start()
    running.job.kill("rank 1", signal.SIGSTOP)
    time.sleep(2)  # bytes for it wait; longer than a rail may be silent
    running.job.kill("rank 1", signal.SIGCONT)
    running.more(10)
    assert [result["counters"]["paths_lost"] for result in running.results()] == [0, 0]


def test_the_last_interface_is_an_error(networks, start):
    running = start(BPS_HEARTBEAT_TIMEOUT="3")
    for interface in (FIRST, SECOND):
        networks.set_link(MEMBERS[1], interface, "down")
    with pytest.raises(cluster.JobFailedError, match="PeerLostError"):
        running.job.results()
