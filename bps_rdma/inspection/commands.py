# SPDX-License-Identifier: Apache-2.0
"""The commands `bps why` and `bps dump`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from bps_rdma.inspection import local
from bps_rdma.inspection.diagnosis import Diagnosis, diagnose, main_stack
from bps_rdma.inspection.job_state import JobState, from_folder, gather

_STACKS_TIMEOUT_S = 0.9

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


def why(where: _Where = "", name: _Name = "", as_json: _Json = False) -> int:
    """Say whom a job waits for.

    Asks every process of the job what it waits for, also when it hangs, and names the rank, server or connection that
    the others wait for, with its Python stack. Without WHERE it explains each of your jobs that has a process on this
    machine.
    """
    states = jobs(where, name)
    explained = [(state, explain(state)) for state in states]
    if as_json:
        print(json.dumps([{"job": state.name, **found.as_json()} for state, found in explained], indent=1))
    elif not explained:
        print("none of your processes on this machine takes part in such a job")
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
) -> int:
    """Print, as JSON, what every process of a job is doing: for a bug report, or for `bps why FILE` later.

    It has the names of tensors and hosts, and no data.
    """
    found = [state.as_json() for state in jobs(where, name, stacks)]
    text = json.dumps(found, indent=1)
    if output is None:
        print(text)
    else:
        output.write_text(text + "\n")
        print(f"{sum(len(one['members']) for one in found)} reports written to {output}", file=sys.stderr)
    return 0 if found else 1


def jobs(where: str, name: str = "", stacks: bool = False) -> list[JobState]:
    """What WHERE and --job of a command stand for."""
    found = from_folder(Path(where)) if where and Path(where).exists() else gather(where, stacks)
    return [state for state in found if state.name.startswith(name)]


def explain(state: JobState) -> Diagnosis:
    """The diagnosis of a job, with the stacks of the culprits where these run code of their own."""
    found = diagnose(state)
    if not found.wants_stacks:
        return found
    processes = {process.pid: process for process in local.find()}
    for member in found.culprits:
        if member.report is None or "stacks" in member.report or not member.asked:
            continue
        if member.process_state and member.pid in processes:
            again = local.ask(processes[member.pid], "report stacks", _STACKS_TIMEOUT_S)
        else:
            again = _ask_again(state, member.node)
        member.report["stacks"] = (again or {}).get("stacks", "")
    return found


def _ask_again(state: JobState, node: int) -> dict[str, object] | None:
    """The report of a member of another machine, with its stacks: by way of the scheduler."""
    for again in gather(state.scheduler_address, stacks=True):
        member = again.members.get(node)
        if member is not None and again.key == state.key:
            return member.report
    return None


def _print(found: Diagnosis) -> None:
    print(found.text)
    for member in found.culprits:
        frames = main_stack((member.report or {}).get("stacks", ""))
        if frames:
            print(f"{member.name} is at:")
            for frame in frames:
                print(f"  {frame}")
