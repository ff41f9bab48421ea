# SPDX-License-Identifier: Apache-2.0
"""`bps tune`: the model, and the command on real ranks. What is fastest here is not tested: that is for benchmarks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import harness
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bps_rdma.tools.tune.measure import Pair, best_pair
from bps_rdma.tools.tune.model import Costs, fit, neighbours, step_seconds

SIZES = [1 << power for power in range(10, 25)]
COMMAND = [sys.executable, "-P", "-m", "bps_rdma"]


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e11))
def test_the_fit_finds_what_describes_the_times(overhead: float, rate: float) -> None:
    found = fit(SIZES, [overhead + size / rate for size in SIZES])
    for size in SIZES:
        assert found.seconds(size) == pytest.approx(overhead + size / rate, rel=0.11)
    assert found.error < 0.11


def test_one_disturbed_time_does_not_bend_the_line() -> None:
    times = [20e-6 + size / 2e9 for size in SIZES]
    times[3] *= 40
    times[7] /= 40
    found = fit(SIZES, times)
    assert found.overhead_s == pytest.approx(20e-6, rel=0.1)
    assert found.bytes_per_s == pytest.approx(2e9, rel=0.05)


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e11), st.integers(1 << 14, 1 << 30))
def test_no_number_of_buckets_is_better_than_the_best(overhead: float, rate: float, nbytes: int) -> None:
    costs = Costs(overhead, rate, 0.0)
    best = costs.visible(nbytes, costs.best_bucket(nbytes))
    for count in range(1, 200):
        # Whole buckets: the real optimum lies between two of them.
        assert best <= 1.1 * costs.visible(nbytes, nbytes // count)


@given(st.floats(0, 1), st.integers(1, 50), st.floats(1e-6, 1))
def test_the_step_is_that_of_buckets_sent_one_after_the_other(backward: float, buckets: int, each: float) -> None:
    sent = 0.0
    for index in range(buckets):
        sent = max(sent, backward * (index + 1) / buckets) + each
    assert step_seconds(backward, buckets, each) == pytest.approx(sent)


@given(st.integers(1, 1 << 30), st.integers(1 << 14, 1 << 30))
def test_sizes_to_try_are_around_the_one_that_is_asked_for(bucket: int, nbytes: int) -> None:
    found = neighbours(min(bucket, nbytes), nbytes, (1 << 20,))
    assert found == sorted(set(found))
    assert all(4096 <= size <= nbytes for size in found)
    assert any(size / 1.5 <= max(min(bucket, nbytes), 4096) <= 1.5 * size for size in found)


def test_the_default_is_not_given_up_for_noise() -> None:
    pairs = [Pair(None, 1 << 20, 1.01, 1, 2), Pair(None, 1 << 22, 1.5, 1, 2), Pair(1 << 16, 1 << 22, 1.0, 1, 2)]
    assert best_pair(pairs) == (None, 1 << 20)
    assert best_pair([*pairs, Pair(1 << 18, 1 << 22, 0.9, 0.8, 1)]) == (1 << 18, 1 << 22)


def tune(*words: str, prefix: tuple[str, ...] = (), env: dict[str, str] | None = None) -> Any:
    program = [*COMMAND, *prefix, *(COMMAND if prefix else ()), "tune", "--gradients", "128K", "--seconds", "1", *words]
    done = harness.run_command(program, env={**harness.clean_env(), **(env or {})}, within=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if "--json" in words else done.stdout


def test_it_starts_ranks_and_names_settings(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "tune.png"
    text = tune("-np", "3", "--hosts", "16", "--ranks", "8", "--gbit", "200", "--plot", str(plot))
    assert "3 ranks" in text
    assert "bucket_mb=" in text
    assert "# a step: " in text
    assert "16 hosts with 8 ranks and 200 Gbit/s" in text
    assert "\x1b" not in text
    assert plot.stat().st_size > 10_000


@pytest.mark.long
def test_machines_get_all_figures() -> None:
    found = tune("--json", "--transport", "tcp", "--backward-ms", "5", "--hosts", "2")
    assert found["workers"] == 2
    assert "tcp" in found["routes"]
    assert found["backward_s"] == 0.005
    assert {trial["nbytes"] for trial in found["partitions"]} == {None, 1 << 16, 1 << 17}
    assert (found["partition"], found["bucket"]) in {(pair["partition"], pair["bucket"]) for pair in found["pairs"]}
    assert found["bucket_mb"] == found["bucket"] / (1 << 20)
    assert found["predicted"]["seconds"] > 0
    assert found["predicted"]["step_seconds"] > 0.005
    assert found["step"]["predicted_s"] > 0.005
    assert found["step"]["measured_s"] > 0
    for trial in found["partitions"] + found["buckets"] + found["pairs"]:
        assert trial["lower"] <= trial["seconds"] <= trial["upper"]
    wanted = {} if found["partition"] is None else {"BYTEPS_PARTITION_BYTES": str(found["partition"])}
    assert found["settings"] == wanted


@pytest.mark.parametrize("servers", [(), pytest.param(("--servers", "1"), marks=pytest.mark.long)])
def test_inside_a_job_it_measures_that_job(servers: tuple[str, ...]) -> None:
    """With servers of its own the job cannot begin anew, and only buckets are tried."""
    found = tune("--json", prefix=("run", "-np", "2", *servers))
    assert found["workers"] == 2
    assert bool(found["partitions"]) == (not servers)
    assert found["buckets"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--gradients", "1K"), "too small"),
        (("--gradients", "many"), "many"),
        (("--plot", "tune.txt"), "no known format"),
        (("--seconds", "0"), "seconds"),
    ],
)
def test_bad_input(words: tuple[str, ...], text: str) -> None:
    done = harness.run_command([*COMMAND, "tune", *words])
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert os.environ.get("RANK") is None
