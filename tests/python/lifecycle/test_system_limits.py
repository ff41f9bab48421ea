# SPDX-License-Identifier: Apache-2.0
"""Limits of the system: an error names the limit, its value and the cure; nothing half-started is left.

Memory that peers map keeps its size, whatever its owner does.
"""

import ctypes
import os
import resource
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from harness import await_mark, mark

SHM = {"BPS_TRANSPORT": "shm"}
MIB = 2**20


def descriptors() -> list[int]:
    return sorted(int(fd.name) for fd in Path("/proc/self/fd").iterdir() if fd.exists())


def in_folder(path: str) -> int:
    return sum(1 for _ in Path(path).iterdir())


def allow_files(more: int) -> int:
    """Sets this process's limit so that it may open `more` files; returns the limit."""
    limit = max(descriptors()) + 1 + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return limit


def one_sum(bps: Any, name: str, mapped: bool = False) -> bool:
    array = bps.empty(1000) if mapped else np.empty(1000, np.float32)
    array.fill(bps.rank() + 1)
    return bool((bps.push_pull_inplace(array, False, name) == sum(range(1, bps.size() + 1))).all())


def error_of(call: Any) -> tuple[str, str, str]:
    """Class, message and hint of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "hint", "")
    return "", "no error", ""


# ---- Memory that others map


def truncates(bps: Any) -> tuple[list[str], bool]:
    array = bps.empty(100_000)
    array.fill(1)
    bps.push_pull_inplace(array, False, "x")
    found = []
    if bps.rank() == 1:
        for fd in descriptors():
            if "memfd" in str(Path(f"/proc/self/fd/{fd}").readlink()):
                try:
                    os.ftruncate(fd, 0)
                    found.append("truncated")
                except PermissionError:
                    found.append("refused")
    handle = bps.push_pull_async_inplace(array, False, "x")  # a server that touches what is gone is killed by SIGBUS
    return found, bool((bps.synchronize(handle) == 2 * bps.size()).all())


@pytest.mark.parametrize("servers", [None, 1])
def test_a_worker_cannot_truncate_what_a_server_has_mapped(servers):
    first, second = harness.run(truncates, workers=2, servers=servers, env=SHM)
    assert set(second[0]) == {"refused"}
    assert first[1]
    assert second[1]


# ---- Files


def many_arrays(bps: Any, count: int) -> bool:
    mark("ready")
    await_mark("limited")
    arrays = [bps.empty(1000) for _ in range(count)]
    good = True
    for array in arrays:
        array.fill(1)
    for result in bps.wait([bps.push_pull_async_inplace(array, False, f"n{i}") for i, array in enumerate(arrays)]):
        good &= bool((result == bps.size()).all())
    return good


def test_a_server_maps_more_arrays_than_it_may_open_files():
    with harness.start(many_arrays, 300, workers=2, servers=1, env=SHM) as job:
        job.await_marks("ready")
        server = job.pid("server 0")
        resource.prlimit(server, resource.RLIMIT_NOFILE, (in_folder(f"/proc/{server}/fd") + 16,) * 2)
        job.set_mark("limited")
        assert job.results() == [True, True]


class _Capabilities(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def heed_limits() -> None:
    """Root, too, is held to what is in flight on local sockets from here on: by this thread and those that it makes."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    sets = (_Capabilities * 2)()
    assert libc.capget(header, sets) == 0
    sets[0].effective &= ~(1 << 21 | 1 << 24)  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE
    assert libc.capset(header, sets) == 0, ctypes.get_errno()


def sums_beside_a_stopped_server(bps: Any, arrays: int) -> bool:
    heed_limits()
    bps.init()
    mine = [bps.empty(1000) for _ in range(arrays)]
    for number, array in enumerate(mine):
        array.fill(number + bps.rank())
        bps.declare(f"n{number}", array)
    bps.barrier()
    mark("ready")
    await_mark("stopped")
    assert allow_files(16) < 2 * arrays
    handles = [bps.push_pull_async_inplace(array, False, f"n{number}") for number, array in enumerate(mine)]
    mark("started")
    sums = bps.wait(handles)
    bps.shutdown()
    return all(bool((found == 2 * number + 1).all()) for number, found in enumerate(sums))


