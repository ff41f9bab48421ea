# SPDX-License-Identifier: Apache-2.0
"""What traces say of arrays of a GPU, which the core copies: on a fake driver."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import gpu_arrays
import harness
from bodies.metrics import fetch, samples, value
from harness import await_mark, mark
from reference.trace_format import check

from bps_rdma.tools.trace import files, merge, steps, summary

PIECE = 16_384
PIECES = 4
ROUNDS = 3
# Stages that each partition has, and all that there are.
ALWAYS = ("queued", "waits for GPU", "copy from GPU", "copied", "sent", "copy to GPU")
STAGES = ("queued", "waits for GPU", "copy from GPU", "copied", "credit wait", "sent", "copy to GPU")


def on_gpu(folder: Path, **more: str) -> dict[str, str]:
    return harness.over("tcp") | gpu_arrays.env() | harness.cut_at(PIECE) | {"BPS_TRACE": str(folder)} | more


def sums(bps: Any) -> None:
    array = gpu_arrays.GpuArray(PIECE * PIECES // 4)
    for _ in range(ROUNDS):
        bps.push_pull_inplace(array, name="w")


def workers_of(folder: Path) -> list[files.Trace]:
    return [trace for trace in files.find(folder) if trace.about["worker_rank"] >= 0]


def test_each_partition_shows_its_copies(tmp_path: Path) -> None:
    harness.run(sums, workers=2, servers=1, env=on_gpu(tmp_path))
    for trace in workers_of(tmp_path):
        assert len(trace.partitions) == ROUNDS * PIECES
        for span in trace.partitions:
            assert [name for name in STAGES if name in span.stages] == list(span.stages)
            assert set(ALWAYS) <= set(span.stages)
            assert span.begin == span.stages["queued"][0]
            for one, other in itertools.pairwise(span.stages.values()):
                assert one[0] <= one[1] == other[0]
            assert span.stages["copy to GPU"][1] == span.end
    found = summary.summarize(files.find(tmp_path))
    counts = {row["stage"]: row["count"] for row in found["stages"]}
    assert counts["copy from GPU"] == counts["copy to GPU"] == 2 * ROUNDS * PIECES
    check(json.dumps(merge.merge(files.find(tmp_path))))


def test_rounds_that_are_not_traced_are_not_noted(tmp_path: Path) -> None:
    env = on_gpu(tmp_path, BPS_TRACE_START_STEP="1", BPS_TRACE_END_STEP="1")
    harness.run(sums, workers=2, servers=1, env=env)
    for trace in workers_of(tmp_path):
        assert {span.args["round"] for span in trace.partitions} == {1}
        assert all("waits for GPU" in span.stages for span in trace.partitions)


def behind_a_kernel(bps: Any) -> tuple[float, float]:
    """Returns two times between which a kernel went on, in microseconds."""
    array = gpu_arrays.GpuArray(PIECE * PIECES // 4, stream=gpu_arrays.fake().fake_stream())
    kernel = gpu_arrays.Kernel(array, 0)
    handle = bps.push_pull_async_inplace(array, name="w")
    harness.eventually(lambda: waits_for_gpu(bps), 30, "the wait for the kernel")
    begin = time.monotonic_ns()
    mark("there")
    await_mark("go on")
    end = time.monotonic_ns()
    kernel.let_go()
    bps.synchronize(handle)
    return begin / 1e3, end / 1e3


def waits_for_gpu(bps: Any) -> bool:
    return any(one["waits_for"] == "gpu" for one in bps.dump()["operations"])


def test_the_wait_for_kernels_is_no_copy_and_no_communication(tmp_path: Path) -> None:
    with harness.start(behind_a_kernel, workers=2, servers=1, env=on_gpu(tmp_path)) as job:
        job.await_marks("there")
        job.set_mark("go on")
        times = job.results()
    for trace in workers_of(tmp_path):
        begin, end = times[trace.about["worker_rank"]]
        for span in trace.partitions:
            waits = span.stages["waits for GPU"]
            assert waits[0] <= begin
            assert end <= waits[1]
            assert span.under_way[0] >= end, "what waits behind it is no communication either"
        assert (
            steps.covered(span.under_way for span in trace.partitions)
            < max(span.end for span in trace.partitions) - end + 1e-3
        )


def serves(bps: Any) -> int:
    sums(bps)
    mark("summed")
    await_mark("end")
    return int(bps.metrics()["total"]["device_copies_from"])


def test_copies_and_bytes_are_served_by_direction() -> None:
    port = harness.free_port()
    env = gpu_arrays.env() | harness.cut_at(PIECE) | {"BPS_METRICS_PORT": str(port)}
    with harness.start(serves, workers=1, env=env) as job:
        job.await_marks("summed")
        found = samples(fetch(port)[2])
        for direction in ("from", "to"):
            assert value(found, "bps_device_copies_total", direction=direction) == ROUNDS * PIECES
            assert value(found, "bps_device_bytes_total", direction=direction) == ROUNDS * PIECES * PIECE
        job.set_mark("end")
        assert job.results() == [ROUNDS * PIECES]
