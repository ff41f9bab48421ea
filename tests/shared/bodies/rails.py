# SPDX-License-Identifier: Apache-2.0
"""Two network interfaces of each host, and a job of two ranks that sums while they fail and come back."""

import ctypes
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import network

MEMBERS = network.PAIR
FIRST, SECOND = network.PLANES  # the names of the interfaces
MIB = 1 << 20
_NEW_NETWORK = 0x40000000


def enter(namespace: str) -> None:
    """Before any thread is started: this process lives in that network namespace from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(namespace, os.O_RDONLY)
    if libc.setns(file, _NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(file)


def sent() -> dict[str, int]:
    """Bytes that have left each interface of this namespace."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    fields = {line.split(":")[0].strip(): line.split(":")[1].split() for line in lines}
    return {name: int(fields[name][8]) for name in (FIRST, SECOND)}


def shape(networks: network.Network, interface: str, mbit: int) -> None:
    """From now on an interface carries so much per second, which its driver does not tell."""
    for member in MEMBERS:
        bucket = ["rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms"]
        command = ["tc", "qdisc", "add", "dev", interface, "root", "tbf", *bucket]
        subprocess.run([*networks.inside(member), *command], check=True)


PAD = 1024  # words around an array, which nobody may write to
HELD = 4  # results that must stay what they were after the call
WORDS = 1 << 20  # of an array: several partitions
SMALL = 16  # arrays of 4 KiB that are under way beside it


def expected(number: int) -> int:
    return 2 * (number % 1000) + 1  # of two ranks


def rounds_until_told(bps: Any, folder: str, sent: Callable[[], dict[str, int]], words: int = WORDS) -> dict[str, Any]:
    """Sums until the file `stop` exists. For each round: when it began, and what each rail had sent by then."""
    bps.init()
    rank = bps.rank()
    told = Path(folder, "stop")
    blocks = [np.full(words + 2 * PAD, -7, np.float32) for _ in range(HELD)]
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

    def __init__(self, job: harness.Job, folder: Path) -> None:
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
        self.job.eventually(lambda: self.round() >= before + rounds, what=f"round {before + rounds}", of=self.job.ranks)

    def until_all_say(self, pattern: str, times: int = 1) -> None:
        """Returns when each rank has logged it so often: the worker of its rail to the other one's server."""
        said = re.compile(pattern)
        self.job.eventually(
            lambda: all(len(said.findall(self.job.log(rank))) >= times for rank in self.job.ranks),
            what=f"{pattern!r} in each log", of=self.job.ranks,
        )  # fmt: skip

    def results(self) -> list[dict[str, Any]]:
        (self.folder / "stop").touch()
        return list(self.job.results())


Start = Callable[..., Running]


def carried(log: list[Any], since: float) -> dict[str, int]:
    """Bytes that left by each interface in the rounds that began after `since`."""
    sent_then = [one for began, one in log if began > since]
    return {name: sent_then[-1][name] - sent_then[0][name] for name in sent_then[0]}


def longest(results: list[dict[str, Any]]) -> float:
    """What the slowest round took beyond the usual, with what the test itself does after it."""
    durations = np.concatenate([np.diff([began for began, _ in result["log"]]) for result in results])
    return float(durations.max() - np.median(durations))


@contextmanager
def jobs(folder: Path, body: Callable[..., Any], *args: Any, env: Mapping[str, str], **options: Any) -> Iterator[Start]:
    """Starts jobs of this body with one loop of each kind, when it is asked to, and ends them with the block."""
    with ExitStack() as stack:

        def start(**more: str) -> Running:
            common = {
                "BYTEPS_PUSH_THREAD": "1", "BYTEPS_SERVER_ENGINE_THREAD": "1", "BPS_LOG_LEVEL": "info", **env, **more
            }  # fmt: skip
            job = harness.start(body, *args, str(folder), workers=2, env=common, init=False, **options)
            running = Running(stack.enter_context(job), folder)
            running.more(10)
            return running

        yield start


LOST, BACK = "a rail to .* is lost: .*; the other rails are used", "a connection to .* that was lost is back"


def fails_and_comes_back(
    running: Running, fail: Callable[[], object], mend: Callable[[], object], lost: str, left: str, rounds: int
) -> None:
    """What must hold when the rail `lost` fails, and is mended some rounds later.

    On a quiet machine no round takes a second more. One that waited for the heartbeat would be an error of the job.
    """
    fail()
    running.until_all_say(LOST)
    lost_at = time.monotonic()
    running.more(rounds)
    survived_at = time.monotonic()
    mend()
    running.until_all_say(BACK)
    back_at = time.monotonic()
    running.more(rounds)
    results = running.results()
    repeated = sum(result["counters"]["repeated"] for result in results)  # perhaps only control messages were under way
    print(f"the longest round took {longest(results):.2f} s more than the others, {repeated} writes repeated")
    for result in results:
        assert result["counters"]["paths_lost"] >= 1
        used = carried([entry for entry in result["log"] if entry[0] < survived_at], lost_at)
        assert used[lost] < used[left] / 10, "the other one carries everything"
        used = carried(result["log"], back_at)
        assert used[lost] > used[left] / 20, "it is used again"
