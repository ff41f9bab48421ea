# SPDX-License-Identifier: Apache-2.0
"""Runs steps beside each other: two that mostly wait, and one that computes, at idle priority."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from checks.steps import Step

CLOSING = Path("build/ci/closing")
MOST_WAITING = 2  # of the steps that wait: each has two processes of pytest for the two processors
SAY_SO_S = 60.0  # how often the output says what is running
SUPERVISE = Path(__file__).with_name("supervise.py")
MOST_LINES = 3000  # of the log of a step that failed


@dataclass
class Outcome:
    """How a step ended."""

    step: str
    note: str = ""  # why it failed, or nothing
    seconds: float = 0.0
    processor: float = 0.0  # seconds of the step and of its processes that somebody has waited for
    log: Path = Path()
    closing: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether anything stands against it."""
        return bool(self.note)


class Running:
    """A step that runs. It ends with this process, whatever ends that, and so does all that it has started."""

    def __init__(self, step: Step, log: Path, env: Mapping[str, str], *, shown: bool) -> None:
        self.step = step
        self.log = log
        self._closing = (CLOSING / step.name).resolve()
        self._begin = time.monotonic()
        for file in (self._closing, log):
            file.parent.mkdir(parents=True, exist_ok=True)
        self._closing.unlink(missing_ok=True)
        words = ["ci/steps/" + step.name, str(self._closing)]
        if step.computes and not shown:
            words = ["chrt", "--idle", "0", *words]
        out = f"2>&1 | tee {shlex.quote(str(log))}" if shown else f"> {shlex.quote(str(log))} 2>&1"
        line = f"set -o pipefail; . ci/ccache.sh; {shlex.join(words)} {out}"
        self._process = subprocess.Popen(
            [sys.executable, "-I", SUPERVISE, "bash", "-c", line],
            stdin=subprocess.PIPE, start_new_session=True, env=os.environ | env,
        )  # fmt: skip

    @property
    def seconds(self) -> float:
        """How long it has run so far."""
        return time.monotonic() - self._begin

    def outcome(self) -> Outcome:
        """Waits for its end."""
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = code = os.waitstatus_to_exitcode(status)
        self.end()
        closing = self._closing.read_text().splitlines() if self._closing.exists() else []
        note = f"status {code}" if code else "" if closing else "it ran nothing"
        used = usage.ru_utime + usage.ru_stime
        return Outcome(self.step.name, note, self.seconds, used, self.log, closing)

    def end(self) -> None:
        """Lets the supervisor interrupt the step; what does not end is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()


def print_log(outcome: Outcome) -> None:
    """Shows the log of a step that failed."""
    lines = outcome.log.read_text(errors="replace").splitlines()
    if len(lines) > MOST_LINES:
        print(f"... {len(lines) - MOST_LINES} lines before these are in {outcome.log}")
    print("\n".join(lines[-MOST_LINES:]), flush=True)


def may_start(steps: Sequence[Step], running: Sequence[Step]) -> list[Step]:
    """The steps that may start now, beside those that run; `steps` are those that have not started."""
    waiting = sum(not step.computes for step in running)
    computing = len(running) - waiting
    somebody_waits = waiting > 0 or any(not step.computes for step in steps)
    unfinished = {step.name for step in [*steps, *running]}
    found = []
    for step in steps:
        if unfinished & {*step.needs, *step.after}:
            continue
        if step.computes and computing < (1 if somebody_waits else 2):
            computing += 1
            found.append(step)
        elif not step.computes and waiting < MOST_WAITING:
            waiting += 1
            found.append(step)
    return found


def run_all(steps: Sequence[Step], *, shown: bool, logs: str = "build/ci/logs/{}.log", **env: str) -> list[Outcome]:
    """Runs all steps; one that fails stops none but those that need it.

    Where the steps are not `shown` while they run, the log of one that fails is printed.
    """
    over: dict[str, Outcome] = {}
    left = list(steps)
    running: dict[Future[Outcome], Running] = {}
    with ThreadPoolExecutor(len(steps)) as pool:
        try:
            while left or running:
                for step in list(left):
                    if failed := [name for name in step.needs if name in over and over[name].failed]:
                        left.remove(step)
                        over[step.name] = Outcome(step.name, f"not run: {' '.join(failed)} failed")
                for step in may_start(left, [one.step for one in running.values()]):
                    left.remove(step)
                    one = Running(step, Path(logs.format(step.name)), env, shown=shown)
                    running[pool.submit(one.outcome)] = one
                    print(f"=== {step.name}", flush=True)
                done = wait(running, SAY_SO_S, FIRST_COMPLETED).done
                for future in done:
                    outcome = over[running.pop(future).step.name] = future.result()
                    if outcome.failed and not shown:
                        print_log(outcome)
                    how = f"FAILED ({outcome.note})" if outcome.failed else "passed"
                    print(f"=== {outcome.step} {how} in {outcome.seconds:.0f} s", flush=True)
                if not done and not shown:
                    print("... " + ", ".join(f"{r.step.name} {r.seconds:.0f} s" for r in running.values()), flush=True)
        except BaseException:
            for one in running.values():
                one.end()
            raise  # once the pool has seen the end of each
    return [over[step.name] for step in steps]
