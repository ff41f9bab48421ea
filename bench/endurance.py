# SPDX-License-Identifier: Apache-2.0
"""Measures what faults of all kinds cost a training job, in committed steps, beside the same job without faults.

    python bench/endurance.py --minutes 30 --faults 62 --ranks 8 [--json] [--plot FILE]

The job runs under `bps run --min-np 2 --restarts N --servers 3` with BPS_SERVER_FAILOVER. While it trains, ranks,
servers and the scheduler are killed, stopped for a while, or stopped for good and killed later, at instants that the
seed decides; the launcher starts again what was lost. Jobs without faults run before and after it, and have its length
in all. Steps are counted from the moment when all ranks are at work.

Prints the throughput of both; the loss at equal steps, beside the spread of jobs without faults; and for each fault how
long no step was committed, and how much time was lost until the next fault. Fails where ranks end with different
weights, or where the job ends. What the ranks run is bench/endurance_rank.py.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SERVERS = 3
KINDS = (
    "rank killed", "rank stopped for a while", "rank stopped, then killed", "server killed",
    "server stopped for a while", "server stopped, then killed", "scheduler killed",
)  # fmt: skip
SETTLES_S = 2.0  # from the first step to the window in which steps are counted
START_S = 120.0
END_S = 60.0


class Job:
    """A job under `bps run`, and the processes that it consists of."""

    def __init__(self, folder: Path, options: argparse.Namespace, seed: int) -> None:
        self.folder = folder
        self._offset, self._steps = 0, list[tuple[float, int, int]]()
        self.losses: list[tuple[int, float]] = []
        words = [
            str(Path(sys.executable).with_name("bps")), "run", "-np", str(options.ranks), "--min-np", "2",
            "--servers", str(SERVERS), "--restarts", str(2 * options.faults + 5),
            str(Path(__file__).with_name("endurance_rank.py")), str(folder), str(seed),
        ]  # fmt: skip
        if options.transport:
            words[2:2] = ["--transport", options.transport]
        env = os.environ | {
            "BPS_SERVER_FAILOVER": "1", "BPS_HEARTBEAT_TIMEOUT": str(options.heartbeat), "OPENBLAS_NUM_THREADS": "1",
        }  # fmt: skip
        with (folder / "log").open("wb") as log:
            self.launcher = subprocess.Popen(words, env=env, stdout=log, stderr=log, cwd=folder)

    def steps(self) -> list[tuple[float, int, int]]:
        """(when, which, how many ranks) of each step that is committed by now."""
        path = self.folder / "steps"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
            for line in whole.splitlines():
                when, number, size, *loss = line.split()
                self._steps.append((float(when), int(number), int(size)))
                self.losses += [(int(number), float(one)) for one in loss]
            self._offset += len(whole) + bool(whole)
        return self._steps

    def members(self, role: str) -> list[int]:
        """The processes of the job that are a "rank", "server" or "scheduler", and run."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                name, fields = (path / "stat").read_text().rsplit(")", 1)
                state, parent = fields.split()[:2]
                words = (path / "cmdline").read_bytes()
            except OSError:
                continue
            if int(parent) != self.launcher.pid or state in "ZTtX":
                continue
            is_rank = b"endurance_rank.py" in words
            if is_rank if role == "rank" else name.endswith(f"(bps-{role}"):
                found.append(int(path.name))
        return sorted(found)

    def await_steps(self, size: int) -> float:
        """Waits for the first step of so many ranks; returns when it was."""
        deadline = time.monotonic() + START_S
        while not any(ranks == size for _, _, ranks in self.steps()):
            self.check(deadline, "does not begin")
            time.sleep(0.05)
        return self.steps()[0][0]

    def check(self, deadline: float, complaint: str) -> None:
        """Ends the program where the job has ended, or does not go on."""
        if self.launcher.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"error: the job {complaint}; its output:\n{(self.folder / 'log').read_text()[-4000:]}")

    def end(self) -> None:
        """Lets all ranks end after the same step, and looks at what they have."""
        (self.folder / "stop").touch()
        deadline = time.monotonic() + END_S
        while self.launcher.poll() is None:
            self.check(deadline, "does not end")
            time.sleep(0.05)
        if self.launcher.returncode != 0:
            self.check(0, f"ended with status {self.launcher.returncode}")
        ends = [path.read_text() for path in self.folder.glob("end-*")]
        if len(set(ends)) != 1 or len(ends) < 2:
            sys.exit(f"error: ranks have ended with different steps or weights: {ends}")


