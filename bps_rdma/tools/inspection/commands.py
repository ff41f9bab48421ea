# SPDX-License-Identifier: Apache-2.0
"""The commands `bps why` and `bps dump`."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from bps_rdma import files
from bps_rdma.errors import BpsError, InvalidArgumentError
from bps_rdma.tools.inspection import local, torch_dump
from bps_rdma.tools.inspection.diagnosis import Diagnosis, diagnose, look_at_stacks, main_stack
from bps_rdma.tools.inspection.job_state import JobState, Report, from_folder, gather

_STACKS_TIMEOUT_S = 0.9
_WHOLE_S = 1.6  # with what it takes to start Python, this is less than two seconds

_Where = Annotated[
    str,
    typer.Argument(
        metavar="[WHERE]",
        help="host:port of a job's scheduler, or a folder of BPS_DUMP_DIR. Default: the jobs on this machine.",
    ),
]
_Name = Annotated[
    str, typer.Option("--job", help="Of several jobs, those whose BPS_JOB_ID begins so; `bps run` makes one up.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class NoJobError(BpsError):
    """There is no job to say anything of."""

    def __init__(self, command: str, where: str, name: str) -> None:
        if where:
            named = f"with a name that begins with {name}" if name else "to be seen"
            super().__init__(f"at {where} there is no job {named}", "look at the folder, or do without --job")
            return
        named = f" whose name begins with {name}" if name else ""
        super().__init__(
            f"none of your processes on this machine takes part in a job{named}",
            f"run it on a machine of the job, or name the scheduler: bps {command} HOST:PORT",
        )


def why(where: _Where = "", name: _Name = "", as_json: _Json = False) -> int:
    """Say whom a job waits for.

    Asks every process of the job what it waits for, also when it hangs, and names the rank, server or connection that
    the others wait for, with its Python stack. Without WHERE it explains each of your jobs that has a process on this
    machine.
    """
    until = time.monotonic() + _WHOLE_S
    states = jobs(where, name, stacks=bool(where))  # there is no time to ask a job elsewhere twice
    explained = [(state, explain(state, until)) for state in states]
    if as_json:
        print(json.dumps([{"job": state.name, **found.as_json()} for state, found in explained], indent=1))
    elif not explained:
        raise NoJobError("why", where, name)
    else:
        for number, (state, found) in enumerate(explained):
            if len(explained) > 1:
                print(f"{'' if number == 0 else chr(10)}job {state.name or number}:")
            _print(found)
    return 0 if explained else 1


def dump(
    where: _Where = "",
    name: _Name = "",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.")] = None,
    stacks: Annotated[bool, typer.Option(help="Add the Python stacks of all ranks.")] = False,
    for_torch: Annotated[
        Path | None,
        typer.Option(
            "--torch",
            metavar="DIR",
            help="Write the last operations of each rank to this folder, for torch's `torchfrtrace DIR`.",
        ),
    ] = None,
) -> int:
    """Print, as JSON, what every process of a job is doing: for a bug report, or for `bps why FILE` later.

    It has the names of tensors and hosts, and no data.
    """
    states = jobs(where, name, stacks)
    if not states:
        raise NoJobError("dump", where, name)
    if for_torch is not None:
        return _dump_for_torch(states, for_torch)
    found = [state.as_json() for state in states]
    text = json.dumps(found, indent=1)
    if output is None:
        print(text)
    else:
        with files.output(output) as out:
            out.write(text.encode() + b"\n")
        print(f"{sum(len(one['members']) for one in found)} reports written to {output}", file=sys.stderr)
    return 0


def _dump_for_torch(states: list[JobState], folder: Path) -> int:
    if len(states) > 1:
        raise InvalidArgumentError(f"there are {len(states)} jobs", "name one: --job NAME")
    written, silent = torch_dump.save(states[0], folder)
    print(f"{len(written)} files written to {folder}; analyse them with: torchfrtrace {folder}", file=sys.stderr)
    if silent:
        print(f"no report of ranks {silent}: add --allow-incomplete-ranks", file=sys.stderr)
    return 0


def jobs(where: str, name: str = "", stacks: bool = False) -> list[JobState]:
    """Finds the jobs that WHERE and --job of a command stand for."""
    found = from_folder(Path(where)) if where and Path(where).exists() else gather(where, stacks)
    return [state for state in found if state.name.startswith(name)]


def explain(state: JobState, until: float = math.inf) -> Diagnosis:
    """The diagnosis of a job, with the stacks of the culprits where these run code of their own.

    Args:
        state: of the job.
        until: when it must be there, on the clock of time.monotonic(); stacks that take longer are left out.
    """
    found = diagnose(state)
    if not found.wants_stacks:
        return found
    elsewhere: dict[int, Report] | None = None  # asked for once
    for member in found.culprits:
        if member.report is None or "stacks" in member.report or not member.asked:
            continue
        if member.process is not None:
            again = local.ask(member.process, "report stacks", min(_STACKS_TIMEOUT_S, _left(until)))
        else:
            if elsewhere is None:
                elsewhere = _ask_scheduler(state, _left(until))
            again = elsewhere.get(member.node)
        member.report["stacks"] = (again or {}).get("stacks", "")
    look_at_stacks(found)
    return found


def _left(until: float) -> float:
    return max(until - time.monotonic(), 0.001)


def _ask_scheduler(state: JobState, timeout: float) -> dict[int, Report]:
    """Returns reports with stacks, by node, by way of a process of this machine that has answered before."""
    for member in state.members.values():
        if member.report is not None and member.process is not None:
            reply = local.ask(member.process, "job stacks", min(timeout, 2 * _STACKS_TIMEOUT_S)) or {}
            return {report["node"]: report for report in reply.get("members", []) if "node" in report}
    return {}


def _print(found: Diagnosis) -> None:
    print(found.text)
    for member in found.culprits:
        frames = main_stack((member.report or {}).get("stacks", ""))
        if frames:
            print(f"{member.name} is at:")
            for frame in frames:
                print(f"  {frame}")
