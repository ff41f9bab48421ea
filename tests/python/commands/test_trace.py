# SPDX-License-Identifier: Apache-2.0
"""Traces of real jobs: their form, what they say of each partition, and what is made of them."""

import copy
import importlib.util
import itertools
import json
import re
import signal
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from bodies.metrics import fetch, samples, value
from harness import await_mark, mark
from reference.trace_format import check

from bps_rdma.tools.trace import cli, clocks, files, merge, summary

PARTITION = 65_536
PARTITIONS = 4
ROUNDS = 5
CUT = {"BPS_PARTITION_BYTES": str(PARTITION), "BPS_MIN_PARTITION_BYTES": str(PARTITION)}


def pushes(bps: Any) -> None:
    array = np.ones(PARTITION * PARTITIONS // 4, np.float32)
    for _ in range(ROUNDS):
        bps.push_pull_inplace(array, name='layer "0".weight')


@pytest.fixture(scope="module", params=["shm", "tcp"])
def folder(request, tmp_path_factory) -> Path:
    """The traces of two workers with one server, on one host."""
    folder = tmp_path_factory.mktemp("trace")
    env = CUT | {"BPS_TRACE": str(folder), "BPS_TRANSPORT": request.param}
    harness.run(pushes, servers=1, env=env)
    return folder


@pytest.fixture(scope="module")
def traces(folder) -> list[files.Trace]:
    server, *workers = files.find(folder)
    return [*workers, server]


def test_layout(folder):
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == ["server-0/comm.json", "worker-0/comm.json", "worker-1/comm.json"]


def test_each_file_has_the_published_form(folder):
    for path in folder.rglob("*.json"):
        trace = check(path.read_text())
        assert trace["otherData"]["dropped"] == 0


def test_every_partition_of_every_round_is_there_once(traces):
    wanted = {(round_, partition) for round_ in range(ROUNDS) for partition in range(PARTITIONS)}
    *workers, server = traces
    for spans in [worker.partitions for worker in workers] + [server.rounds]:
        assert len(spans) == len(wanted)
        assert {(span.args["round"], span.args["partition"]) for span in spans} == wanted
        assert {span.args["bytes"] for span in spans} == {PARTITION}
    for worker in workers:
        assert {span.tensor for span in worker.partitions} == {'layer "0".weight'}
        assert sorted(span.args["round"] for span in worker.operations) == list(range(ROUNDS))


def test_stages_follow_each_other_across_processes(traces):
    *workers, server = traces
    assert len({trace.about["clock"] for trace in traces}) == 1
    on_server = {span.key: span for span in server.rounds}
    for worker in workers:
        for span in worker.partitions:
            sent, landed = span.stages["sent"]
            round_ = on_server[span.key]
            first, last = round_.stages["waits for ranks"]
            assert span.begin <= sent <= last
            assert worker.about["worker_rank"] != round_.args["first_rank"] or sent <= first
            assert first <= last <= round_.stages["sum"][1] <= landed
            assert {round_.args["first_rank"], round_.args["last_rank"]} == {0, 1}


def one_is_late(bps: Any) -> None:
    array = np.ones(PARTITION, np.float32)
    for round_ in range(3):
        if bps.rank() == 1:
            await_mark(f"late-{round_}")
        else:
            mark(f"there-{round_}")
        bps.push_pull_inplace(array, name="x")


def test_the_late_rank_is_named(tmp_path):
    with harness.start(one_is_late, env={"BPS_TRACE": str(tmp_path)}) as job:
        for round_ in range(3):
            job.await_marks(f"there-{round_}", ranks=[0])
            job.eventually(
                lambda round_=round_: misses_rank_1(job, round_), 30, f"the push of rank 0 in round {round_}"
            )
            job.set_mark(f"late-{round_}")
        job.results()
    found = summary.summarize(files.find(tmp_path))
    assert [row["rank"] for row in found["last_ranks"]] == [1]
    assert {wait["for_rank"] for wait in found["longest_waits"]} == {1}
    assert {wait["tensor"] for wait in found["longest_waits"]} == {"x"}


def misses_rank_1(job: harness.Job, round_: int) -> bool:
    """Whether SIGUSR1 has shown rank 0 waiting for rank 1 in that round."""
    job.kill("rank 0", signal.SIGUSR1)
    rounds = [one for dump in job.dumps("rank 0") for one in dump["rounds"]]
    return any(one["round"] == round_ and one["missing"] == [1] for one in rounds)


def test_variables_of_byteps(tmp_path):
    env = {"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_DIR": str(tmp_path / "traces"),
           "BYTEPS_TRACE_START_STEP": "1", "BYTEPS_TRACE_END_STEP": "3"}  # fmt: skip
    with harness.start(pushes, env=CUT | env) as job:
        job.results()
        assert "BYTEPS_TRACE" not in job.log("rank 0")
    for rank in range(2):
        trace = files.read(tmp_path / "traces" / str(rank) / "comm.json")
        assert {span.args["round"] for span in trace.partitions} == {1, 2, 3}


def test_nothing_is_written_without_being_asked_for(tmp_path):
    harness.run(pushes, workers=1, env={"BYTEPS_TRACE_DIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def killed_later(bps: Any) -> None:
    pushes(bps)
    mark("pushed")
    await_mark("never")


def all_is_in(trace: files.Trace) -> bool:
    return (len(trace.operations), len(trace.partitions), len(trace.rounds)) == tuple(
        ROUNDS * count for count in (1, PARTITIONS, PARTITIONS)
    )


def test_the_file_of_a_process_that_is_killed_is_complete(call, tmp_path):
    """So is that of one that still runs, but for the last tenth of a second; `bps trace` makes both."""
    folder = tmp_path / "traces"
    (folder / "worker-0").mkdir(parents=True)
    (folder / "worker-0/comm.json").write_text("of an earlier job")
    path = folder / "worker-0/comm.events"
    with harness.start(killed_later, workers=1, env=CUT | {"BPS_TRACE": str(folder)}) as job:
        job.await_marks("pushed")
        job.eventually(lambda: all_is_in(files.read(path)), 30, "the whole trace")
        job.kill("rank 0")
        job.wait("rank 0")
    assert [found.name for found in path.parent.iterdir()] == ["comm.events"]
    (trace,) = files.find(folder)
    assert trace.path == path
    assert all_is_in(trace)
    assert trace.about["process"] == "worker 0 and server 0"
    out = tmp_path / "whole.json"
    assert call("trace", "merge", str(folder), "--out", str(out))[0] == 0
    assert len(check(out.read_text())["traceEvents"]) == len(trace.events) + 1  # its place
    assert json.loads(call("trace", "summary", "--json", str(folder))[1])["processes"] == ["worker 0 and server 0"]
    # The last frame is cut short: what stands before it is all there is.
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert len(files.read(path).events) < len(trace.events)
    # Of the last event the stage is none that there is.
    path.write_bytes(whole[:-4] + b"\x7f" + whole[-3:])
    status, _, error = call("trace", "summary", str(folder))
    assert status == 2
    assert f"{path} is no trace of bps_rdma" in error


def test_a_folder_that_cannot_be_written_ends_no_job(tmp_path):
    (tmp_path / "file").write_text("")
    with harness.start(pushes, workers=1, env={"BPS_TRACE": str(tmp_path / "file")}) as job:
        job.results()
        assert "nothing is traced: cannot write" in job.log("rank 0")


# ---- What is made of them


def test_the_merged_trace_has_the_published_form_and_names_tensors_of_servers(traces):
    whole = check(json.dumps(merge.merge(traces)))
    names = {event["name"] for event in whole["traceEvents"] if event.get("cat") == "round"}
    assert 'layer "0".weight [0]' in names
    assert not any(name.startswith("tensor ") for name in names)
    assert len({event["pid"] for event in whole["traceEvents"]}) == 3
    assert min(event["ts"] for event in whole["traceEvents"] if "ts" in event) == 0
    assert [clock["error_us"] for clock in whole["otherData"]["clocks"]] == [0, 0, 0]


@pytest.mark.parametrize("shift", [-7e9, 0.0, 123.456, 4e12])
def test_clocks_of_other_hosts_are_brought_together(traces, shift):
    """The server's clock is taken for that of another host, and put wrong: by hours, or not at all."""
    *workers, server = traces
    other = moved(server, shift)
    found = clocks.align([*workers, other])
    assert [one.shift for one in found[:2]] == [0, 0]
    assert 0 < found[2].error < 1e6
    assert abs(found[2].shift + shift) <= found[2].error * 1.001 + 1e-3


def test_a_worker_is_reached_by_way_of_the_server(traces):
    first, second, server = traces
    found = clocks.align([first, moved(second, 1e9, "c"), moved(server, -1e9)])
    assert abs(found[1].shift + 1e9) <= found[1].error
    assert abs(found[2].shift - 1e9) <= found[2].error
    assert found[1].error > found[2].error


def test_a_host_without_messages_in_common_is_not_aligned(traces):
    first, second, _ = traces
    assert clocks.align([first, moved(second, 1e9, "c")])[1].error == float("inf")
    whole = merge.merge([first, moved(second, 1e9, "c")])
    assert whole["otherData"]["clocks"][1]["error_us"] is None


def moved(trace: files.Trace, shift: float, clock: str = "other") -> files.Trace:
    """The same with another clock that is ahead by so much."""
    events = copy.deepcopy(trace.events)
    for event in events:
        if "ts" in event:
            event["ts"] += shift
    path = trace.path.with_name(f"moved-{clock}.json")
    path.write_text(json.dumps({"traceEvents": events, "otherData": trace.about | {"clock": clock}}))
    try:
        return files.read(path)
    finally:
        path.unlink()


def test_summary(traces):
    found = summary.summarize(traces, longest=3)
    stages = {row["stage"]: row for row in found["stages"]}
    assert stages["queued"]["count"] == stages["sent"]["count"] == 2 * PARTITIONS * ROUNDS
    assert stages["sum"]["count"] == stages["waits for ranks"]["count"] == PARTITIONS * ROUNDS
    for row in found["stages"]:
        assert row["median_ms"] <= row["p90_ms"] <= row["p99_ms"] <= row["max_ms"] <= row["total_ms"]
    assert [row["step"] for row in found["steps"]] == list(range(ROUNDS))
    assert all(0 < row["under_way_ms"] <= row["took_ms"] for row in found["steps"])
    waits = [wait["waited_ms"] for wait in found["longest_waits"]]
    assert len(waits) == 3
    assert waits == sorted(waits, reverse=True)
    assert sum(row["rounds"] for row in found["last_ranks"]) == PARTITIONS * ROUNDS


def test_percentiles():
    assert summary.percentile([], 0.5) == 0
    assert summary.percentile([1.0], 0.99) == 1
    assert summary.percentile([float(i) for i in range(100)], 0.9) == 90


def test_an_optimizer_that_tells_no_time_has_no_column():
    told = [{"step": 0, "wait_ms": 1.0, "optimizer_ms": 0.0}, {"step": 1, "wait_ms": 1.0, "optimizer_ms": 0.5}]
    assert cli._told(told) == told
    assert cli._told(told[:1]) == [{"step": 0, "wait_ms": 1.0}]


def test_commands(call, folder, tmp_path):
    out = tmp_path / "whole.json"
    status, shown, error = call("trace", "merge", str(folder), "--out", str(out))
    assert status == 0, error
    assert "worker 1" in shown
    check(out.read_text())
    shown = call("trace", "summary", str(folder))[1]
    assert "waits for ranks" in shown
    assert "layer" in shown
    assert re.search(r"\nthe others waited longest for rank [01]: the last in \d+ of \d+ rounds\n", shown)
    assert json.loads(call("trace", "summary", "--json", str(folder))[1])["dropped"] == 0
    if importlib.util.find_spec("matplotlib") is not None:
        plot = tmp_path / "trace.png"
        assert call("trace", "summary", "--plot", str(plot), str(folder))[0] == 0
        assert plot.stat().st_size > 10_000
    assert call("trace", "summary", "--plot", "trace.txt", str(folder))[0] == 2


@pytest.mark.parametrize("content", ["", '{"traceEvents": [{}], "otherData": {}}'])
def test_what_is_no_trace_is_said_so(call, tmp_path, content):
    (tmp_path / "worker-0").mkdir()
    (tmp_path / "worker-0/comm.json").write_text(content)
    status, _, error = call("trace", "summary", str(tmp_path))
    assert status == 2
    assert "is no trace of bps_rdma" in error
    assert call("trace", "summary", str(tmp_path / "worker-0"))[0] == 2
    (tmp_path / "worker-0/comm.json").rename(tmp_path / "worker-0/comm.events")
    status, _, error = call("trace", "summary", str(tmp_path))
    assert status == 2
    assert f"{tmp_path / 'worker-0/comm.events'} is no trace of bps_rdma" in error


# ---- Jobs of several levels and views


def test_the_sum_of_a_host_is_told_from_that_on_the_network(tmp_path):
    """Two ranks on one host, one on another."""
    harness.run(pushes, env=CUT | {"BPS_TRACE": str(tmp_path)}, **harness.on_hosts("aab"))
    found = files.find(tmp_path)
    for trace in found:
        check(trace.path.read_text())
    count = PARTITIONS * ROUNDS
    on_network = [span for trace in found for span in trace.rounds if not span.args["for_host"]]
    on_host = [span for trace in found for span in trace.rounds if span.args["for_host"]]
    assert len(on_network) == count
    assert len(on_host) == count
    assert {span.key for span in on_host} == {span.key for span in on_network}
    by_rank = {trace.about["worker_rank"]: trace.partitions for trace in found}
    # Each rank of the first host pushes to a relay, and one of them for both; the other host's sends all to servers.
    assert sum(span.args["for_host"] for rank in (0, 1) for span in by_rank[rank]) == 2 * count
    assert sum(not span.args["for_host"] for rank in (0, 1) for span in by_rank[rank]) == count
    assert [span.args["for_host"] for span in by_rank[2]] == [False] * count


def goes_on_alone(bps: Any) -> int:
    array = np.ones(PARTITION, np.float32)
    for step in itertools.count():
        try:
            bps.push_pull_inplace(array, name="x")
        except bps.RoundAbortedError:
            break
        if step == 3:
            mark("running")
    assert bps.size() == 1
    bps.push_pull_inplace(array, name="x")
    mark("alone")
    await_mark("looked")
    return int(bps.size())


def test_each_view_has_a_file_and_serves_metrics(tmp_path):
    first = harness.free_ports(2)
    env = {"BPS_MIN_WORKERS": "1", "BPS_TRACE": str(tmp_path), "BPS_METRICS_PORT": str(first)}
    with harness.start(goes_on_alone, env=env) as job:
        job.await_marks("running")
        job.kill("rank 1")
        job.await_marks("alone", ranks=[0])
        served = samples(fetch(first)[2])
        job.set_mark("looked")
        assert job.outcomes(but=[1])[0].value == 1
    assert value(served, "bps_epoch") == 2
    assert value(served, "bps_operations_total", result="complete") >= 1
    for name in ("comm.json", "comm-2.json"):
        check((tmp_path / "worker-0" / name).read_text())
        assert files.read(tmp_path / "worker-0" / name).partitions
