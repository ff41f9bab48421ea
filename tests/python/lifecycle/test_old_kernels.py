# SPDX-License-Identifier: Apache-2.0
"""Kernels and containers without a system call: jobs of `bps run` give the right sums there, or say what is missing."""

import errno
import os
import platform
import sys
import textwrap
from pathlib import Path

import harness
import pytest

LONG = bool(os.environ.get("BPS_TEST_ALL"))
BPS = harness.binary("bps")
# Denies a system call to itself, and becomes the command.
DENY = """
import ctypes, os, struct, sys
number, error = int(sys.argv[1]), int(sys.argv[2])
load, jump, answer = (0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error)
code = b"".join(struct.pack("HBBI", *one) for one in (load, jump, answer, (0x06, 0, 0, 0x7FFF0000)))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
program = Program(4, code)
assert libc.prctl(38, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS"
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, "PR_SET_SECCOMP"
os.execvp(sys.argv[3], sys.argv[3:])
"""
JOB = """
import os, numpy as np, bps_rdma as bps
bps.init()
for count in (7, 300_000):
    for array in (np.empty(count, np.float32), bps.empty(count, np.float32)):
        array[:] = bps.rank() + 1
        bps.push_pull_inplace(array, average=False, name=f"{count} {type(array)} {array.flags.owndata}")
        assert (array == 3).all(), array
routes = {server["route"].partition(",")[0] for server in bps.dump()["servers"]} if os.environ.get("SHOW") else ""
bps.shutdown()
os.write(1, f"sums are right {sorted(routes) if routes else ''}".strip().encode() + b"\\n")
"""
X86, ARM = "x86_64", "aarch64"
CALLS = {
    "memfd_create": {X86: 319, ARM: 279}, "process_vm_readv": {X86: 310, ARM: 270},
    "process_vm_writev": {X86: 311, ARM: 271}, "pidfd_open": {X86: 434, ARM: 434},
    "pidfd_send_signal": {X86: 424, ARM: 424}, "epoll_pwait2": {X86: 441, ARM: 441},
    "close_range": {X86: 436, ARM: 436}, "membarrier": {X86: 324, ARM: 283}, "userfaultfd": {X86: 323, ARM: 282},
    "copy_file_range": {X86: 326, ARM: 285}, "statx": {X86: 332, ARM: 291}, "rseq": {X86: 334, ARM: 293},
}  # fmt: skip
BY_DEFAULT = ("memfd_create", "pidfd_open")

pytestmark = pytest.mark.skipif(platform.machine() not in (X86, ARM), reason="knows the numbers of two machines only")


def without(call: str, error: int = errno.ENOSYS) -> list[str]:
    """What comes before a command that is not to have this system call."""
    return [sys.executable, "-c", DENY, str(CALLS[call][platform.machine()]), str(error)]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.py"
    path.write_text(textwrap.dedent(JOB))
    return path


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EPERM] if LONG else [errno.EPERM])
@pytest.mark.parametrize("call", CALLS if LONG else BY_DEFAULT)
def test_jobs_go_on_without_a_system_call(call, error, script):
    """EPERM is what old profiles of containers say of calls that they do not know."""
    command = [*without(call, error), BPS, "run", "-np", "2", sys.executable, str(script)]
    done = harness.run_command(command, within=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["sums are right"] * 2
    assert "Traceback" not in done.stderr
    assert ("memfd_create" in done.stderr) == (call == "memfd_create"), "said, and once"


def test_one_rank_without_shared_memory_is_reached_by_tcp(script):
    """The other one learns of it before it tries."""
    with harness.Members() as ranks:
        port = harness.free_port()
        for rank, before in enumerate(([], without("memfd_create", errno.EPERM))):
            env = harness.clean_env(**harness.of_rank(rank, 2, port))
            ranks.command(f"rank {rank}", [*before, sys.executable, str(script)], env)
        ranks.succeed()
        assert (
            "no process of this host shares memory with this one (memfd_create: Operation not permitted)"
            in ranks.log("rank 1")
        )


def test_shared_memory_that_is_asked_for_by_name(script):
    command = [*without("memfd_create", errno.EPERM), sys.executable, str(script)]
    done = harness.run_command(command, env=harness.clean_env(BPS_TRANSPORT="shm"))
    assert done.returncode != 0
    assert "this system lets no process share memory: memfd_create: Operation not permitted" in done.stderr
    assert "seccomp" in done.stderr


def test_a_lost_rank_is_noticed_without_pidfds(tmp_path):
    code = "import os, time; os.environ['RANK'] == '1' and os._exit(3); time.sleep(100)"
    command = [*without("pidfd_open"), BPS, "run", "-np", "2", "--grace", "0.1", sys.executable, "-c", code]
    done = harness.run_command(command, within=60)
    assert done.returncode == 3
    assert "rank 1 (pid" in done.stderr


# ---- What ranks print

WRITES = """
import os, pathlib, sys, time
here, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
for number in range(20):
    os.write(1, f"begun by {rank}, ".encode())
    (here / f"{number} {rank}").touch()
    while not all((here / f"{number} {other}").exists() for other in range(3)):
        time.sleep(0.001)
    os.write(1, f"ended by {rank}\\n".encode())
"""


@pytest.mark.parametrize("options", [[], ["--prefix"]])
def test_lines_of_ranks_do_not_mix(options, tmp_path):
    """All have written half of a line when the first of them writes the rest."""
    done = harness.run_command([BPS, "run", "-np", "3", *options, sys.executable, "-c", WRITES, str(tmp_path)])
    lines = [line.rpartition("] ")[2] for line in done.stdout.splitlines()]
    assert sorted(lines) == [f"begun by {rank}, ended by {rank}" for rank in range(3) for _ in range(20)]


def test_output_stays_as_it_was_written():
    code = "import os; os.write(1, b'one\\n'); os.write(2, b'two\\n'); os.write(1, b'50%\\r100%'); os.write(2, b'end')"
    done = harness.run_command(["sh", "-c", f'exec "$0" run -np 1 {sys.executable} -c "{code}" 2>&1', BPS])
    assert done.stdout.encode() in (b"one\ntwo\n50%\r100%end", b"one\ntwo\n50%\n100%end"), done  # text mode


# ---- A root that cannot be written to


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("options", [[], ["--min-np", "1"]])
def test_no_folder_can_be_written_to(options, script):
    read_only = "mount -t tmpfs -o size=1M none /mnt && cp {0} /mnt/job.py && mount --bind /mnt /tmp && "
    read_only += "for at in /mnt /tmp /var/tmp /; do mount -o remount,bind,ro $at 2>/dev/null || "
    read_only += (
        "(mount --bind $at $at && mount -o remount,bind,ro $at); done; cd /; ! touch /tmp/x 2>/dev/null && exec "
    )
    line = " ".join([BPS, "run", "-np", "2", *options, sys.executable, "/mnt/job.py"])
    if harness.run_command(["unshare", "--mount", "true"]).returncode != 0:
        pytest.skip("needs a mount namespace of its own")
    done = harness.run_command(["unshare", "--mount", "sh", "-c", read_only.format(script) + line], within=120)
    if options:
        assert done.returncode == 1, done.stderr
        assert "no folder can be made for the state of the scheduler" in done.stderr
        assert "TMPDIR" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["sums are right"] * 2
