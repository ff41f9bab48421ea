# SPDX-License-Identifier: Apache-2.0
"""The state of a whole job, gathered from its processes and its scheduler, or read from files of BPS_DUMP_DIR."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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
    process: local.LocalProcess | None = None  # where it can be asked on this machine
    process_state: str = ""  # the kernel's letter for a process of this machine, where its number means it here

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


class _Answer(NamedTuple):
    """A report, and the process of this machine that has given it itself."""

    report: Report
    process: local.LocalProcess | None = None


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
    answers: dict[str, list[_Answer]] = defaultdict(list)
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
            answers[job].append(_Answer(report, asked[reply]))
            if job not in relays:  # at once: others may not reply before the time is over
                relays[job] = threads.submit(local.ask, asked[reply], "job" + words, _JOB_TIMEOUT_S)
    silent = [one for one in silent if one.is_ours or local.is_listening(one)]
    states = [_combine(answers[job], relays[job].result(), silent) for job in answers]
    if not states and silent:  # all of them hang: not even whose they are can be told
        silent.sort(key=lambda one: one.pid)
        states = [JobState(name=f"of the processes {', '.join(str(one.pid) for one in silent)}")]
        for number, one in enumerate(silent, start=1):
            states[0].members[-number] = Member(-number, -1, -1, socket.gethostname(), one.pid)
            states[0].members[-number].process_state = one.state
    return states


def _timeout_of(process: local.LocalProcess) -> float:
    return _STOPPED_TIMEOUT_S if process.state in ("T", "t") else _LOCAL_TIMEOUT_S


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
        states.append(_combine([_Answer(report) for report in reports], {"scheduler": scheduler or {}}))
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
        raise InvalidArgumentError(
            f"{text!r} is no address of a scheduler, and no file or folder", "write an address as host:port"
        )
    return host.strip("[]"), int(port)


def _gather_from(address: str, stacks: bool) -> JobState:
    host, port = address_of(address)
    scheduler, reports = _core.ask_job(_core.Config(), host, port, stacks, _REMOTE_TIMEOUT_S)
    reply = {"scheduler": json.loads(scheduler), "members": [json.loads(report) for report in reports]}
    return _combine([], reply, address=address)


def _combine(
    answers: list[_Answer], reply: Report | None, silent: Sequence[local.LocalProcess] = (), address: str = ""
) -> JobState:
    """`reply` of the scheduler; `silent` are processes of this machine whose jobs are not known."""
    state = JobState(scheduler_address=address)
    if reply is None:
        state.scheduler_error = "it does not reply"
    elif "error" in reply:
        state.scheduler_error = reply["error"]
    else:
        state.scheduler = reply["scheduler"]
        if "error" in reply["scheduler"]:
            state.scheduler, state.scheduler_error = None, reply["scheduler"]["error"]
        answers = answers + [_Answer(report) for report in reply.get("members", [])]
    # Numbers of nodes are those of one view, and processes of two containers may have the same number as well.
    answers = sorted(answers, key=lambda answer: answer.report["job"].get("epoch", 0), reverse=True)
    reports = [answer.report for answer in answers]
    newest = max((report["job"].get("epoch", 0) for report in reports), default=0)
    table: list[Report] = (state.scheduler or {}).get("members") or next(
        (report["members"] for report in reports if report["job"].get("epoch") == newest and "members" in report), []
    )
    for one in table:
        state.members[one["node"]] = Member(**{key: one[key] for key in _OF_MEMBER if key in one})
    for report, process in answers:
        member = state.members.get(report.get("node", 0))
        if member is not None and member.pid == report["pid"]:
            member.report = member.report or report
            member.process = member.process or process
        elif process or (report["pid"], report["host"]) not in [(one["pid"], one["host"]) for one in state.unplaced]:
            state.unplaced.append(report)
    hosts = {report["host"] for report, process in answers if process}
    _place([member for member in state.members.values() if member.host in hosts and not member.process], silent)
    for member in state.members.values():
        member.process_state = member.process.state if member.process else ""
    state.name = next((report["job"]["id"] for report in reports), "")
    state.key = next((report["job"]["incarnation"] for report in reports), "")
    return state


def _place(members: Sequence[Member], silent: Sequence[local.LocalProcess]) -> None:
    """Finds processes of members by their numbers. One that two containers have tells nothing."""
    for member in members:
        processes = [process for process in silent if process.pid == member.pid]
        if len(processes) == 1 and [other.pid for other in members].count(member.pid) == 1:
            member.process = processes[0]
