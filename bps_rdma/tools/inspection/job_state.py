# SPDX-License-Identifier: Apache-2.0
"""The state of a whole job, gathered from its processes and its scheduler, or read from files of BPS_DUMP_DIR."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bps_rdma import _core, files
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.tools.inspection import local

# A process answers at once, unless its loops hang, and then after half a second; stacks may take 0.4 s more. One that
# asks the scheduler waits a second for all members.
_LOCAL_TIMEOUT_S = 1.0
_STOPPED_TIMEOUT_S = 0.1  # for a process that the kernel calls stopped
_JOB_TIMEOUT_S = 1.1
_REMOTE_TIMEOUT_S = 1.3  # over the network

_MOST_AT_ONCE = 64

Report = dict[str, Any]
_OF_MEMBER = ("node", "rank", "server_rank", "host", "pid", "fate", "silent_ms")  # what tables of members say


@dataclass
class Member:
    """One process of the job, as the others know it, and its report if it has given one."""

    node: int
    rank: int
    server_rank: int
    host: str
    pid: int
    fate: str = "here"  # or "left" or "lost"
    silent_ms: int = 0  # since the scheduler has heard of it
    report: Report | None = None
    asked: bool = True
    process_state: str = ""  # the kernel's letter for a process of this machine

    @property
    def name(self) -> str:
        """The name of the member in messages: "rank 3", or "server 1" for a dedicated server."""
        return f"rank {self.rank}" if self.rank >= 0 else f"server {self.server_rank}"

    @property
    def description(self) -> str:
        """The description that the native part uses: "worker 1 and server 1 (host, pid 42)"."""
        roles = [f"worker {self.rank}"] if self.rank >= 0 else []
        roles += [f"server {self.server_rank}"] if self.server_rank >= 0 else []
        return f"{' and '.join(roles)} ({self.host}, pid {self.pid})"


@dataclass
class JobState:
    """The known state of one job at one time."""

    name: str = ""
    key: str = ""  # no other job has it
    members: dict[int, Member] = field(default_factory=dict)  # by node
    unplaced: list[Report] = field(default_factory=list)  # reports of processes that have not joined
    scheduler: Report | None = None
    scheduler_error: str = ""
    scheduler_address: str = ""

    def workers(self) -> dict[int, Member]:
        """Members by worker rank."""
        return {member.rank: member for member in self.members.values() if member.rank >= 0}

    def as_json(self) -> dict[str, Any]:
        """Returns the state for machines: {"job", "scheduler", "members"}."""
        reports = [one.report for one in self.members.values() if one.report] + self.unplaced
        silent = [one.description for one in self.members.values() if one.report is None and one.fate == "here"]
        scheduler = self.scheduler if self.scheduler is not None else {"error": self.scheduler_error}
        return {"job": self.name, "scheduler": scheduler, "members": reports, "silent": silent}


def gather(address: str = "", stacks: bool = False) -> list[JobState]:
    """The jobs of this user that run on this machine, or the one whose scheduler listens at `address`.

    Args:
        address: "host:port" of a scheduler; the secret of the job is read from the settings, as by init().
        stacks: also where the threads of each process are.

    Raises:
        InvalidArgumentError: `address` is none.
        UnreachableError, AuthenticationError, VersionError: no scheduler there lets this process ask.
    """
    if address:
        return [_gather_from(address, stacks)]
    found = local.find()
    words = " stacks" if stacks else ""
    reports: dict[str, list[Report]] = defaultdict(list)
    relays: dict[str, Future[Report | None]] = {}  # by job: what its scheduler has gathered
    with ThreadPoolExecutor(max(min(len(found), _MOST_AT_ONCE), 1)) as threads:
        asked = {threads.submit(local.ask, one, "report" + words, _timeout_of(one)): one for one in found}
        silent = []
        for reply in as_completed(asked):
            report = reply.result()
            if report is None:
                silent.append(asked[reply])
                continue
            job = report["job"]["incarnation"]
            reports[job].append(report)
            if job not in relays:  # at once: others may not reply before the time is over
                relays[job] = threads.submit(local.ask, asked[reply], "job" + words, _JOB_TIMEOUT_S)
    pids = set(local.pids_of(found))
    states = [_combine(reports[job], relays[job].result(), pids) for job in reports]
    if not states and silent:  # all of them hang: not even whose they are can be told
        silent.sort(key=lambda one: one.pid)
        states = [JobState(name=f"of the processes {', '.join(str(one.pid) for one in silent)}")]
        for number, one in enumerate(silent, start=1):
            state = local.state_of(one.pid) if one.is_ours else ""
            states[0].members[-number] = Member(-number, -1, -1, socket.gethostname(), one.pid, process_state=state)
    return states


def _timeout_of(process: local.LocalProcess) -> float:
    is_stopped = process.is_ours and local.state_of(process.pid) in ("T", "t")
    return _STOPPED_TIMEOUT_S if is_stopped else _LOCAL_TIMEOUT_S


def from_folder(folder: Path) -> list[JobState]:
    """Reads the files that BPS_DUMP_DIR, or `bps dump --output`, has left in a folder; or one file.

    Raises:
        InvalidArgumentError: there is none, or one cannot be read.
    """
    in_folder = folder.is_dir()
    jobs: dict[str, tuple[list[Report], Report | None]] = {}
    for file in sorted(folder.glob("*.json")) if in_folder else [folder]:
        try:
            found = json.loads(files.read_text(file) if in_folder else file.read_text())
            for one in found if isinstance(found, list) else [found]:
                for report in one["members"] if "scheduler" in one else [one]:
                    reports, scheduler = jobs.setdefault(report["job"]["incarnation"], ([], None))
                    reports.append(report)
                    jobs[report["job"]["incarnation"]] = (reports, one.get("scheduler", scheduler))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidArgumentError(
                f"{file} is no report of bps_rdma: {error}", "name files of BPS_DUMP_DIR"
            ) from None
    if not jobs:
        if not folder.is_dir():
            hint = "write one while the job runs: bps dump -o FILE"
        else:
            hint = "set BPS_DUMP_DIR to it, and run the job: a rank writes there when an operation fails"
        raise InvalidArgumentError(f"there are no reports in {folder}", hint)
    states = []
    for reports, scheduler in jobs.values():
        states.append(_combine(reports, {"scheduler": scheduler or {}}, set()))
        states[-1].scheduler = scheduler
        for member in states[-1].members.values():
            member.asked = False  # it may have had no reason to write one
    return states


def address_of(text: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[host]:port".

    Raises:
        InvalidArgumentError: it is none.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidArgumentError(f"{text!r} is no address of a scheduler", "write it as host:port")
    return host.strip("[]"), int(port)


def _gather_from(address: str, stacks: bool) -> JobState:
    host, port = address_of(address)
    scheduler, reports = _core.ask_job(_core.Config(), host, port, stacks, _REMOTE_TIMEOUT_S)
    reply = {"scheduler": json.loads(scheduler), "members": [json.loads(report) for report in reports]}
    return _combine([], reply, set(), address)


def _combine(reports: list[Report], reply: Report | None, local_pids: set[int], address: str = "") -> JobState:
    """`reports` of this machine; `reply` of the scheduler; `local_pids` of the jobs of this machine."""
    state = JobState(scheduler_address=address)
    if reply is None:
        state.scheduler_error = "it does not reply"
    elif "error" in reply:
        state.scheduler_error = reply["error"]
    else:
        state.scheduler = reply["scheduler"]
        if "error" in reply["scheduler"]:
            state.scheduler, state.scheduler_error = None, reply["scheduler"]["error"]
        reports = reports + reply.get("members", [])
    newest = max((report["job"].get("epoch", 0) for report in reports), default=0)
    table: list[Report] = (state.scheduler or {}).get("members") or next(
        (report["members"] for report in reports if report["job"].get("epoch") == newest and "members" in report), []
    )
    for one in table:
        state.members[one["node"]] = Member(**{key: one[key] for key in _OF_MEMBER if key in one})
    for report in reports:
        member = state.members.get(report.get("node", 0))
        if member is not None and member.pid == report["pid"]:
            member.report = member.report or report
        elif all((known["pid"], known["host"]) != (report["pid"], report["host"]) for known in state.unplaced):
            state.unplaced.append(report)
    here = {report["host"] for report in reports if report["pid"] in local_pids}
    for member in state.members.values():
        if member.host in here and member.pid in local_pids:
            member.process_state = local.state_of(member.pid)
    state.name = next((report["job"]["id"] for report in reports), "")
    state.key = next((report["job"]["incarnation"] for report in reports), "")
    return state
