# SPDX-License-Identifier: Apache-2.0
"""`bps top`: what it says of each member, and its live view in a terminal."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from typing import Any

import gpu_arrays
import harness
import numpy as np
from harness import await_mark, mark

COMMAND = [sys.executable, "-P", "-m", "bps_rdma", "top"]
ROUNDS = 70  # more than the servers keep
COUNT = 1 << 18
NAMES = ("rank 0", "rank 1", "server 0")


def one_is_always_late(bps: Any) -> float:
    """Rank 1 pushes when the other has pushed; then it does not come at all, and in the end they go on."""
    array = np.ones(COUNT, np.float32)
    for number in range(ROUNDS):
        if bps.rank() == 1:
            await_mark(f"pushed {number}", 0)
        bps.push(array, name="x")  # returns when the server has it
        mark(f"pushed {number}")
        bps.pull(array, name="x")
    mark("ready")
    if bps.rank() == 1:
        await_mark("go on")
    return float(bps.push_pull(array, name="x", average=False)[0])


def goes_on(bps: Any) -> int:
    """A step of a few megabytes, again and again."""
    array = np.ones(COUNT, np.float32)
    mark("ready")
    for step in range(1_000_000):
        bps.push_pull_inplace(array, name="x")
        if float(bps.push_pull(np.array([float(harness.is_marked("end"))]), name="told")[0]) > 0:
            return step
    return -1


def top(job: harness.Job) -> dict[str, Any]:
    done = harness.run_command([*COMMAND, "--json", "--job", job.name])
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    return {"why": seen["why"]} | {row["name"]: row for row in seen["members"]}


def until_it_waits(job: harness.Job) -> dict[str, Any]:
    return job.eventually(lambda: top(job), 30, "an open round", until=lambda seen: seen["server 0"]["oldest_round_ms"])


def test_the_late_rank_is_marked_and_the_open_round_says_whom_it_waits_for():
    with harness.start(one_is_always_late, workers=2, servers=1, env={"BPS_TRANSPORT": "tcp"}) as job:
        job.await_marks("ready")
        seen = until_it_waits(job)
        assert seen["server 0"]["round_waits_for"] == [1]
        assert (seen["rank 0"]["is_slowest"], seen["rank 1"]["is_slowest"]) == (False, True)
        assert (seen["rank 0"]["state"], seen["rank 1"]["awaited_by"]) == ("waiting", 1)
        assert (seen["rank 0"]["last_percent"], seen["rank 1"]["last_percent"]) == (0, 100)
        assert seen["rank 0"]["credits"] > 0  # over TCP, servers need slots
        assert seen["server 0"]["credits"] is None
        job.set_mark("go on")
        assert job.results() == [2, 2]


def behind_a_kernel(bps: Any) -> float:
    """The kernel of rank 1 ends late, in front of the second of two operations."""
    stream = gpu_arrays.fake().fake_stream()
    array = gpu_arrays.of(np.ones(COUNT, np.float32), stream=stream)
    kernels = [gpu_arrays.Kernel(array, 0)] if bps.rank() == 1 else []
    handle = bps.push_pull_async_inplace(array, name="w")
    await_mark("go on")
    for kernel in kernels:
        kernel.let_go()
    bps.synchronize(handle)
    return float(array.read()[0])


def test_a_rank_that_waits_for_its_gpu_is_not_one_that_waits_for_others():
    with harness.start(behind_a_kernel, workers=2, servers=1, env=gpu_arrays.env()) as job:
        seen = job.eventually(
            lambda: top(job), 30, "the wait for the kernel",
            until=lambda seen: seen["rank 1"]["state"] == "GPU wait" and seen["rank 0"]["state"] == "waiting",
        )  # fmt: skip
        assert "its GPU" in seen["why"]
        assert (seen["rank 1"]["awaited_by"], seen["rank 1"]["is_slowest"]) == (1, True)
        job.set_mark("go on")
        assert job.results() == [0.5, 0.5]


def test_bytes_in_both_directions():
    with harness.start(goes_on, workers=2, servers=1, env={"BPS_TRANSPORT": "tcp"}) as job:
        job.await_marks("ready")
        job.eventually(lambda: top(job), what="as much in both directions", until=is_balanced)
        job.set_mark("end")
        job.results()


def is_balanced(seen: dict[str, Any]) -> bool:
    """Whether all have carried as much as they should. On a busy machine a look may see less than two rounds of one."""
    both = [(seen[name]["sent_bytes_per_s"], seen[name]["received_bytes_per_s"]) for name in NAMES]
    ranks, server = both[:2], both[2]
    if not all(sent > 0 and received > 0 for sent, received in both):
        return False
    is_even = all(0.5 < sent / received < 2 for sent, received in both)
    return is_even and 0.3 < sum(received for _, received in ranks) / server[0] < 3


def test_the_live_view():
    """In a terminal it draws again and again, and ends with the job."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", 40, 250, 0, 0))
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "250", "LINES": "40"}
    with harness.start(one_is_always_late, workers=2, servers=1) as job:
        job.await_marks("ready")
        until_it_waits(job)
        command = [*COMMAND, "--interval", "0.3", "--job", job.name]
        with subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=env) as live:
            os.close(inner)
            try:
                screens = read_until(outer, lambda text: len(re.findall(r"rank 1 \(slowest\)", text)) >= 2)
                assert "2 workers, 1 servers, running" in screens
                assert "Rank 0 has waited" in screens
                job.set_mark("go on")
                assert job.results() == [2, 2]
                read_until(outer, lambda _: live.poll() is not None)
                assert live.returncode == 0
            finally:
                live.kill()
    os.close(outer)


def read_until(terminal: int, is_it: Any) -> str:
    """What a program has written to its terminal by the time when that is true, without control sequences."""
    pieces = [""]

    def is_there() -> bool:
        if select.select([terminal], [], [], 0)[0]:
            with contextlib.suppress(OSError):  # its other end is closed
                piece = os.read(terminal, 1 << 16).decode(errors="replace")
                pieces.append(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", piece))
        return bool(is_it("".join(pieces)))

    harness.eventually(is_there, 30, "what is waited for in the terminal")
    return "".join(pieces)