def test_more_files_on_the_way_than_the_limit_are_no_lost_peer():
    """The server does not take what it is sent: each array's file is on its way."""
    env = SHM | {"BPS_HEARTBEAT_TIMEOUT": str(60 * harness.PATIENCE)}  # no rank takes the stopped server for lost
    with harness.start(sums_beside_a_stopped_server, 240, workers=2, servers=1, env=env, init=False) as job:
        job.await_marks("ready")
        job.kill("server 0", signal.SIGSTOP)
        job.set_mark("stopped")
        job.await_marks("started")
        said = "the limit on open files is"
        job.eventually(lambda: any(said in job.log(rank) for rank in job.ranks), 30, f"a rank says that {said}")
        job.kill("server 0", signal.SIGCONT)
        assert job.results() == [True, True]


def runs_out(bps: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    bps.barrier()  # the other rank may still be connecting, which takes descriptors here
    if bps.rank() == 1:
        found["limit"] = allow_files(20)
        arrays = []
        found["error"] = error_of(lambda: [arrays.append(bps.empty(10)) for _ in range(100)])
        found["arrays"] = len(arrays)
        arrays.clear()
    found["goes on"] = all(one_sum(bps, f"n{i}", mapped=True) for i in range(10))
    return found


def test_a_rank_that_runs_out_of_files_is_told_and_goes_on():
    other, concerned = harness.run(runs_out, workers=2, env=SHM)
    kind, text, hint = concerned["error"]
    assert kind == "TransportError"
    assert f"the limit on open files is {concerned['limit']}" in text
    assert "ulimit -n" in hint
    assert 10 <= concerned["arrays"] <= 25
    assert concerned["goes on"]
    assert other["goes on"]


def peer_runs_out(bps: Any) -> Any:
    """Rank 0, a server too, has no file left when rank 1 comes with an array that is to be mapped."""
    one_sum(bps, "warm")
    array = bps.empty(1000)
    if bps.rank() == 0:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = allow_files(0)
        bps.barrier()
        error_of(bps.barrier)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
        return limit
    bps.barrier()
    error = error_of(lambda: bps.push_pull_inplace(array, False, "x"))
    error_of(bps.barrier)
    return error


def test_a_rank_whose_array_cannot_be_mapped_is_told_why():
    env = SHM | {"BPS_SHUTDOWN_TIMEOUT": "1", "BPS_TIMEOUT": "10"}
    with harness.start(peer_runs_out, workers=2, env=env) as job:
        first, second = job.outcomes()
    assert first.value, first.error
    kind, text, _ = second.value
    assert kind == "PeerLostError", text
    assert f"its limit on open files is {first.value}" in text
    assert "server 0" in text
    assert "ulimit -n" in text


def open_things() -> tuple[list[int], int]:
    return descriptors(), in_folder("/proc/self/task")


def comes_back_to(before: tuple[list[int], int]) -> bool:
    """Soon: the kernel lists a thread for a moment after it has been joined."""
    files, threads = before  # of which one may have been about to vanish

    def is_back() -> bool:
        return descriptors() == files and in_folder("/proc/self/task") <= threads

    return harness.eventually(is_back, what=f"threads and descriptors as before, {before},")


def cannot_start(bps: Any) -> list[Any]:
    found = []
    for more in range(40):
        before = open_things()
        limit = allow_files(more)
        error = error_of(bps.init)
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        if not error[0]:
            break
        found.append((limit, error, comes_back_to(before)))
    bps.init()
    found.append(one_sum(bps, "x", mapped=True))
    bps.shutdown()
    return found


def test_init_without_files_leaves_nothing_half_started():
    (found,) = harness.run(cannot_start, workers=1, init=False, env={"BPS_JOIN_TIMEOUT": "1"})
    *errors, works = found
    assert works
    for _, (_, text, hint), nothing_left in errors:
        assert hint, text
        assert nothing_left, text
    # Where the last file is this process's end of a connection to its own scheduler, it only sees that nobody answers.
    named = [error for error in errors if f"the limit on open files is {error[0]} " in error[1][1]]
    assert len(named) >= max(3, len(errors) // 2), errors
    assert all(kind == "TransportError" and "ulimit -n" in hint for _, (kind, _, hint), _ in named)


# ---- Memory


@pytest.mark.parametrize(
    ("which", "said", "cure"),
    [
        ("RLIMIT_AS", "the limit on address space is", "ulimit -v"),
        ("RLIMIT_FSIZE", f"the limit on the size of a file is {MIB} bytes", "ulimit -f"),
        ("machine", "more than the memory of the machine", "smaller"),
    ],
)
@harness.on_ranks(workers=2, env=SHM)
def test_too_much_memory_is_an_error_and_the_job_goes_on(bps: Any, which: str, said: Any, cure: Any) -> None:
    if which == "RLIMIT_AS":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 64 * MIB, resource.RLIM_INFINITY))
    elif which == "RLIMIT_FSIZE":
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
    error = error_of(lambda: bps.empty(1 << 50 if which == "machine" else 128 * MIB, "uint8"))
    ((kind, text, hint), goes_on) = error, one_sum(bps, "x", mapped=True)
    assert kind == "TransportError"
    assert said in text
    assert cure in hint
    assert goes_on