@contextmanager
def running(options: argparse.Namespace, seed: int) -> Iterator[Job]:
    """A job that ends with the block, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="bps-endurance-") as folder:
        job = Job(Path(folder), options, seed)
        try:
            yield job
        finally:
            if job.launcher.poll() is None:
                job.launcher.terminate()
            job.launcher.wait(30)


def measure(options: argparse.Namespace, seed: int, seconds: float, kinds: list[str]) -> dict[str, Any]:
    """Steps, losses and faults of one job. Times are seconds from the beginning of the window."""
    draw = random.Random(f"{options.seed}/{seed}")  # noqa: S311  # not a secret
    with running(options, seed) as job:
        begin = job.await_steps(options.ranks) + SETTLES_S
        faults = []
        slot = seconds / max(len(kinds), 1)
        for number, kind in enumerate(kinds):
            wait(job, begin + slot * (number + draw.uniform(0.05, 0.5)))
            faults.append({"kind": kind, "at": time.monotonic() - begin})
            happen(job, kind, draw, options.heartbeat)
        wait(job, begin + seconds)
        job.end()
        steps = [(when - begin, number, size) for when, number, size in job.steps()]
        return {"seed": seed, "seconds": seconds, "steps": steps, "losses": job.losses, "faults": faults}


def wait(job: Job, until: float) -> None:
    """Until then; the job must go on."""
    while (left := until - time.monotonic()) > 0:
        job.check(until + 1, "has ended")
        time.sleep(min(left, 0.2))


def happen(job: Job, kind: str, draw: random.Random, heartbeat: float) -> None:
    """One fault; returns when it is over, but for what it costs."""
    victim = draw.choice(job.members(kind.partition(" ")[0]))
    if kind.endswith("killed") and "stopped" not in kind:
        os.kill(victim, signal.SIGKILL)
        return
    os.kill(victim, signal.SIGSTOP)
    for_good = kind.endswith("killed")
    time.sleep(heartbeat + 3 if for_good else heartbeat * draw.uniform(0.25, 0.75))
    with contextlib.suppress(ProcessLookupError):  # a member of its host has ended it
        os.kill(victim, signal.SIGKILL if for_good else signal.SIGCONT)


def rate(run: dict[str, Any]) -> float:
    """Committed steps per second of the window."""
    inside = [number for when, number, _ in run["steps"] if 0 <= when <= run["seconds"]]
    return (inside[-1] - inside[0]) / float(run["seconds"])


def per_second(run: dict[str, Any]) -> list[int]:
    """Committed steps in each second of the window."""
    counts = [0] * int(run["seconds"])
    for when, _, _ in run["steps"]:
        if 0 <= when < len(counts):
            counts[int(when)] += 1
    return counts


def account(run: dict[str, Any]) -> None:
    """Adds to each fault how long no step was committed, and what the time until the next one lacks in steps.

    The usual rate is that of the second in the middle, of all from the fault before to the next one: a drift of the
    machine is no fault's.
    """
    counts = per_second(run)
    at = [fault["at"] for fault in run["faults"]]
    for fault, before, end in zip(run["faults"], [0.0, *at], [*at[1:], run["seconds"]], strict=False):
        usual = statistics.median(counts[int(before) : int(end)])
        times = [when for when, _, _ in run["steps"] if fault["at"] - 0.5 <= when <= end]
        fault["stood_still"] = max((b - a for a, b in itertools.pairwise(times)), default=end - fault["at"])
        made = sum(1 for when in times if when >= fault["at"])
        fault["lost"] = end - fault["at"] - made / usual


def compare_losses(faulty: dict[str, Any], free: list[dict[str, Any]]) -> dict[str, Any]:
    """The loss at the last step that all jobs have evaluated, and where they ended."""
    common = min(max(step for step, _ in run["losses"]) for run in [faulty, *free])
    at = [dict(run["losses"])[common] for run in free]
    return {
        "step": common, "with_faults": dict(faulty["losses"])[common], "without": at,
        "same_seed": next(dict(run["losses"])[common] for run in free if run["seed"] == faulty["seed"]),
        "last_with_faults": faulty["losses"][-1], "last_without": [run["losses"][-1] for run in free],
    }  # fmt: skip


def distribution(values: list[float]) -> str:
    ordered = sorted(values)
    most = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"median {statistics.median(ordered):.2f} s, 95 % within {most:.2f} s, longest {ordered[-1]:.2f} s"


def tell(result: dict[str, Any]) -> None:
    """In words."""
    faulty, losses = result["with_faults"], result["losses"]
    rates = [rate(run) for run in result["without"]]
    faults, without = faulty["faults"], losses["without"]
    minutes = faulty["seconds"] / 60
    print(f"{len(faults)} faults in {minutes:.1f} min, {result['ranks']} ranks, {result['servers']} servers")
    print(f"steps per second: {rate(faulty):.2f} with faults, {statistics.mean(rates):.2f} without "
          f"({min(rates):.2f} to {max(rates):.2f} in {len(rates)} jobs): {result['ratio']:.1%}")  # fmt: skip
    print(f"loss at step {losses['step']}: {losses['with_faults']:.4f} with faults, {losses['same_seed']:.4f} without "
          f"and with the same seed; without, {len(without)} seeds: {min(without):.4f} to {max(without):.4f}, "
          f"mean {statistics.mean(without):.4f}, standard deviation {statistics.stdev(without):.4f}")  # fmt: skip
    print(f"last loss with faults: {losses['last_with_faults'][1]:.4f} at step {losses['last_with_faults'][0]}")
    for kind in KINDS:
        of_kind = [fault for fault in faults if fault["kind"] == kind]
        if of_kind:
            lost = statistics.mean(fault["lost"] for fault in of_kind)
            still = distribution([fault["stood_still"] for fault in of_kind])
            print(f"{len(of_kind)} times {kind}: no step for {still}; {lost:.2f} s lost each")
    still = distribution([fault["stood_still"] for fault in faults])
    print(f"all: no step for {still}; {sum(fault['lost'] for fault in faults):.1f} s lost altogether")


def plot(result: dict[str, Any], path: str) -> None:
    """Steps per second over the time, and how long each fault held the job up."""
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, figsize=(9, 7), layout="constrained")
    faulty = result["with_faults"]
    above.plot(per_second(faulty), label="with faults", linewidth=0.8)
    usual = statistics.mean(rate(run) for run in result["without"])
    above.axhline(usual, color="black", linestyle="--", linewidth=1, label="without, mean")
    above.set(xlabel="seconds", ylabel="committed steps per second", ylim=(0, None))
    above.legend(loc="lower right")
    for kind in KINDS:
        values = [fault["stood_still"] for fault in faulty["faults"] if fault["kind"] == kind]
        if values:
            below.ecdf(values, label=f"{kind}, {len(values)} times")
    below.set(xlabel="longest time without a committed step, in seconds", ylabel="share of the faults")
    below.grid(alpha=0.3)
    below.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="of the job with faults, and of those without in all")
    parser.add_argument("--faults", type=int, default=62)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=4, help="without faults: half of them before, half after")
    parser.add_argument("--heartbeat", type=float, default=2, help="BPS_HEARTBEAT_TIMEOUT, in seconds")
    parser.add_argument("--transport", choices=("shm", "tcp", "rdma"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    if options.jobs < 2:
        parser.error("--jobs: one is no spread")
    if options.ranks < 3:
        parser.error("--ranks: too few to lose one")
    kinds = [KINDS[number % len(KINDS)] for number in range(options.faults)]
    random.Random(options.seed).shuffle(kinds)  # noqa: S311  # not a secret
    seconds = 60 * options.minutes
    free: list[dict[str, Any]] = []
    faulty: dict[str, Any] = {}
    for number in range(options.jobs + 1):
        if number == options.jobs // 2:
            print(f"{seconds:.0f} s with faults", file=sys.stderr)
            faulty = measure(options, options.seed, seconds, kinds)
            account(faulty)
            continue
        print(f"{seconds / options.jobs:.0f} s without faults", file=sys.stderr)
        free.append(measure(options, options.seed + len(free), seconds / options.jobs, []))
    result = {
        "ranks": options.ranks, "servers": SERVERS, "heartbeat": options.heartbeat,
        "with_faults": faulty, "without": free,
        "ratio": rate(faulty) / statistics.mean(rate(run) for run in free), "losses": compare_losses(faulty, free),
    }  # fmt: skip
    if options.json:
        print(json.dumps(result))
    else:
        tell(result)
    if options.plot:
        plot(result, options.plot)
        print(f"wrote {options.plot}", file=sys.stderr)


if __name__ == "__main__":
    main()
