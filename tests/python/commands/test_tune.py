# SPDX-License-Identifier: Apache-2.0
"""`bps tune`: the model, and the command on real ranks. What is fastest here is not tested: that is for benchmarks."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import harness
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.tools.tune.hosts import Cluster, cluster_of, enough, predict, speeds_of
from bps_rdma.tools.tune.measure import Found, Pair, best_pair
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


def found(nbytes: int = 1 << 30, links: tuple[float, ...] = ()) -> Found:
    costs = Costs(50e-6, 5e9, 0.0)
    return Found(2, ["shm"], nbytes, costs, [], bucket=nbytes // 8, backward_s=0.1, links=list(links))


def test_each_spare_host_brings_its_part() -> None:
    """Links of 25 Gbit/s are so slow that sums and latency count for nothing."""
    predicted = predict(found(), cluster_of(found(), 4, 1, "25", None))
    assert [one.spares for one in predicted.counts] == [0, 1, 2, 3, 4]
    assert predicted.enough == 4
    best = [predicted.of_line_rate(one.best_seconds) for one in predicted.counts]
    assert best == pytest.approx([2 / 3, 3 / 4, 5 / 6, 11 / 12, 1])
    reached = [predicted.of_line_rate(one.seconds) for one in predicted.counts]
    assert all(0.94 * most < one <= most for one, most in zip(reached, best, strict=True))
    assert reached == sorted(reached)
    assert [one.share for one in predicted.counts] == pytest.approx([0, 1 / 3, 3 / 5, 9 / 11, 1])
    steps = [one.step_seconds for one in predicted.counts]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] > 0.1


def test_many_hosts_are_shown_by_some_counts() -> None:
    counts = predict(found(64 << 20), cluster_of(found(), 100, 8, "100", None)).counts
    assert (counts[0].spares, counts[-1].spares) == (0, 100)
    assert 10 < len(counts) < 20


@pytest.mark.parametrize(
    ("links", "spare", "expected"),
    [
        ((1,), 1, 0),  # no network
        ((1, 1), 1, 0),  # a ring moves as little
        ((1,) * 3, 1, 3),
        ((1,) * 8, 1, 8),
        ((1,) * 8, 2, 4),
        ((1,) * 4, 0.25, 16),
        ((1, 1, 1, 0.75), 1, 2),  # the others sum half of it while the slow one sends its own
        ((1, 1, 1, 1, 0.25), 1, 0),  # the others do what the slow one cannot
    ],
)
def test_one_more_spare_host_brings_nothing(links: tuple[float, ...], spare: float, expected: int) -> None:
    assert enough(Cluster(links, 1, spare)) == expected


def test_links_are_given_or_measured() -> None:
    measured = found(links=(10, 25, 25))
    assert cluster_of(measured, 3, 1, None, None) == Cluster((10, 25, 25), 1, 10)
    assert cluster_of(measured, 5, 2, None, 40) == Cluster((10,) * 5, 2, 40)
    assert cluster_of(measured, 3, 1, "100", None) == Cluster((100,) * 3, 1, 100)
    assert cluster_of(measured, 3, 1, "100,50,100", None) == Cluster((100, 50, 100), 1, 50)
    assert cluster_of(found(), 3, 1, None, None) == Cluster((100,) * 3, 1, 100)
    for bad in ("", "fast", "1,2", "0", "-1", "1,nan,1", "inf"):
        with pytest.raises(InvalidArgumentError, match="speeds of 3 links"):
            speeds_of(bad, 3)


def links_of_hosts(_: Any) -> list[float]:
    from bps_rdma.tools.tune.measure import links_of_job

    return links_of_job()


def test_a_job_knows_the_links_of_its_hosts() -> None:
    def on(layout: str, gbit: list[str]) -> list[list[float]]:
        options = harness.on_hosts(layout)
        for rank, (own, speed) in enumerate(zip(options["rank_env"], gbit, strict=True)):
            own |= {"LOCAL_RANK": str(layout[:rank].count(layout[rank])), "BPS_LINK_GBPS": speed}
        return harness.run(links_of_hosts, **options)

    assert on("aab", ["10", "10", "25"]) == [[10, 25]] * 3
    assert on("aa", ["10", "10"]) == [[]] * 2


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
    assert "with spare hosts of 200 Gbit/s" in text
    assert "# more than 16 spare hosts bring nothing" in text
    assert "\x1b" not in text
    assert plot.stat().st_size > 10_000


@pytest.mark.long
def test_machines_get_all_figures() -> None:
    found = tune("--json", "--transport", "tcp", "--backward-ms", "5", "--hosts", "3", "--gbit", "10,10,5")
    assert found["workers"] == 2
    assert "tcp" in found["routes"]
    assert found["backward_s"] == 0.005
    assert {trial["nbytes"] for trial in found["partitions"]} == {None, 1 << 16, 1 << 17}
    assert (found["partition"], found["bucket"]) in {(pair["partition"], pair["bucket"]) for pair in found["pairs"]}
    assert found["bucket_mb"] == found["bucket"] / (1 << 20)
    assert found["predicted"]["seconds"] > 0
    assert found["predicted"]["step_seconds"] > 0.005
    assert found["predicted"]["gbit"] == [10, 10, 5]
    assert found["predicted"]["spare_gbit"] == 5
    assert [one["spares"] for one in found["predicted"]["spare_hosts"]] == [0, 1, 2, 3]
    assert found["predicted"]["spare_hosts"][0]["seconds"] == found["predicted"]["seconds"]
    assert found["step"]["predicted_s"] > 0.005
    assert found["step"]["measured_s"] > 0
    for trial in found["partitions"] + found["buckets"] + found["pairs"]:
        assert trial["lower"] <= trial["seconds"] <= trial["upper"]
    wanted = {} if found["partition"] is None else {"BPS_PARTITION_BYTES": str(found["partition"])}
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
        (("--hosts", "3", "--gbit", "10,10"), "speeds of 3 links"),
    ],
)
def test_bad_input(words: tuple[str, ...], text: str) -> None:
    done = harness.run_command([*COMMAND, "tune", *words])
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert os.environ.get("RANK") is None
