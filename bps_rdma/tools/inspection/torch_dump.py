# SPDX-License-Identifier: Apache-2.0
"""The flight recorders of a job in the form of torch's, which `torchfrtrace` analyses; torch itself is not needed.

torch counts the collectives of each process group; ranks meet in the one with the same number. Here ranks meet in a
round of a name. So a number is given to each round of a name here, the same on all ranks, in the order in which rounds
began. Source of the format: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp and
torch/distributed/flight_recorder/components of torch 2.13.
"""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bps_rdma import files
from bps_rdma.tools.inspection.diagnosis import main_stack
from bps_rdma.tools.inspection.job_state import JobState, Member, Report

PREFIX = "bps_fr_rank_"
_VERSION = "2.10"
# torch's analysis takes the names of its own backends only. Sizes are those of whole tensors on both sides, so the
# names are those whose sides it does not compare.
_NAMES = {
    "push_pull": "gloo:all_reduce",
    "reduce_scatter": "gloo:reduce_scatter_v",
    "all_gather": "gloo:all_gather_v",
    "broadcast": "gloo:broadcast",
}
_BARRIER = "gloo:barrier"
_DTYPES = {
    "float64": ("Double", 8), "float32": ("Float", 4), "float16": ("Half", 2), "bfloat16": ("BFloat16", 2),
    "int64": ("Long", 8), "int32": ("Int", 4), "int8": ("Char", 1), "uint8": ("Byte", 1), "bool": ("Bool", 1),
}  # fmt: skip
_STATES = {"open": "started", "done": "completed", "failed": "failed"}
_BARRIER_GROUP = re.compile(r"the barrier of group (\d+)")

_MOST_RECENT = 64  # operations in a report: kMostRecent in csrc/node/report.cc

# Group, name and round.
_Key = tuple[int, str, int]


def save(state: JobState, folder: Path) -> tuple[list[int], list[int]]:
    """Write one file for each rank that has given a report.

    Returns:
        The ranks with a file, and those without, because they have not replied.
    """
    ranks = {rank: member for rank, member in sorted(state.workers().items()) if member.report is not None}
    begun = {rank: _begun(member) for rank, member in ranks.items()}
    ages: dict[_Key, float] = {}
    for operations in begun.values():
        for key, operation in operations.items():
            ages[key] = max(ages.get(key, 0.0), operation["age_ms"])
    groups = {0: sorted(state.workers())}
    for member in ranks.values():
        groups |= {one["id"]: one["ranks"] for one in (member.report or {}).get("groups", [])}
    # An operation that one rank remembers and another one has forgotten says nothing about either.
    for rank, member in ranks.items():
        for key in [key for key in ages if rank in groups[key[0]] and _may_have_forgotten(member, key, begun)]:
            del ages[key]
    numbers = {key: number for number, key in enumerate(sorted(ages, key=lambda key: -ages[key]))}
    folder.mkdir(parents=True, exist_ok=True)
    for rank, member in ranks.items():
        entries = [
            _entry(numbers[key], key, operation, member) for key, operation in begun[rank].items() if key in numbers
        ]
        dump = {
            "version": _VERSION,
            "pg_config": {
                str(group): {"name": str(group), "desc": _describe(group), "ranks": str(members)}
                for group, members in groups.items()
                if rank in members
            },
            "entries": sorted(entries, key=lambda entry: entry["record_id"]),
        }
        with files.replacing(folder / f"{PREFIX}{rank}") as out:
            pickle.dump(dump, out)
    return list(ranks), sorted(set(state.workers()) - set(ranks))


def _begun(member: Member) -> dict[_Key, Report]:
    """The collective operations that a rank has begun, and barriers that it waits in."""
    report = member.report or {}
    found = {(one["group"], one["name"], one["round"]): one for one in report["recent"] if one["kind"] in _NAMES}
    for call in report["calls"]:
        match = _BARRIER_GROUP.match(call["what"])
        if match:
            barrier = {"kind": "barrier", "bytes": 0, "dtype": "uint8", "state": "open", "duration_us": -1}
            found[int(match[1]), call["what"], 0] = barrier | {"age_ms": call["since_ms"]}
    return found


def _may_have_forgotten(member: Member, key: _Key, begun: Mapping[int, Mapping[_Key, Report]]) -> bool:
    """Whether a rank without this operation may have begun it: long ago, so that its recorder has others by now.

    It has not if it remembers something that others began before. Only ages on one rank are compared: ranks are asked
    in turn, and have clocks of their own.
    """
    own = begun[member.rank]
    if key in own:
        return False
    if any(other[:2] == key[:2] and other[2] > key[2] for other in own):
        return True  # it remembers a later round of the name
    if len((member.report or {})["recent"]) < _MOST_RECENT:
        return False
    for operations in begun.values():
        common = [operations[other]["age_ms"] for other in own if other in operations]
        if key in operations and common and max(common) > operations[key]["age_ms"]:
            return False
    return True


def _describe(group: int) -> str:
    return "all workers" if group == 0 else f"group {group}"


def _entry(number: int, key: _Key, operation: Report, member: Member) -> dict[str, Any]:
    dtype, size = _DTYPES[operation["dtype"]]
    began = time.time_ns() - int(operation["age_ms"] * 1e6)
    took = operation["duration_us"]
    done = operation["state"] == "done"
    frames = [] if operation["state"] != "open" else _frames((member.report or {}).get("stacks", ""))
    sizes = [[operation["bytes"] // size]]
    return {
        "record_id": number,
        "pg_id": key[0],
        "process_group": (str(key[0]), _describe(key[0])),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "is_p2p": False,
        "profiling_name": _NAMES.get(operation["kind"], _BARRIER),
        "name": f"{key[1]}, round {key[2]}",  # ours
        "time_created_ns": began,
        "time_discovered_started_ns": began,
        "time_discovered_completed_ns": began + took * 1000 if done else None,
        "duration_ms": took / 1e3 if done else None,
        "input_sizes": sizes,
        "output_sizes": sizes,
        "input_dtypes": [dtype],
        "output_dtypes": [dtype],
        "state": _STATES[operation["state"]],
        "retired": operation["state"] != "open",
        "timeout_ms": 0,
        "frames": frames,
    }


def _frames(stacks: str) -> list[dict[str, str]]:
    found = [re.match(r'File "(.*)", line (\d+) in (.*)', frame) for frame in main_stack(stacks)]
    return [{"filename": one[1], "line": one[2], "name": one[3]} for one in found if one]
