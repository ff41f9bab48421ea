# SPDX-License-Identifier: Apache-2.0
"""pushpull_bench: what it measures is checked, what it says has the promised form, and bad input is told at once."""

import importlib.util
import io
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import harness
import pytest

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.tools import bench as pushpull
from bps_rdma.tools import outputs, ranks
from bps_rdma.tools.bench import allreduce, memory, teams, worker
from bps_rdma.tools.bench.baselines import PushPull
from bps_rdma.tools.bench.cli import progress_of
from bps_rdma.tools.bench.peers import environments
from bps_rdma.tools.bench.plan import MPI_BASELINES, Case, Plan, make_cases
from bps_rdma.tools.outputs import check_outputs

ENV = {name: value for name, value in os.environ.items() if not name.startswith(("BPS_R", "BPS_T", "DMLC_"))}
BENCH = [sys.executable, "-c", "from bps_rdma.tools.bench import main; main()"]


def bench(*options, timeout=60):
    return harness.run_command([*BENCH, *options], env=ENV, within=timeout)


def measured(*options):
    done = bench("--json", "-", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_timing(timing, rounds):
    assert len(timing["times_ms"]) == rounds
    assert 0 < timing["min_ms"] <= timing["median_ms"] <= timing["p99_ms"]
    assert timing["per_rank_gbps"] > 0
    assert timing["cpu_seconds_per_gb"] > 0
    assert timing["switches_per_call"] >= 0


@pytest.mark.long_over("tcp")  # two ranks of one host share memory; the other benchmarks and tests go over TCP
def test_every_operation_is_measured_and_checked(transport):
    options = ["--ops", "push_pull,reduce_scatter,all_gather,broadcast", "--dtypes", "float32,int8"]
    found = measured("--sizes", "64,100K", "--iters", "5", "--warmup", "1", "--transport", transport, *options)
    assert found["job"]["transport"] == transport
    assert len(found["results"]) == 4 * 2 * 2
    for result in found["results"]:
        check_timing(result, 5)
        assert result["checked"] == 2 * (5 + 1) * result["calls_per_round"]  # by both ranks, warm-up included
    assert found["checked"] == sum(result["checked"] for result in found["results"])


def test_tensors_in_one_go_and_servers_of_their_own():
    found = measured("--sizes", "4K", "--group", "50", "--iters", "5", "--servers", "1", "--memory", "shared")
    assert found["job"]["servers"] == 1
    (result,) = found["results"]
    assert (result["tensors"], result["calls_per_round"]) == (50, 20)
    assert result["checked"] == 2 * 50 * 20 * (5 + 3)


@pytest.mark.long
def test_gloo_beside_us_on_a_busy_machine():
    pytest.importorskip("torch")
    found = measured("--sizes", "64K", "--compare", "gloo", "--iters", "5", "--load", "1")
    assert found["job"]["load"] == 1
    (result,) = found["results"]
    assert set(result["compare"]) == {"gloo", "bound"}
    check_timing(result["compare"]["gloo"], 5)
    speedup = result["compare"]["gloo"]["speedup"]
    assert speedup["lower"] <= speedup["median"] <= speedup["upper"]


@pytest.mark.long
@pytest.mark.parametrize("peer", MPI_BASELINES)
def test_an_mpi_library_beside_us(peer):
    if not (environments.folder(peer) / "bin" / "mpiexec").exists():
        pytest.skip(f"python -m bps_rdma.tools.bench.peers {peer} has not been run")
    found = measured(
        "--sizes", "64,64K", "--compare", peer, "--iters", "6", "--no-bound", "--dtypes", "float32,float16"
    )
    for result in found["results"]:
        assert set(result["compare"]) == ({peer} if result["dtype"] == "float32" else set())
        for timing in result["compare"].values():
            check_timing(timing, 6)


def test_a_peer_that_is_not_installed_is_told_before_anything_starts(tmp_path):
    done = harness.run_command([*BENCH, "--compare", "openmpi"], env=ENV | {"XDG_CACHE_HOME": str(tmp_path)}, within=30)
    assert done.returncode != 0
    assert "-m bps_rdma.tools.bench.peers openmpi" in done.stderr


BAD = {
    pushpull: ["--sizes many", "--dtypes complex", "--ops sum", "--compare nobody", "--memory none",
               "--json /nowhere/at/all.json", "--calls 0"],
    allreduce: ["--ranks two", "--ranks 0", "--ranks ", "--backends gloo", "--backends nobody", "--sizes many",
                "--dtype complex", "--memory none", "--json /nowhere/at/all.json"],
}  # fmt: skip


@pytest.mark.parametrize(("command", "words"), [(command, words) for command in BAD for words in BAD[command]])
def test_bad_options_are_errors_in_words(call, command, words):
    status, _, error = call(*words.split(" "), main=command.main)
    assert status == 2
    assert error.startswith("error: ")
    assert "\nhint: " in error


def test_errors_of_ranks_keep_their_kind_and_a_lack_of_memory_is_one():
    def join() -> list[Any]:
        raise MemoryError("Unable to allocate 1000. GiB")

    answers = io.StringIO()
    assert worker.serve(Plan(cases=[]), join, io.StringIO(), answers) == 1
    error = ranks._as_error(3, json.loads(answers.getvalue()))
    assert error.message == "rank 3: out of memory: Unable to allocate 1000. GiB"
    setting = ranks._as_error(0, {"error": "no number", "hint": "", "kind": "InvalidArgumentError"})
    assert isinstance(setting, InvalidArgumentError)  # which ends the command with 2


@pytest.mark.parametrize(
    ("plot", "says"), [("x/y.png", "does not exist"), ("a.xyz", "no known format"), ("folder.png", "is a folder")]
)
def test_files_that_cannot_be_written_are_told_before_anything_is_measured(plot, says, tmp_path):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InvalidArgumentError, match=says) as caught:
        check_outputs(None, tmp_path / plot)
    assert caught.value.hint


