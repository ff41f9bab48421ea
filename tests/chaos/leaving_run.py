# SPDX-License-Identifier: Apache-2.0
"""Runs one trial whose members leave while the others are at work, and judges what comes out of it.

Every rank that is left hears of it at once, in whichever call it waits, by an error that names who left: nobody waits
for a deadline. Those who leave wait for nobody who has been told. Servers and scheduler end with the ranks.
"""

import re
import signal
import time
from pathlib import Path
from typing import Any

from tests.chaos import leaving_plan
from tests.chaos.run import Run
from tests.chaos.trial_run import describe_status
from tests.shared.harness import PATIENCE

ENDS_S = 30.0


class LeavingRun(Run):
    """A trial in progress. `knows_s`: within which time everybody must know; the default is for busy machines."""

    knows_s = 30.0

    def __init__(self, trial: leaving_plan.LeavingTrial, folder: Path) -> None:
        super().__init__(trial, folder)
        self.leaving = trial
        self.heard_s = 0.0  # how long it took the last one to hear of it

    def spec_of(self, rank: int) -> dict[str, Any]:
        """What a worker process must know."""
        return leaving_plan.spec(self.leaving, rank)

    def _settings(self) -> dict[str, str]:
        times = dict.fromkeys(("BPS_TIMEOUT", "BPS_SHUTDOWN_TIMEOUT"), str(leaving_plan.TIMEOUT_S * PATIENCE))
        return super()._settings() | times | {"BPS_HEARTBEAT_TIMEOUT": str(leaving_plan.HEARTBEAT_S * PATIENCE)}

    # ---- What happens

    def play(self) -> None:
        signalled = []
        for leaver in self.leaving.leavers:
            time.sleep(leaver.after_s)
            if leaver.way in ("term", "handler"):
                signalled.append(self.kill(leaver.member, signal.SIGTERM))
            else:
                self.tell(leaver.member, leaver.way)
        survivors = self.leaving.survivors
        self.await_all(survivors, lambda rank: self.said(rank, "over"), self.knows_s + ENDS_S, "the news", alive=True)
        left = [line["at"] for rank in range(self.trial.workers) for line in self.lines(rank, "leaves")]
        self._judge_news(min(signalled + left))

    def _judge_news(self, begin: float) -> None:
        names = [name for one in self.leaving.leavers for name in self._names_of(one.member)]
        for rank in self.leaving.survivors:
            errors = self.lines(rank, "error")
            if not errors:
                self.violations.append(f"worker {rank} got no error")
                continue
            took = max(error["at"] for error in errors) - begin
            self.heard_s = max(self.heard_s, took)
            if took > self.knows_s * PATIENCE:
                self.violations.append(f"worker {rank} heard of it after {took:.1f} s")
            for error in errors:
                if error["kind"] != "PeerLostError":
                    self.violations.append(f"worker {rank}: {error['kind']}: {error['text']}")
            # Others name ranks that have left because of it.
            if not any(re.search(name, error["text"]) for error in errors for name in names):
                self.violations.append(f"worker {rank}: no error names who left: {errors[0]['text']}")

    def _names_of(self, member: str) -> list[str]:
        """Patterns by which an error may name it."""
        role, _, index = member.partition(" ")
        names = {"worker": [rf"(worker|rank) {index}\b"], "server": [rf"pid {self.pid(member)}\b"],
                 "scheduler": ["scheduler"]}[role]  # fmt: skip
        if self.trial.servers == 0:  # where it is a server as well; rank 0 hosts the scheduler
            names += [rf"server {index}\b", *(["scheduler"] if index == "0" else [])]
        return names

    # ---- The end

    def finish(self) -> None:
        """Everybody ends by himself, and no array changes after its call has raised, or shutdown() returned."""
        for rank in range(self.trial.workers):
            if self.processes[f"worker {rank}"].status is None:
                self.tell(f"worker {rank}", "check")
        ways = {one.member: one.way for one in self.leaving.leavers}
        for member in self.processes:
            status = self.wait_for_end(member, ENDS_S)
            if status is None:
                continue
            way = ways.get(member, "")
            allowed = {"term": {-signal.SIGTERM, 0, 143}, "exception": {0, 1}, "exit": {0, 3}}.get(way, {0})
            if not member.startswith("worker"):
                allowed = allowed | {0, 1}
            if status not in allowed:
                self.violations.append(f"{member} {describe_status(status)}")
        self.judge_reports(self.trial.workers, self.leaving.survivors)
