# SPDX-License-Identifier: Apache-2.0
"""Runs one trial: starts its processes, lets the event happen, and judges what comes out of it."""

import random
import re
import signal
import time
from pathlib import Path
from typing import Any

from tests.chaos import plan
from tests.chaos.trial_run import TrialRun, describe_status
from tests.shared.harness import PATIENCE, binary, of_rank, of_roles
from tests.shared.harness.freeze import freeze


class Run(TrialRun):
    """A trial in which a loss ends the job."""

    def __init__(self, trial: plan.Trial, folder: Path) -> None:
        super().__init__(trial, folder)
        self.trial = trial
        self._random = random.Random(f"{trial.seed}/{trial.number}/run")

    # ---- Starting

    def start(self) -> None:
        if self.trial.servers:
            self._spawn("scheduler", "bps-scheduler", {"DMLC_ROLE": "scheduler"})
            for index in range(self.trial.servers):
                self._spawn(f"server {index}", "bps-server", {"DMLC_ROLE": "server"})
        for rank in range(self.trial.workers):
            env = self._settings()
            if self.trial.hosts:
                env["BPS_HOST_ID"] = self.trial.hosts[rank]
            if self.trial.servers:
                env |= {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(rank)}
            else:
                apart = self.network is not None  # each namespace is a host
                env |= of_rank(rank, self.trial.workers, self.port, self._root()) | {"BPS_ROOT_PORT": str(self.port)}
                env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if apart else {}
            self.spawn_worker(rank, "worker.py", self.spec_of(rank), env)
        self.await_all(range(self.trial.workers), lambda rank: self.said(rank, "ready"), plan.START_S, "its start")

    def spec_of(self, rank: int) -> dict[str, Any]:
        """What a worker process must know."""
        return plan.spec(self.trial, rank)

    def _root(self) -> str:
        return self.address("scheduler" if self.trial.servers else "worker 0")

    def _spawn(self, member: str, name: str, env: dict[str, str]) -> None:
        self.spawn(member, [binary(name)], self._settings() | env)

    def _settings(self) -> dict[str, str]:
        late = self.trial.event == "late"
        env = {
            "BPS_TIMEOUT": str((plan.SHORT_TIMEOUT_S if late else plan.TIMEOUT_S) * PATIENCE),
            "BPS_HEARTBEAT_TIMEOUT": str(plan.HEARTBEAT_S * PATIENCE),
            "BPS_JOIN_TIMEOUT": str(plan.START_S * PATIENCE),
            "BPS_SHUTDOWN_TIMEOUT": str(plan.SHUTDOWN_S * PATIENCE),
        }
        if self.trial.servers:
            env |= of_roles(self.trial.workers, self.trial.servers, self.port, self._root())
        return env

    # ---- The event, and what must follow

    def play(self) -> None:
        time.sleep(self.trial.delay_s)
        event, victim = self.trial.event, self.trial.victim
        begin = time.monotonic()
        if event in ("kill", "segfault"):
            self.kill(victim, signal.SIGKILL if event == "kill" else signal.SIGSEGV)
        elif event == "stop":
            self.kill(victim, signal.SIGSTOP)
        elif event in ("exception", "exit", "late"):
            self.tell(victim, event)
        elif event == "cut":
            assert self.network is not None
            self.network.cut(victim, self.trial.plane, self.trial.direction)
            begin = time.monotonic()  # it takes a process for each member, on a busy machine seconds
        elif event == "pause":
            self.kill(victim, signal.SIGSTOP)
            time.sleep(plan.PAUSE_S)
            self.kill(victim, signal.SIGCONT)
        elif event == "freeze":
            freeze(
                int(self._random.choice([task.name for task in Path(f"/proc/{self.pid(victim)}/task").iterdir()])),
                plan.PAUSE_S,
            )
        if event in plan.LETHAL:
            self._expect_errors(begin)
            if event == "stop":
                self.kill(victim, signal.SIGCONT)
                time.sleep(0.7)  # whatever it can still write it writes at once
        else:
            self._expect_progress()

    def _survivors(self) -> list[int]:
        # Who is cut off must hear of it, too.
        gone = self.trial.victim if self.trial.event in plan.LETHAL and self.trial.event != "cut" else ""
        return [rank for rank in range(self.trial.workers) if f"worker {rank}" != gone]

    def _expect_errors(self, begin: float) -> None:
        """Every survivor raises within its deadline, and names the culprit."""
        limit = plan.TIMEOUT_S * PATIENCE + 2
        hears = plan.TIMEOUT_S + plan.SHUTDOWN_S + 4
        if not self._survivors():  # the servers hear of it, too, and a stopped worker stays stopped until then
            others = [process for member, process in self.processes.items() if member != self.trial.victim]
            self.eventually(lambda: all(process.status is not None for process in others), hears,
                            "the news of the event at the servers", of=[])  # fmt: skip
        self.await_all(
            self._survivors(), lambda rank: self.said(rank, "over"), hears, "the news of the event", alive=True
        )
        for rank in self._survivors():
            errors = self.lines(rank, "error")
            if not errors:
                self.violations.append(f"worker {rank} got no error")
                continue
            if errors[0]["at"] - begin > limit:
                self.violations.append(f"worker {rank} heard of it after {errors[0]['at'] - begin:.1f} s")
            patterns = plan.culprits(self.trial, self.pid(self.trial.victim))
            if f"worker {rank}" == self.trial.victim:
                patterns = ["worker", "server", "scheduler"]
            if not any(re.search(pattern, error["text"]) for error in errors for pattern in patterns):
                self.violations.append(f"worker {rank}: no error names {self.trial.victim}: {errors[0]['text']}")

    def _expect_progress(self) -> None:
        """The job goes on and ends as if nothing had happened; a late rank costs errors and no more."""
        counted = [len(self.lines(rank, "round")) for rank in range(self.trial.workers)]
        late = self.trial.event == "late"
        ranks = range(self.trial.workers)
        self.await_all(ranks, lambda rank: len(self.lines(rank, "round")) > counted[rank], 30, "another round")
        self.tell("worker 0", "stop")
        self.await_all(ranks, lambda rank: self.said(rank, "over"), 30, "its end")
        for rank in ranks:
            errors = [error for error in self.lines(rank, "error") if not late or error["kind"] == "PeerLostError"]
            if errors:
                self.violations.append(f"worker {rank}: {errors[0]['kind']}: {errors[0]['text']}")

    # ---- The end

    def finish(self) -> None:
        """Everybody ends by himself; the arrays are as they were when the last call raised or returned."""
        for rank in self._survivors():
            self.tell(f"worker {rank}", "check")
        for member, process in self.processes.items():
            gone = member == self.trial.victim and self.trial.event in plan.LETHAL
            if gone and process.status is None and member.startswith("worker"):
                self.tell(member, "check")
            status = self.wait_for_end(member, 8)
            if status is None:
                continue
            clean = not gone and (member.startswith("worker") or self.trial.event not in plan.LETHAL)
            fatal = status < 0 and not (gone and self.trial.event in ("kill", "segfault", "stop"))
            if fatal or (clean and status != 0):
                self.violations.append(f"{member} {describe_status(status)}")
        self.judge_reports(self.trial.workers, self._survivors())