def test_the_shared_memory_of_open_mpi_goes_with_its_folder(monkeypatch, tmp_path):
    started = {}
    with teams.folder_for_shared_memory(True) as folder:
        (folder / "sm_segment").touch()
        monkeypatch.setattr(environments, "require", lambda _: tmp_path)
        monkeypatch.setattr(teams, "_accept", lambda *_: None)
        children = SimpleNamespace(spawn=lambda _name, _command, env: started.update(env))
        teams.start_mpi(children, Plan(()), "openmpi", 2, folder)
    assert started["OMPI_MCA_btl_sm_backing_directory"] == str(folder)
    assert not folder.exists()


def test_progress_without_a_terminal_is_what_is_measured_and_a_line_now_and_then(capsys, monkeypatch):
    plan = Plan(make_cases("4K,1M", "float32", "push_pull", 1), compare=("gloo",), seconds=3)
    now = iter([0.0, 5.0, 12.0, 15.0])
    monkeypatch.setattr(outputs.time, "monotonic", lambda: next(now))
    with progress_of(plan) as listener:
        for rounds in (1, 2, 3):
            listener(plan.cases[1], rounds, 0.5)
    assert capsys.readouterr().err.splitlines() == [
        "measuring 2 cases of bps_rdma, gloo: about 3 s, and longer where 5 rounds of each case take longer",
        "50% after 12 s: push_pull float32 1 MiB, 2 rounds",
    ]


def test_how_many_calls_make_a_round():
    assert [case.calls for case in make_cases("8,64K,1M,4M,8M", "float32", "push_pull", 1)] == [64, 64, 4, 1, 1]
    assert [case.calls for case in make_cases("4K", "float32", "push_pull", 1000)] == [1]
    case = Case("push_pull", "float32", 4096, 10, 3)
    assert (case.arrays, case.total_bytes, case.round_bytes) == (30, 40960, 122880)


def spoils_a_result(bps):
    implementation = PushPull()
    implementation.start(Case("push_pull", "float32", 4096, 1, 2), "plain")
    implementation.prepare(0)
    implementation.run()
    implementation.check(0)
    implementation._arrays[1][77] += 1
    try:
        implementation.check(0)
    except bps.BpsError as error:
        return str(error)
    return "not noticed"


def test_a_wrong_result_ends_the_run():
    """What the whole bench rests on: were a sum wrong, it would say so."""

    for said in harness.run(spoils_a_result, workers=2):
        assert "1 of 1024 float32 elements are wrong, the first at 77" in said


