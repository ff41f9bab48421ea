# SPDX-License-Identifier: Apache-2.0
"""Measures how long a job stands still when a member is lost: from the kill to the next right sum on every survivor.

    python bench/recovery.py --trials 200 --ranks 4 --victim worker --signal kill [--transport tcp] [--plot FILE]
    python bench/recovery.py --draw one.json other.json --plot FILE

Each trial is a job of its own, under the launcher's rules: its scheduler is a process by itself. After some steps one
member, drawn by the seed, gets SIGKILL, or SIGSTOP; with --losses others follow within 0.2 s each, while the next view
gathers or has just begun. Every sum of every rank is verified. Prints the distribution; with --json, all values.

With --failover the ranks must not notice the loss of a server: an exception ends the measurement.

With --victim scheduler the ranks go on: the time is that from the signal to the end of the first step that began after
it on every rank, and --steps-after more steps are verified without the scheduler. With --replace another scheduler is
started as soon as the launcher sees the end of the last one, as `bps run` does; the time is then that to the end of the
first step that every rank has committed with it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from bps_rdma.launch.environment import LocalJob
from bps_rdma.launch.process import Child, Children
from bps_rdma.launch.run import spawn_helpers

STEPS_BEFORE = 5
COUNT = 1 << 18  # 1 MiB
TENSORS = 4


def rank(folder: Path, left: int, failover: bool, alone: int, commits: bool) -> None:
    """A rank: sums until the driver has seen enough; writes down when its first sum of the last view was right.

    `left` is how many ranks that view has, or, where the ranks must not notice, how many servers. With `alone` the
    scheduler is lost, and so many steps follow without it. `commits`: each step ends with commit().
    """
    import bps_rdma as bps
    from bps_rdma import job

    bps.init()
    me, step, told, after = bps.rank(), 0, False, 0
    votes = np.zeros(1, np.float32)
    end_step = bps.commit if commits else (lambda: None)
    arrays = [np.empty(COUNT, np.float32) for _ in range(TENSORS)]
    while True:
        size = bps.size()
        try:
            for number, array in enumerate(arrays):
                array[:] = 1 + bps.rank() + number * step
            handles = [
                bps.push_pull_async_inplace(array, name=f"gradient{number}", average=False)
                for number, array in enumerate(arrays)
            ]
            for handle in handles:
                handle.wait()
            present = job.current().process.servers if failover else size
            votes[0] = (told or failover or alone > 0) and present <= left and (folder / "all-lost").exists()
            bps.push_pull_inplace(votes, name="end", average=False)  # all in the same step, or one would wait for ever
            end_step()
        except bps.RoundAbortedError as error:
            if failover:
                sys.exit(f"rank {me}: noticed the loss: {error}")
            told = True
            continue
        for number, array in enumerate(arrays):
            expected = size * (size + 1) / 2 + size * number * step
            if array.min() != array.max() or array[0] != expected:
                sys.exit(f"rank {me}: wrong sum {array[0]} of {expected} with {size} ranks")
        step += 1
        if votes[0] == size:
            if after == 0:
                (folder / f"first-{me}").write_text(repr(time.monotonic()))
            if after == alone:
                break
            after += 1
        if step == STEPS_BEFORE:
            (folder / f"running-{me}").touch()
    (folder / f"first-{me}").rename(folder / f"again-{me}")
    if alone == 0:
        bps.barrier()
    bps.shutdown()


def trial(options: argparse.Namespace, draw: random.Random) -> float:
    """Seconds from the signal to the last survivor's first right sum of the next view."""
    job = LocalJob(
        options.ranks, options.servers, f"shm,{options.transport}" if options.hosts else options.transport, 1
    )
    with tempfile.TemporaryDirectory() as name, Children() as children:
        folder = Path(name)
        scheduler = spawn_helpers(children, job, folder / "state")
        assert scheduler is not None
        left = options.ranks - (options.losses if options.victim == "worker" else 0)
        alone = options.steps_after if options.victim == "scheduler" and not options.replace else 0
        extra = {} if options.replace else {"BPS_SCHEDULER_PATIENCE": "0"}
        if options.failover:
            left, extra = options.servers - options.losses, extra | {"BPS_SERVER_FAILOVER": "1"}
        words = [sys.executable, __file__, "--rank", name, "--left", str(left), "--alone", str(alone)]
        # Without commit() a rank may have all sums of a step whose last answer another one never gets, and they would
        # go on with different steps.
        words += ["--failover"] * options.failover + ["--commits"] * (options.replace or options.victim == "worker")
        on = [{"BPS_HOST_ID": host} for host in options.hosts] or [{}] * options.ranks
        ranks = [children.spawn(job.label(i), words, job.worker(i) | extra | on[i]) for i in range(options.ranks)]
        await_files(folder, "running", range(options.ranks), children, options.patience)
        time.sleep(draw.uniform(0, 0.05))  # any instant of a step
        candidates = ranks if options.victim == "worker" else members(children, options.victim)
        victims = draw.sample(candidates, options.losses)
        for number, victim in enumerate(victims):
            time.sleep(draw.uniform(0, 0.2) if number else 0)
            begin = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL if options.signal == "kill" else signal.SIGSTOP)
        (folder / "all-lost").touch()
        survivors = [i for i, child in enumerate(ranks) if child not in victims]
        if options.replace:
            while scheduler.child.status is None:
                children.wait(0.005)
            scheduler.start_again()
        await_files(folder, "again", survivors, children, options.patience)
        return max(float((folder / f"again-{i}").read_text()) for i in survivors) - begin


