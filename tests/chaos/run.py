# SPDX-License-Identifier: Apache-2.0
"""Runs one trial: starts its processes, lets the event happen, and judges what comes out of it."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

from tests.chaos import plan
from tests.chaos.members import Members, binary, describe_status
from tests.shared.harness.freeze import freeze


class Run(Members):
    """A trial in which a loss ends the job."""

    def __init__(self, trial: plan.Trial, folder: Path, patience: float) -> None:
        super().__init__(trial, folder, patience)
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
                env |= {
                    "RANK": str(rank), "WORLD_SIZE": str(self.trial.workers), "LOCAL_RANK": "0" if apart else str(rank),
                    "LOCAL_WORLD_SIZE": "1" if apart else str(self.trial.workers), "MASTER_ADDR": self._root(),
                    "MASTER_PORT": str(self.port), "BPS_ROOT_PORT": str(self.port),
                }  # fmt: skip
            self.spawn_worker(rank, "worker.py", plan.spec(self.trial, rank), env)
        for rank in range(self.trial.workers):
            self.wait_until(lambda rank=rank: self.said(rank, "ready"), plan.START_S, f"worker {rank} did not start",
                            self.somebody_failed)  # fmt: skip

    def _root(self) -> str:
        return self.address("scheduler" if self.trial.servers else "worker 0")

    def _spawn(self, member: str, name: str, env: dict[str, str]) -> None:
        self.spawn(member, [binary(name)], self._settings() | env)

    def _settings(self) -> dict[str, str]:
        late = self.trial.event == "late"
        env = {
            "BPS_TIMEOUT": str((plan.SHORT_TIMEOUT_S if late else plan.TIMEOUT_S) * self.patience),
            "BPS_HEARTBEAT_TIMEOUT": str(plan.HEARTBEAT_S * self.patience),
            "BPS_JOIN_TIMEOUT": str(plan.START_S * self.patience),
            "BPS_SHUTDOWN_TIMEOUT": str(plan.SHUTDOWN_S * self.patience),
        }
        if self.trial.servers:
            env |= {
                "DMLC_NUM_WORKER": str(self.trial.workers), "DMLC_NUM_SERVER": str(self.trial.servers),
                "DMLC_PS_ROOT_URI": self._root(), "DMLC_PS_ROOT_PORT": str(self.port),
            }  # fmt: skip
        return env

    # ---- The event, and what must follow

    def play(self) -> None:
        time.sleep(self.trial.delay_s)
        event, victim = self.trial.event, self.processes[self.trial.victim]
        begin = time.monotonic()
        if event in ("kill", "segfault"):
            victim.send_signal(signal.SIGKILL if event == "kill" else signal.SIGSEGV)
        elif event == "stop":
            victim.send_signal(signal.SIGSTOP)
        elif event in ("exception", "exit", "late"):
            self.tell(self.trial.victim, event)
        elif event == "cut":
            assert self.network is not None
            self.network.cut(self.trial.victim, self.trial.plane, self.trial.direction)
            begin = time.monotonic()  # it takes a process for each member, on a busy machine seconds
        elif event == "pause":
            victim.send_signal(signal.SIGSTOP)
            time.sleep(plan.PAUSE_S)
            victim.send_signal(signal.SIGCONT)
        elif event == "freeze":
            freeze(
                int(self._random.choice([task.name for task in Path(f"/proc/{victim.pid}/task").iterdir()])),
                plan.PAUSE_S,
            )
        if event in plan.LETHAL:
            self._expect_errors(begin)
            if event == "stop":
                victim.send_signal(signal.SIGCONT)
                time.sleep(0.7)  # whatever it can still write it writes at once
        else:
            self._expect_progress()

    def _survivors(self) -> list[int]:
        # Who is cut off must hear of it, too.
        gone = self.trial.victim if self.trial.event in plan.LETHAL and self.trial.event != "cut" else ""
        return [rank for rank in range(self.trial.workers) if f"worker {rank}" != gone]

    def _expect_errors(self, begin: float) -> None:
        """Every survivor raises within its deadline, and names the culprit."""
        limit = plan.TIMEOUT_S * self.patience + 2
        if not self._survivors():  # the servers hear of it, too, and a stopped worker stays stopped until then
            others = [process for member, process in self.processes.items() if member != self.trial.victim]
            self.wait_until(lambda: all(process.poll() is not None for process in others),
                            limit + plan.SHUTDOWN_S * self.patience + 2, "the servers are not told of the event",
                            lambda: False)  # fmt: skip
        for rank in self._survivors():
            self.wait_until(lambda rank=rank: self.said(rank, "over"), limit + plan.SHUTDOWN_S * self.patience + 2,
                            f"worker {rank} is not told of the event",
                            lambda rank=rank: self.is_dead(rank))  # fmt: skip
            errors = self.lines(rank, "error")
            if not errors:
                self.violations.append(f"worker {rank} got no error")
                continue
            if errors[0]["at"] - begin > limit:
                self.violations.append(f"worker {rank} heard of it after {errors[0]['at'] - begin:.1f} s")
            patterns = plan.culprits(self.trial, self.processes[self.trial.victim].pid)
            if f"worker {rank}" == self.trial.victim:
                patterns = ["worker", "server", "scheduler"]
            if not any(re.search(pattern, error["text"]) for error in errors for pattern in patterns):
                self.violations.append(f"worker {rank}: no error names {self.trial.victim}: {errors[0]['text']}")

    def _expect_progress(self) -> None:
        """The job goes on and ends as if nothing had happened; a late rank costs errors and no more."""
        counted = [len(self.lines(rank, "round")) for rank in range(self.trial.workers)]
        late = self.trial.event == "late"
        for rank, before in enumerate(counted):
            self.wait_until(lambda rank=rank, before=before: len(self.lines(rank, "round")) > before, 30,
                            f"worker {rank} does not go on", self.somebody_failed)  # fmt: skip
        self.tell("worker 0", "stop")
        for rank in range(self.trial.workers):
            self.wait_until(lambda rank=rank: self.said(rank, "over"), 30, f"worker {rank} does not end",
                            self.somebody_failed)  # fmt: skip
            errors = [error for error in self.lines(rank, "error") if not late or error["kind"] == "PeerLostError"]
            if errors:
                self.violations.append(f"worker {rank}: {errors[0]['kind']}: {errors[0]['text']}")

    # ---- The end

    def end(self) -> None:
        """Everybody ends by himself; the arrays are as they were when the last call raised or returned."""
        for rank in self._survivors():
            self.tell(f"worker {rank}", "check")
        for member, process in self.processes.items():
            gone = member == self.trial.victim and self.trial.event in plan.LETHAL
            if gone and process.poll() is None and member.startswith("worker"):
                self.tell(member, "check")
            status = self.wait_for_end(member, 8)
            if status is None:
                continue
            clean = not gone and (member.startswith("worker") or self.trial.event not in plan.LETHAL)
            fatal = status < 0 and not (gone and self.trial.event in ("kill", "segfault", "stop"))
            if fatal or (clean and status != 0):
                self.violations.append(f"{member} {describe_status(status)}")
        self.judge_reports(self.trial.workers, self._survivors())