# ---- allreduce_bench

SWEEP = [sys.executable, "-c", "from bps_rdma.tools.bench.allreduce import main; main()"]


def sweep(*options, env=ENV):
    return harness.run_command([*SWEEP, *options], env=env, within=90)


@pytest.mark.parametrize(("ranks", "backends"), [([1, 3], ["bps"]), ([2], ["bps", "gloo"])])
def test_a_sweep_over_numbers_of_ranks(tmp_path, ranks, backends):
    pytest.importorskip("torch")
    picture = tmp_path / "sweep.svg"
    plot = ["--plot", str(picture)] if importlib.util.find_spec("matplotlib") else []
    what = ["--ranks", ",".join(map(str, ranks)), "--backends", ",".join(backends)]
    done = sweep("--sizes", "64K,1M", *what, "--iters", "5", "--json", "-", *plot)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["skipped"] == []
    assert [run["job"]["workers"] for run in found["runs"]] == ranks
    for run in found["runs"]:
        workers = run["job"]["workers"]
        assert [result["size_bytes"] for result in run["results"]] == [65536, 1 << 20]
        for result in run["results"]:
            check_timing(result, 5)
            assert set(result["compare"]) - {"bound"} == set(backends) - {"bps"}
            for timing in result["compare"].values():
                check_timing(timing, 5)
            assert result["checked"] == workers * (5 + 1) * result["calls_per_round"]
            assert result["bus_gbps"] == pytest.approx(result["per_rank_gbps"] * 2 * (workers - 1) / workers)
    if plot:
        assert "<svg" in picture.read_text()


def test_a_sweep_says_what_does_not_fit(tmp_path):
    kept = tmp_path / "found.json"
    options = ["--sizes", "64K,512M", "--ranks", "2", "--backends", "bps", "--iters", "5", "--memory-limit", "1"]
    done = sweep(*options, "--json", str(kept))
    assert done.returncode == 0, done.stderr
    assert "skipped: 512 MiB with 2 ranks" in done.stdout
    assert "bus bandwidth" in done.stdout
    assert "2 ranks" in done.stdout
    found = json.loads(kept.read_text())
    assert [(skip["ranks"], skip["nbytes"]) for skip in found["skipped"]] == [(2, 512 << 20)]
    assert [result["size_bytes"] for result in found["runs"][0]["results"]] == [65536]


def test_a_sweep_in_which_nothing_fits_is_told_and_is_no_error():
    done = sweep("--sizes", "1G", "--backends", "bps", "--memory-limit", "0.5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("skipped: 1 GiB") == 3
    assert "0 results checked" in done.stdout


def test_a_sweep_inside_a_job_is_refused():
    done = sweep("--quick", env=ENV | {"RANK": "0", "WORLD_SIZE": "1"})
    assert done.returncode == 2
    assert "outside of any job" in done.stderr


@pytest.mark.parametrize(
    ("options", "rounds"),
    [
        pytest.param(["--iters", "7"], 7, marks=pytest.mark.long),  # outside of a job, above
        (["--seconds", "0.1"], 5),  # the least: to warm 64 MiB up takes longer than this
        (["--seconds", "600", "--sizes", "64", "--calls", "1", "--warmup", "0"], 500),  # the most
        (["--size-mb", "0.01"], 20),  # as BytePS's
    ],
    ids=["iterations", "no time", "much time", "byteps"],
)
def test_inside_a_job_it_takes_the_time_that_it_is_given(options, rounds):
    run = [harness.binary("bps"), "run", "-np", "2", *BENCH]
    done = harness.run_command([*run, "--json", "-", "--sizes", "64M", *options], env=ENV, within=120)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout.splitlines()[-1])["results"]
    assert len(found["times_ms"]) == rounds


def test_how_much_memory_a_sweep_counts_with():
    assert memory.needed(1 << 30, 256 << 20, 6, 2) > 6 * 2 * (1 << 30)
    assert memory.needed(1 << 20, 0, 4, 1) > memory.needed(1 << 20, 0, 2, 1)
    assert 0 < memory.available() < 1 << 50
