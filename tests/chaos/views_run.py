# SPDX-License-Identifier: Apache-2.0
"""Runs one trial whose job goes on without the members that it loses, and judges what comes out of it.

Every sum is that of the members of its view; nobody is told twice of one loss, or at all where it must not show; all
ranks that are left have committed the same steps, with the same results, and stood still for no longer than it takes to
notice the loss and a few seconds; nothing is left behind.
"""

import itertools
import signal
import time
from pathlib import Path
from typing import Any

from tests.chaos import views_plan
from tests.chaos.trial_run import TrialRun, describe_status
from tests.shared.harness import PATIENCE, binary, of_roles

STEPS_AFTER = 3  # in the last view
SETTLES_S = 20.0  # until all ranks that are left are in the last view; how long they may take is judged afterwards


class ViewsRun(TrialRun):
    """A trial in progress."""

    def __init__(self, trial: views_plan.ViewsTrial, folder: Path) -> None:
        super().__init__(trial, folder)
        self.trial = trial

    # ---- Starting

    def start(self) -> None:
        self._spawn_helper("scheduler")
        for index in range(self.trial.servers):
            self._spawn_helper(f"server {index}")
        for rank in range(self.trial.workers):
            role = "worker" if self.trial.servers else "joint"
            env = self._settings() | {"DMLC_ROLE": role, "DMLC_WORKER_ID": str(rank)}
            if self.trial.hosts:
                env["BPS_HOST_ID"] = self.trial.hosts[rank]
            self.spawn_worker(rank, "views_worker.py", views_plan.spec(self.trial, rank), env)
        ranks = range(self.trial.workers)
        self.await_all(ranks, lambda rank: self.said(rank, "ready"), views_plan.START_S, "its start")

    def _spawn_helper(self, member: str) -> None:
        role = member.partition(" ")[0]
        self.spawn(member, [binary(f"bps-{role}")], self._settings() | {"DMLC_ROLE": role})

    def _settings(self) -> dict[str, str]:
        scheduler_patience = 3 if self.trial.needs_network else 20  # who is cut off waits for it, and then ends
        return {
            "BPS_MIN_WORKERS": "1",
            "BPS_SERVER_FAILOVER": "1" if self.trial.failover else "0",
            "BPS_SCHEDULER_PATIENCE": str(int(scheduler_patience * PATIENCE)),
            "BPS_SCHEDULER_STATE": str(self.folder / "tmp" / "scheduler"),
            "BPS_PARTITION_BYTES": "65536",
            "BPS_TIMEOUT": str(views_plan.TIMEOUT_S * PATIENCE),
            "BPS_HEARTBEAT_TIMEOUT": str(views_plan.HEARTBEAT_S * PATIENCE),
            "BPS_JOIN_TIMEOUT": str(views_plan.START_S * PATIENCE),
            "BPS_SHUTDOWN_TIMEOUT": str(views_plan.SHUTDOWN_S * PATIENCE),
        } | of_roles(self.trial.workers, self.trial.servers or self.trial.workers, self.port, self.address("scheduler"))

    # ---- What happens

    def play(self) -> None:
        for fault in self.trial.faults:
            time.sleep(fault.after_s)
            self._happen(fault)
        over = time.monotonic()
        self.await_all(
            self.trial.survivors, lambda rank: self._has_settled(rank, over), SETTLES_S,
            f"work as one of {self.trial.survivors} with {self.trial.servers_left} servers", alive=True,
        )  # fmt: skip
        for fault in self.trial.faults:
            if fault.kind == "stop" and self.processes[fault.victim].status is None:  # a member may have ended it
                self.kill(fault.victim, signal.SIGCONT)
                time.sleep(0.7)  # whatever it can still write it writes at once
        for rank in self.trial.survivors:
            self.tell(f"worker {rank}", "stop")
        self.await_all(self.trial.survivors, lambda rank: self.said(rank, "over"), 20, "its end", alive=True)

    def _happen(self, fault: views_plan.Fault) -> None:
        if fault.kind == "kill":
            self.kill(fault.victim)
        elif fault.kind == "stop":
            self.kill(fault.victim, signal.SIGSTOP)
        elif fault.kind == "pause":
            self.kill(fault.victim, signal.SIGSTOP)
            time.sleep(views_plan.PAUSE_S)
            self.kill(fault.victim, signal.SIGCONT)
        elif fault.kind == "break":
            self.tell(fault.victim, "break")
        elif fault.kind == "cut":
            assert self.network is not None
            self.network.cut(fault.victim, "all", "both")
        else:
            self.kill(fault.victim)
            self.wait(fault.victim)
            time.sleep(fault.length_s)
            self._spawn_helper("scheduler")

    def _steps(self, rank: int) -> list[dict[str, Any]]:
        return self.lines(rank, "step")

    def _has_settled(self, rank: int, since: float) -> bool:
        """Whether it has committed some steps in the last view, and the view is what it must be."""
        steps = [step for step in self._steps(rank) if step["at"] > since]
        if len(steps) < STEPS_AFTER:
            return False
        is_as_before = all(fault.kind == "pause" for fault in self.trial.faults)
        return all(
            step["members"] == self.trial.survivors
            and step["servers"] == self.trial.servers_left
            and (step["view"] > 1 or is_as_before)
            for step in steps[-STEPS_AFTER:]
        )

    # ---- What must follow

    def finish(self) -> None:
        self._judge_errors()
        self._judge_steps()
        for member, process in self.processes.items():
            if member.startswith("worker") and process.status is None:
                self.tell(member, "check")
        cut_off = {fault.victim for fault in self.trial.faults if fault.kind == "cut"}
        for member, process in self.processes.items():
            if member in cut_off and member.startswith("server"):
                process.kill()  # it waits for those whom it has lost; nobody can tell it that the job is over
            status = self.wait_for_end(member, 10)
            if status is None:
                continue
            fatal = status not in (0, -signal.SIGKILL) if member in self.trial.lost else status != 0
            if fatal and not (member in self.trial.lost and status > 0):
                self.violations.append(f"{member} {describe_status(status)}")
        self.judge_reports(self.trial.workers, self.trial.survivors)

    def _judge_errors(self) -> None:
        kinds = [fault.kind for fault in self.trial.faults]
        is_single = len(kinds) == 1 and kinds[0] in ("kill", "stop", "restart")
        for rank in self.trial.survivors:
            who = f"worker {rank}"
            for error in self.lines(rank, "error"):
                self.violations.append(f"{who}: {error['kind']}: {error['text']}")
            told = self.lines(rank, "aborted")
            if self.trial.is_unseen:
                self.violations += [f"{who} has noticed something: {one['text']}" for one in told]
                continue
            # Each of a rank's exceptions is for another view, which the rank looks at itself.
            last_view = self._steps(rank)[-1]["view"]
            if not 1 <= len(told) < last_view or (is_single and len(told) != 1):
                self.violations.append(f"{who} was told {len(told)} times that a view had ended; it is in {last_view}")

    def _judge_steps(self) -> None:
        """Everybody has committed the same, and nobody stood still for too long."""
        expected = {step["number"]: step["history"] for step in self._steps(self.trial.survivors[0])}
        for rank in range(self.trial.workers):
            steps = self._steps(rank)
            if rank not in self.trial.survivors:
                steps = [step for step in steps if step["number"] in expected]
            elif len(steps) != len(expected):
                self.violations.append(f"worker {rank} has committed {len(steps)} steps, others {len(expected)}")
            wrong = [step for step in steps if expected.get(step["number"]) != step["history"]]
            if wrong:
                self.violations.append(f"worker {rank} has committed something else from step {wrong[0]['number']} on")
        limit = self.trial.stands_still_s * PATIENCE
        for rank in self.trial.survivors:
            times = [step["at"] for step in self._steps(rank)]
            longest = max(after - before for before, after in itertools.pairwise(times[4:]))
            if longest > limit:
                self.violations.append(f"worker {rank} stood still for {longest:.1f} s, more than {limit:.1f} s")