def in_a_cgroup(bps: Any, folder: str) -> tuple[tuple[str, str, str], bool]:
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    return error_of(lambda: bps.empty(512 * MIB, "uint8")), one_sum(bps, "x", mapped=True)


def own_memory_group() -> tuple[Path, str]:
    """The folder of this process's memory cgroup, and the name of the file with its limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes"
    return Path("/sys/fs/cgroup" + path), "memory.max"


def test_too_much_memory_for_the_cgroup_is_an_error_and_not_a_kill():
    parent, name = own_memory_group()
    group = parent / f"bps-test-{secrets.token_hex(4)}"
    try:
        group.mkdir()
        (group / name).write_text(str(256 * MIB))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        for (kind, text, hint), goes_on in harness.run(in_a_cgroup, str(group), workers=2, env=SHM):
            assert kind == "TransportError", text
            assert f"memory limit of the cgroup, {256 * MIB} bytes" in text
            assert "--memory" in hint
            assert goes_on
    finally:
        group.rmdir()


def large_partitions(bps: Any) -> tuple[str, str, str]:
    await_mark("limited")

    def call() -> None:
        bps.init()
        bps.push_pull_inplace(np.ones(1000, np.float32), False, "x", timeout=10)

    error = error_of(call)
    bps.shutdown()
    return error


def test_a_server_without_memory_for_slots_says_so_to_its_workers():
    # Not one slot fits, so that what the server takes for other things still does.
    env = {"BPS_TRANSPORT": "tcp", "BPS_PARTITION_BYTES": str(256 * MIB), "BPS_SHUTDOWN_TIMEOUT": "1"}
    with harness.start(large_partitions, workers=2, servers=1, env=env, init=False) as job:
        server = job.pid("server 0")
        used = int(Path(f"/proc/{server}/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + 200 * MIB
        resource.prlimit(server, resource.RLIMIT_AS, (limit, limit))
        job.set_mark("limited")
        values = job.values()
    for kind, text, _ in values:
        assert kind == "PeerLostError"
        assert "server 0" in text
        assert f"the limit on address space is {limit} bytes" in text
        assert "ulimit -v" in text


ONE_SUM = """
import numpy as np, bps_rdma as bps
bps.init()
array = bps.empty(1000)
array.fill(1)
assert (bps.push_pull_inplace(array, False, "x") == 2).all()
assert bps.metrics()["total"]["data_writes"] > 0
bps.shutdown()
print("sum is right")
"""


@pytest.mark.parametrize("options", ["ro,size=64k", "size=4k"])
def test_a_dev_shm_that_is_full_or_read_only_does_not_matter(options, tmp_path):
    script = tmp_path / "one_sum.py"
    script.write_text(ONE_SUM)
    probe = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/dev/shm"], check=False)
    if probe.returncode != 0:
        pytest.skip("needs a mount namespace of its own")
    mounts = f"mount -t tmpfs -o {options} none /dev/shm && (head -c 65536 /dev/zero > /dev/shm/full || true)"
    run = f"{harness.binary('bps')} run -np 2 --transport shm {sys.executable} {script}"
    done = harness.run_command(["unshare", "-m", "sh", "-c", f"{mounts} 2> /dev/null; {run}"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum is right") == 2