def members(children: Children, kind: str) -> list[Child]:
    return [child for child in children.running if child.label.startswith(kind)]


def await_files(folder: Path, kind: str, ranks: object, children: Children, patience: float) -> None:
    deadline = time.monotonic() + patience
    wanted = [folder / f"{kind}-{i}" for i in ranks]  # type: ignore[attr-defined]
    while not all(path.exists() and (kind == "running" or path.stat().st_size) for path in wanted):
        for child in children.wait(0.005):
            if child.status not in (0, -signal.SIGKILL):
                sys.exit(f"{child.describe_end()}")
        if time.monotonic() > deadline:
            sys.exit(f"not all ranks came to {kind!r} within {patience} s")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def in_words(values: list[float]) -> str:
    most = percentile(values, 0.95)
    return f"median {statistics.median(values):.2f} s, 95 % within {most:.2f} s, longest {max(values):.2f} s"


def plot(results: list[dict[str, Any]], path: str) -> None:
    """One curve for each result: the share of the trials that were over after so many seconds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for result in results:
        axes.ecdf(result["seconds"], label=f"{result['what']}, {len(result['seconds'])} times")
    axes.set(xlabel="seconds from the loss to the next right sum on every rank", ylabel="share of the losses",
             xscale="log")  # fmt: skip
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--servers", type=int, help="dedicated servers (default: inside the ranks)")
    parser.add_argument("--victim", choices=("worker", "server", "scheduler"), default="worker")
    parser.add_argument("--steps-after", type=int, default=50, help="with --victim scheduler")
    parser.add_argument("--signal", choices=("kill", "stop"), default="kill")
    parser.add_argument("--losses", type=int, default=1, help="members lost in each trial")
    parser.add_argument("--failover", action="store_true", help="BPS_SERVER_FAILOVER: no rank may notice the loss")
    parser.add_argument("--transport", choices=("shm", "tcp", "rdma"))
    parser.add_argument(
        "--hosts", default="", help="aabb: ranks take this machine for two hosts, on which they sum first"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=60, help="seconds after which a trial counts as a hang")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", metavar="FILE")
    parser.add_argument("--draw", type=Path, nargs="+", metavar="JSON", help="measure nothing; --plot these results")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--left", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--replace", action="store_true", help="with --victim scheduler: another one is started")
    parser.add_argument("--commits", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.left, options.failover, options.alone, options.commits)
        return
    if options.draw:
        plot([json.loads(path.read_text()) for path in options.draw], options.plot)
        return
    if options.hosts:
        options.ranks, options.transport = len(options.hosts), options.transport or "tcp"
    if options.victim == "server" and not options.servers:
        parser.error("--victim server needs --servers")
    if options.losses >= {"worker": options.ranks, "server": options.servers, "scheduler": 2}[options.victim]:
        parser.error("--losses leaves nobody")
    draw = random.Random(options.seed)  # noqa: S311  # not a secret
    shown = track(range(options.trials), description="losses", disable=not sys.stderr.isatty() or options.json)
    values = [trial(options, draw) for _ in shown]
    who = f"a {options.victim}" if options.losses == 1 else f"{options.losses} {options.victim}s"
    what = f"SIG{options.signal.upper()} to {who} of {options.ranks} ranks"
    if options.servers:
        what += f" and {options.servers} servers"
    if options.hosts:
        what += f" on {len(set(options.hosts))} hosts"
    result = {"what": what, "seconds": values}
    if options.json:
        print(json.dumps(result))
    else:
        print(f"{options.trials} times {what}: {in_words(values)}; every sum was right")
    if options.plot:
        plot([result], options.plot)
        print(f"wrote {options.plot}", file=sys.stderr)


if __name__ == "__main__":
    main()
