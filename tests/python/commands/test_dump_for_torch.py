# SPDX-License-Identifier: Apache-2.0
"""What `bps dump --torch` makes of the reports of ranks that were asked one after the other."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from bps_rdma.tools.inspection import torch_dump
from bps_rdma.tools.inspection.job_state import JobState, Member

KEPT = 64


def member(rank: int, rounds: range, asked_ms: float) -> Member:
    """One that began round r of 'gradient' at r ms, and was asked at `asked_ms`."""
    recent: list[dict[str, Any]] = [
        {"group": 0, "name": "gradient", "round": number, "kind": "push_pull", "bytes": 24, "dtype": "float32",
         "state": "done", "duration_us": 100, "age_ms": asked_ms - number} for number in rounds
    ]  # fmt: skip
    return Member(rank, rank, rank, "host", 100 + rank, report={"recent": recent, "calls": [], "groups": []})


def rounds_in(folder: Path, rank: int) -> list[str]:
    return [entry["name"] for entry in pickle.loads((folder / f"bps_fr_rank_{rank}").read_bytes())["entries"]]


def test_what_a_rank_has_forgotten_is_not_missing_although_it_was_asked_later(tmp_path: Path) -> None:
    first, second = member(0, range(KEPT), 200), member(1, range(3, KEPT + 3), 250)
    assert torch_dump.save(JobState(members={0: first, 1: second}), tmp_path) == ([0, 1], [])
    assert rounds_in(tmp_path, 0) == [f"gradient, round {number}" for number in range(3, KEPT)]


@pytest.mark.parametrize("asked_ms", [(200, 250), (1_000, 100)])
def test_what_a_rank_has_not_begun_is_missing(asked_ms: tuple[int, int], tmp_path: Path) -> None:
    first, second = member(0, range(1, KEPT + 1), asked_ms[0]), member(1, range(KEPT), asked_ms[1])
    torch_dump.save(JobState(members={0: first, 1: second}), tmp_path)
    assert rounds_in(tmp_path, 0)[-1] == f"gradient, round {KEPT}"
    assert rounds_in(tmp_path, 1)[-1] == f"gradient, round {KEPT - 1}"
