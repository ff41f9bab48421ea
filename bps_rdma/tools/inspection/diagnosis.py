# SPDX-License-Identifier: Apache-2.0
"""Finds whom a job waits for: from the reports of its processes to one paragraph. Pure functions."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bps_rdma.tools.inspection.job_state import JobState, Member, Report

# Members send three heartbeats or more in the time-out, at least one in half a second.
SILENT_MS = 1500
_NORMAL_MS = 1000  # a shorter wait is no sign of a hang
_MOST_NAMED = 8
_MOST_FRAMES = 6
_PACKAGE = Path(__file__).parents[1]

# Group, tensor, partition and round.
_Key = tuple[int, int, int, int]
Kind = Literal["none", "starting", "view", "rank", "process", "server", "network", "order", "scheduler", "gpu"]
# The thread that sends what a GPU has copied waits for the copy.
_AWAITS_COPY = re.compile(r' in wait\n\s*File "[^"]*torch/transfer/pipeline\.py", line \d+ in _send\b')


@dataclass(frozen=True)
class Wait:
    """Something that a rank waits for: an operation, or a call that the scheduler answers."""

    rank: int
    what: str  # "push_pull of 'w', round 3"
    since_ms: int
    left_ms: int | None
    missing: frozenset[int]  # ranks that have not called it
    lost: frozenset[int] = frozenset()  # ranks whose part has been sent, and has not arrived
    on_gpu: frozenset[int] = frozenset()  # ranks that wait for their GPU's copies, perhaps this one
    sent: bool = True  # this rank has sent its part
    servers: frozenset[str] = frozenset()  # servers that do not say whom they wait for, as members describe themselves


@dataclass
class Diagnosis:
    """The answer of `bps why`."""

    kind: Kind
    text: str
    culprits: list[Member] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)  # the longest first
    wants_stacks: bool = False  # the culprits are in their own code

    def as_json(self) -> dict[str, Any]:
        """Returns the answer for machines: {"kind", "text", "culprits", "operation", "since_ms", "stacks"}."""
        first = self.waits[0] if self.waits else None
        return {
            "kind": self.kind,
            "text": self.text,
            "culprits": [
                {"rank": one.rank, "server_rank": one.server_rank, "host": one.host, "pid": one.pid}
                for one in self.culprits
            ],
            "operation": first.what if first else None,
            "since_ms": first.since_ms if first else None,
            "stacks": {one.name: (one.report or {}).get("stacks", "") for one in self.culprits} if first else {},
        }


def diagnose(job: JobState) -> Diagnosis:
    """Names the member of a job that the others wait for, if they wait."""
    found = _starting(job) or _diagnose(job, sorted(waits_of(job), key=lambda wait: -wait.since_ms))
    failed = _failed(job)
    if found.waits and found.waits[0].since_ms < _NORMAL_MS and not failed:
        found.text += " Nothing has waited for a second yet: the job may well be running."
    found.text += failed + slow_links(job)
    return found


def slow_links(job: JobState) -> str:
    """Says which links carry less than they should, and what was done about it; "" where none does."""
    slow = (job.scheduler or {}).get("slow_links", [])
    if not slow:
        return ""
    named = [f"{one['host']} ({one['gbps']:.3g} Gbit/s of {one['was_gbps']:.3g})" for one in slow]
    which = "The link of" if len(named) == 1 else "The links of"
    carries = "carries" if len(named) == 1 else "carry"
    return f" {which} {', '.join(named)} {carries} less than before: the servers there sum less until that changes."


def _diagnose(job: JobState, waits: list[Wait]) -> Diagnosis:
    dead = [member for member in job.members.values() if _is_silent(member)]
    if not waits:
        return _nobody_waits(job, dead)
    if (job.scheduler or {}).get("phase") == "renewing":
        return _renewing(job, waits, dead)
    ranks = job.workers()
    first = waits[0]
    for wait in waits:
        silent = [member for member in dead if _is_waited_for(member, wait)]
        if silent:
            return Diagnosis("process", f"{_opening(wait)} {_why_silent(silent)}", silent, waits)
    needs_scheduler = [wait for wait in waits if not (wait.missing or wait.lost or wait.servers or wait.on_gpu)]
    if needs_scheduler and _scheduler_is_gone(job):
        return Diagnosis(
            "scheduler",
            f"{_opening(needs_scheduler[0])} Only the scheduler can answer that, and {_why_no_scheduler(job)}",
            [],
            waits,
        )
    if dead and not any(wait.missing or wait.lost for wait in waits):
        return Diagnosis("process", f"{_opening(first)} {_why_silent(dead)}", dead, waits)
    by_rank: dict[int, list[Wait]] = defaultdict(list)
    for wait in waits:
        by_rank[wait.rank].append(wait)
    for wait in waits:
        found = _follow(wait, by_rank, ranks)
        if found is not None:
            found.waits = [wait, *(other for other in waits if other is not wait)]
            return found
    servers = [member for member in job.members.values() if any(_is_named(member, wait) for wait in waits)]
    unknown = [member for member in servers if member.report is None]
    if unknown:
        text = f"{_opening(first)} Whom that is for, {_names(unknown)} would know, but {_has(unknown)} given no report."
    else:
        text = f"{_opening(first)} No rank is missing."
        text += f" The answer of {_names(servers)} has not come." if servers else ""
    return Diagnosis("server" if servers else "none", text, servers, waits)


def waits_of(job: JobState) -> list[Wait]:
    """All that ranks of a job wait for, one entry for each operation."""
    rounds: dict[_Key, list[Report]] = defaultdict(list)
    begun: dict[_Key, dict[int, str]]  # by rank: what it waits for
    for member in job.members.values():
        if member.report is None:
            continue
        for one in member.report["rounds"]:
            rounds[_key(one)].append(one)
    begun = defaultdict(dict)
    for rank, member in job.workers().items():
        for one in (member.report or {"operations": []})["operations"]:
            begun[_key(one)][rank] = one["waits_for"]
    found = []
    for member in job.members.values():
        if member.report is None or member.rank < 0:
            continue
        found += _operations(member, rounds, begun)
        found += _calls(member, job)
    return found


def _key(one: Report) -> _Key:
    return one["group"], one["tensor"], one["partition"], one["round"]


def _operations(member: Member, rounds: dict[_Key, list[Report]], begun: dict[_Key, dict[int, str]]) -> list[Wait]:
    by_operation: dict[str, list[Report]] = defaultdict(list)
    for one in (member.report or {})["operations"]:
        if one["operation"]:
            by_operation[one["operation"]].append(one)
    waits = []
    for what, partitions in by_operation.items():
        missing: set[int] = set()
        lost: set[int] = set()
        on_gpu = {member.rank} if any(one["waits_for"] == "gpu" for one in partitions) else set()
        servers: set[str] = set()
        sent = all(one["waits_for"] == "answer" for one in partitions)
        for one in partitions:
            awaited = {rank for open_round in rounds.get(_key(one), []) for rank in open_round["missing"]}
            missing |= {rank for rank in awaited if rank not in begun[_key(one)]}
            lost |= {rank for rank in awaited if begun[_key(one)].get(rank) == "answer"}
            on_gpu |= {rank for rank in awaited if begun[_key(one)].get(rank) == "gpu"}
            if not awaited:
                servers.add(one["server"])
        oldest = partitions[0]
        waits.append(
            Wait(
                rank=member.rank,
                what=what,
                since_ms=oldest["since_ms"],
                left_ms=oldest["left_ms"],
                missing=frozenset(missing),
                lost=frozenset(lost),
                on_gpu=frozenset(on_gpu),
                sent=sent,
                servers=frozenset(servers),
            )
        )
    return waits


def _calls(member: Member, job: JobState) -> list[Wait]:
    waits = []
    for call in (member.report or {})["calls"]:
        missing: set[int] = set()
        name = call["what"].removeprefix("the ").removeprefix("making the ")
        for one in (job.scheduler or {}).get("calls", []):
            if member.rank in one["ranks"] and name.split("'")[0].split()[0] in one["what"]:
                missing.update(one["missing"])
        if call["what"] == "leaving the job":
            here = {rank for rank, other in job.workers().items() if other.fate == "here"}
            missing = here - {rank for rank in here if _is_leaving(job.workers()[rank])}
        waits.append(Wait(member.rank, call["what"], call["since_ms"], None, frozenset(missing - {member.rank})))
    return waits


def _is_leaving(member: Member) -> bool:
    return any(call["what"] == "leaving the job" for call in (member.report or {"calls": []})["calls"])


def _follow(wait: Wait, by_rank: dict[int, list[Wait]], ranks: dict[int, Member]) -> Diagnosis | None:
    """Follows a wait to the ranks that are missing, and those to what they wait for themselves."""
    path = [wait]
    while True:
        last = path[-1]
        missing = [ranks[rank] for rank in sorted(last.missing) if rank in ranks]
        lost_on_the_way = [ranks[rank] for rank in sorted(last.lost) if rank in ranks]
        if not missing and last.on_gpu:
            late = [ranks[rank] for rank in sorted(last.on_gpu)]
            return Diagnosis("gpu", f"{_opening(last)} {_late_gpu(late)}", late, wants_stacks=True)
        if not missing and not lost_on_the_way:
            return None
        if not missing:
            text = (
                f"{_opening(last)} What {_names(lost_on_the_way)} {_has(lost_on_the_way)} sent for it has not arrived: "
                "a connection to the server is cut, or very slow. Look into the network between them."
            )
            return Diagnosis("network", text, lost_on_the_way)
        idle = [one for one in missing if not by_rank.get(one.rank)]
        if idle:
            in_code = [one for one in idle if one.report is not None]
            if not in_code:
                text = f"{_opening(last)} {_sentence(_names(idle))} {_has(idle)} not replied."
                return Diagnosis("process", text, idle)
            return Diagnosis("rank", f"{_opening(last)} {_busy(idle)}", idle, wants_stacks=True)
        after = by_rank[missing[0].rank][0]
        if after in path:
            loop = path[path.index(after) :]
            steps = "; ".join(f"rank {one.rank} waits in {one.what} for {_ranks(one.missing)}" for one in loop)
            return Diagnosis(
                "order",
                f"The ranks call operations in different orders, and wait for each other: {steps}. They must use the "
                "same names in an order that matches, or asynchronous operations.",
                [ranks[one.rank] for one in loop],
                wants_stacks=True,
            )
        path.append(after)


def _busy(ranks: list[Member]) -> str:
    return f"{_sentence(_names(ranks))} {_has(ranks)} not called it, and {_is(ranks)} busy elsewhere."


def _late_gpu(ranks: list[Member]) -> str:
    wait, its = ("waits", "its GPU") if len(ranks) == 1 else ("wait", "their GPUs")
    return (
        f"{_sentence(_names(ranks))} {wait} for {its}: kernels before the operation have not ended, or a copy hangs. "
        "nvidia-smi shows whether the GPU works."
    )


def look_at_stacks(found: Diagnosis) -> None:
    """Finds GPUs that are waited for where the copies are not the core's, once the culprits' stacks are there."""
    late = [one for one in found.culprits if _AWAITS_COPY.search((one.report or {}).get("stacks", ""))]
    if found.kind == "rank" and late:
        found.text = found.text.replace(_busy(found.culprits), _late_gpu(late))
        found.kind, found.culprits = "gpu", late


def _failed(job: JobState) -> str:
    """Says how the last operations of ranks have failed, if they have."""
    reasons = {member.name: (member.report or {}).get("last_failure") for member in job.members.values()}
    lines = [f"\n{_sentence(name)} failed: {why}." for name, why in reasons.items() if why]
    return "".join(lines[:_MOST_NAMED])


def _starting(job: JobState) -> Diagnosis | None:
    phase = (job.scheduler or {}).get("phase")
    if phase == "suspended":
        return Diagnosis("starting", f"The job is suspended: {(job.scheduler or {})['missing']}.")
    if phase == "gathering":
        return Diagnosis("starting", f"The job has not begun: {(job.scheduler or {})['missing']}.")
    if not job.members and job.unplaced:
        where = job.unplaced[0]["job"]["scheduler"]
        return Diagnosis(
            "starting",
            f"The job has not begun: {len(job.unplaced)} process(es) of this machine look for the scheduler at {where}"
            + (f", where {job.scheduler_error}." if job.scheduler_error else "."),
        )
    return None


def _renewing(job: JobState, waits: list[Wait], dead: list[Member]) -> Diagnosis:
    scheduler = job.scheduler or {}
    awaited = [job.members[node] for node in scheduler.get("awaited", []) if node in job.members]
    text = f"The job changes to view {scheduler['epoch']}: {scheduler.get('why_renewed', 'a member is lost')}."
    if awaited:
        text += f" It waits for {_names(awaited)}, which has to call bps_rdma again."
    return Diagnosis("view", text, awaited or dead, waits, wants_stacks=bool(awaited))


def _nobody_waits(job: JobState, dead: list[Member]) -> Diagnosis:
    counted = sum(1 for member in job.members.values() if member.report is not None and member.rank >= 0)
    text = f"Nothing waits: no operation is open on the {counted} rank(s) that replied."
    if dead:
        return Diagnosis("process", f"{text} {_why_silent(dead)}", dead)
    if _scheduler_is_gone(job):
        return Diagnosis("scheduler", f"{text} But {_why_no_scheduler(job)}")
    return Diagnosis("none", text)


def _is_silent(member: Member) -> bool:
    if member.fate != "here" or (not member.asked and not member.process_state):
        return False
    return member.process_state in ("T", "t") or (member.report is None) or member.silent_ms > SILENT_MS


def _is_waited_for(member: Member, wait: Wait) -> bool:
    return member.rank in wait.missing or (_is_named(member, wait) and member.rank != wait.rank)


def _is_named(member: Member, wait: Wait) -> bool:
    return member.description in wait.servers


def _why_silent(members: list[Member]) -> str:
    reasons = []
    for member in members:
        if member.process_state in ("T", "t"):
            reason = f"is stopped, by SIGSTOP or a debugger: `kill -CONT {member.pid}` lets it go on"
        elif member.process_state == "Z":
            reason = "has ended, and its parent has not noticed"
        elif member.silent_ms > SILENT_MS:
            reason = (
                f"has sent the scheduler nothing for {member.silent_ms / 1e3:.1f} s: it is stopped, its host is down, "
                "or the network is cut"
            )
        else:
            loops = [loop["name"] for loop in (member.report or {"loops": []})["loops"] if not loop["answered"]]
            reason = f"does not answer ({', '.join(loops)} hangs)" if loops else "does not answer"
        reasons.append(_sentence(f"{_name(member)} {reason}."))
    return " ".join(reasons[:_MOST_NAMED])


def _scheduler_is_gone(job: JobState) -> bool:
    return job.scheduler is None and bool(job.scheduler_error)


def _why_no_scheduler(job: JobState) -> str:
    for member in job.members.values():
        why = (member.report or {"job": {}})["job"].get("why_scheduler_lost")
        if why:
            return f"{why}."
    return f"the scheduler cannot be asked: {job.scheduler_error}."


def _opening(wait: Wait) -> str:
    left = "" if wait.left_ms is None else f"; its deadline is in {wait.left_ms / 1e3:.0f} s"
    whom = f" for {_ranks(wait.missing)}" if wait.missing else ""
    if wait.rank in wait.on_gpu:
        whom = (whom + "," if whom else "") + " for its GPU"
    elif not wait.sent:
        whom = (whom + "," if whom else "") + " for room at the server"
    return f"Rank {wait.rank} has waited {wait.since_ms / 1e3:.1f} s in {wait.what}{whom}{left}."


def _ranks(ranks: frozenset[int]) -> str:
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:_MOST_NAMED])) + (", ..." if len(listed) > _MOST_NAMED else "")
    return f"rank {shown}" if len(listed) == 1 else f"ranks {shown}"


def _name(member: Member) -> str:
    return f"{member.name} ({member.host}, pid {member.pid})"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _names(members: list[Member]) -> str:
    shown = " and ".join(_name(one) for one in members[:_MOST_NAMED])
    return shown + (f" and {len(members) - _MOST_NAMED} more" if len(members) > _MOST_NAMED else "")


def _has(members: list[Member]) -> str:
    return "has" if len(members) == 1 else "have"


def _is(members: list[Member]) -> str:
    return "is" if len(members) == 1 else "are"


def main_stack(stacks: str) -> list[str]:
    """The newest frames of a program's main thread, which faulthandler writes last, without those of this package.

    Args:
        stacks: as faulthandler writes them.
    """
    threads = re.split(r"^(?:Current t|T)hread 0x[^\n]*\n", stacks, flags=re.MULTILINE)
    frames = [line.strip() for line in threads[-1].splitlines() if line.strip().startswith("File ")]
    called_from = [frame for frame in frames if not frame.startswith(f'File "{_PACKAGE}{os.sep}')]
    return (called_from or frames)[:_MOST_FRAMES]
