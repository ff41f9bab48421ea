# SPDX-License-Identifier: Apache-2.0
"""The command `bps top`: the members of a running job, again and again."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from bps_rdma.terminal import wide_console
from bps_rdma.tools.inspection.commands import NoJobError, _Json, _Name, jobs
from bps_rdma.tools.inspection.diagnosis import SILENT_MS, diagnose, waits_of
from bps_rdma.tools.inspection.job_state import JobState, Member

if TYPE_CHECKING:
    from rich.console import RenderableType

_FIRST_INTERVAL_S = 0.5
_MOST_NAMED = 8


@dataclass(frozen=True)
class Row:
    """A member of a job: what it did per second since the last look, and what it waits for."""

    name: str
    host: str
    pid: int
    state: str  # "running", "waiting", "GPU wait" (not for other members), "silent", "left" or "lost"
    cpu_percent: float | None  # 100 is one core
    memory_bytes: int | None
    operations_per_s: float | None
    tensor_bytes_per_s: float | None  # tensors of operations that have ended here
    sent_bytes_per_s: float | None  # on data connections
    received_bytes_per_s: float | None  # contributions that its server took, and results that the rank got
    credits: int | None  # landing slots of servers that it may fill now; None: none are needed
    stalls_per_s: float | None  # waits for credits
    open_operations: int
    oldest_ms: int
    awaited_by: int  # operations and calls of other ranks
    last_percent: float | None  # the share of the last rounds in which its push came last
    is_slowest: bool
    oldest_round_ms: int  # the age of the oldest round that its server has open
    round_waits_for: list[int]  # ranks whose push that round lacks


def top(
    where: Annotated[
        str, typer.Argument(metavar="[HOST:PORT]", help="Of a job's scheduler. Default: the job on this machine.")
    ] = "",
    name: _Name = "",
    once: Annotated[bool, typer.Option(help="Print once and end.")] = False,
    as_json: _Json = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 1.0,
) -> int:
    """Show the ranks and servers of a running job, and whom it waits for.

    The secret of a job elsewhere is read from BPS_SECRET or BPS_SECRET_FILE.
    """
    before, began = _the_job(where, name), time.monotonic()
    if once or as_json or not sys.stdout.isatty():
        time.sleep(min(interval, _FIRST_INTERVAL_S))
        now = _the_job(where, name)
        rows = rows_of(before, now, time.monotonic() - began)
        if as_json:
            print(json.dumps({"job": now.name, "why": diagnose(now).text, "members": [asdict(row) for row in rows]}))
        else:
            print_members(now, rows)
        return 0
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                now, ended = _the_job(where, name), time.monotonic()
            except NoJobError:  # it is over
                return 0
            rows = rows_of(before, now, ended - began)
            live.update(_table(now, rows, live.console.width), refresh=True)
            before, began = now, ended


def _the_job(where: str, name: str) -> JobState:
    found = jobs(where, name)
    if not found:
        raise NoJobError("top", where, name)
    if len(found) > 1:
        names = ", ".join(state.name for state in found)
        print(f"several jobs run here: {names}; this is the largest one, --job chooses another", file=sys.stderr)
    return max(found, key=lambda state: len(state.members))


def rows_of(before: JobState, now: JobState, seconds: float) -> list[Row]:
    """The work of the members between two looks at a job, which were so many seconds apart."""
    awaited: dict[int, int] = {}
    oldest: dict[int, int] = {}
    for wait in waits_of(now):
        oldest[wait.rank] = max(oldest.get(wait.rank, 0), wait.since_ms)
        for rank in wait.missing | wait.on_gpu - {wait.rank}:
            awaited[rank] = awaited.get(rank, 0) + 1
    last = _last_percent(now)
    slowest = _slowest(awaited, last)
    on_gpu = {wait.rank for wait in waits_of(now) if wait.rank in wait.on_gpu and not wait.missing}
    rows = []
    for node, member in sorted(now.members.items()):
        waits = (oldest.get(member.rank, 0), awaited.get(member.rank, 0))
        row = _row(member, before.members.get(node), seconds, *waits)
        if row.state == "waiting" and member.rank in on_gpu:
            row = replace(row, state="GPU wait")
        rows.append(replace(row, last_percent=last.get(member.rank), is_slowest=member.rank in slowest))
    return rows


def _last_percent(job: JobState) -> dict[int, float]:
    """The share, by rank, of the servers' last rounds in which the rank's push came last, in %."""
    ranks = Counter(
        one["last_rank"]
        for member in job.members.values()
        for one in (member.report or {}).get("recent_rounds", [])
        if one["state"] == "done"
    )
    total = sum(ranks.values())
    return {rank: 100.0 * ranks[rank] / total for rank in job.workers()} if total else {}


def _slowest(awaited: dict[int, int], last: dict[int, float]) -> set[int]:
    """The ranks that most others wait for now, else the one that was last far more often than chance would have it."""
    most = max(awaited.values(), default=0)
    if most:
        return {rank for rank, count in awaited.items() if count == most}
    limit = min(75.0, 200.0 / max(len(last), 1))
    return {rank for rank, percent in last.items() if len(last) > 1 and percent >= limit}


def _row(member: Member, before: Member | None, seconds: float, oldest_ms: int, awaited_by: int) -> Row:
    report = member.report
    earlier = before.report if before is not None and before.pid == member.pid else None
    state = member.fate if member.fate != "here" else "running"
    if state == "running" and (report is None or member.silent_ms > SILENT_MS):
        state = "silent"

    def rate(part: str, name: str) -> float | None:
        if report is None or earlier is None or seconds <= 0 or name not in earlier[part]:
            return None
        return max(float(report[part][name] - earlier[part][name]) / seconds, 0.0)

    cpu = rate("usage", "cpu_ms")
    operations = {one["operation"] for one in report["operations"] if one["operation"]} if report else set()
    if state == "running" and (operations or (report or {}).get("calls")):
        state = "waiting"
    rounds = (report or {}).get("rounds", [])
    oldest_round = max(rounds, key=lambda one: int(one.get("since_ms", 0)), default=None)
    return Row(
        name=member.name + (f" + server {member.server_rank}" if member.rank >= 0 and member.server_rank >= 0 else ""),
        host=member.host,
        pid=member.pid,
        state=state,
        cpu_percent=None if cpu is None else cpu / 10,
        memory_bytes=report["usage"]["memory_bytes"] if report else None,
        operations_per_s=rate("counters", "operations"),
        tensor_bytes_per_s=rate("counters", "operation_bytes"),
        sent_bytes_per_s=rate("counters", "data_bytes"),
        received_bytes_per_s=rate("counters", "received_bytes"),
        credits=(report or {}).get("credits"),
        stalls_per_s=rate("counters", "credit_stalls"),
        open_operations=len(operations),
        oldest_ms=oldest_ms,
        awaited_by=awaited_by,
        last_percent=None,
        is_slowest=False,
        oldest_round_ms=oldest_round.get("since_ms", 0) if oldest_round else 0,
        round_waits_for=oldest_round["missing"] if oldest_round else [],
    )


def print_members(state: JobState, rows: list[Row]) -> None:
    """Prints the table once. A pipe gets the columns that the whole table may need."""
    console = wide_console(300)
    console.print(_table(state, rows, console.width))


_NARROW = 150  # columns of a terminal in which the whole table does not fit
# There; --json has them.
_LEFT_OUT = {"received/s", "credits", "stalls/s", "open", "last %", "oldest round", "waits for"}


def _table(state: JobState, rows: list[Row], width: int) -> RenderableType:
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    colours = {"silent": "red", "lost": "red", "waiting": "yellow", "GPU wait": "yellow"}
    cells: list[dict[str, str | Text]] = [
        {
            "member": Text(f"{row.name} (slowest)", style="red") if row.is_slowest else Text(row.name),
             "host": row.host, "pid": str(row.pid),
            "state": Text(row.state, style=colours.get(row.state, "")), "CPU %": _number(row.cpu_percent),
            "memory": _bytes(row.memory_bytes), "ops/s": _number(row.operations_per_s),
            "tensors/s": _bytes(row.tensor_bytes_per_s), "sent/s": _bytes(row.sent_bytes_per_s),
            "received/s": _bytes(row.received_bytes_per_s), "credits": _number(row.credits),
            "stalls/s": _number(row.stalls_per_s), "open": str(row.open_operations or "-"),
            "oldest": _seconds(row.oldest_ms), "awaited by": str(row.awaited_by or "-"),
            "last %": _number(row.last_percent), "oldest round": _seconds(row.oldest_round_ms),
            "waits for": ", ".join(map(str, row.round_waits_for[:_MOST_NAMED])) or "-",
        }
        for row in rows
    ]  # fmt: skip
    narrow = width < _NARROW
    table = Table(box=SIMPLE_HEAD, padding=0 if narrow else (0, 1))
    titles = [title for title in cells[0] if not narrow or title not in _LEFT_OUT] if cells else []
    columns = [[title, *(str(one[title]) for one in cells)] for title in titles]
    widths = _of_whole_words(columns, width - len(columns) - 1) if narrow else [None] * len(columns)
    for title, wide in zip(titles, widths, strict=True):
        is_text = title in {"member", "host", "pid", "state", "waits for"}
        table.add_column(
            title, justify="left" if is_text else "right", width=wide, no_wrap=title == "pid", overflow="fold"
        )
    for one in cells:
        table.add_row(*(one[title] for title in titles))
    workers = sum(1 for member in state.members.values() if member.rank >= 0)
    servers = sum(1 for member in state.members.values() if member.server_rank >= 0)
    phase = (state.scheduler or {}).get("phase", "without its scheduler")
    title = f"{state.name or 'job'}: {workers} workers, {servers} servers, {phase}"
    return Group(Text(title, style="bold"), table, Text(diagnose(state).text))


def _of_whole_words(columns: list[list[str]], room: int) -> list[int | None]:
    """Widths of columns in which no word is broken; without any where there is no room for that."""
    words = [max(len(word) for text in column for word in text.split()) for column in columns]
    spare = room - sum(words)
    if spare < 0:
        return [None] * len(columns)
    widths: list[int | None] = []
    for column, least in zip(columns, words, strict=True):
        more = min(spare, max(map(len, column)) - least)
        spare -= more
        widths.append(least + more)
    return widths


def _seconds(ms: int) -> str:
    return f"{ms / 1e3:.1f} s" if ms else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"
