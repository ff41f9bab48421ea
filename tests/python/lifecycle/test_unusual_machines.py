# SPDX-License-Identifier: Apache-2.0
"""Places that are not like a developer's machine: jobs of `bps run`, as users start them, give the right sums there."""

import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import harness
import pytest

LONG = bool(os.environ.get("BPS_TEST_ALL"))
BPS = harness.binary("bps")
JOB = """
import os, sys
import numpy as np
import bps_rdma as bps

bps.init()
rank, size = bps.rank(), bps.size()
scale = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
for count in (7, 300_000):
    for array in (np.empty(count, np.float32), bps.empty(count, np.float32)):
        for i in range(rounds):
            array[:] = scale * (rank + 1 + i)
            bps.push_pull_inplace(array, average=False, name=f"{count} {type(array)} {array.flags.owndata}")
            assert (array == scale * (sum(range(size + 1)) + i * size)).all(), array
bps.shutdown()
os.write(1, b"sums are right\\n")  # at once, beside the other rank
"""
RIGHT = ["sums are right"] * 2


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's; with a space, a quote and letters of others in its name."""
    path = Path(tempfile.mkdtemp(prefix="bps with spaces, it's für "))
    path.chmod(0o755)
    (path / "a job.py").write_text(JOB)
    yield path
    shutil.rmtree(path)


def run_job(folder: Path, *options: str, prefix: str = "", env: dict[str, str] | None = None,
            command: list[str] | None = None) -> list[str]:  # fmt: skip
    """The lines that a job of two ranks prints; `prefix` is said in the shell that starts it."""
    line = shlex.join(command or [BPS, "run", "-np", "2", *options, sys.executable, str(folder / "a job.py")])
    done = harness.run_command(
        ["bash", "-c", f"{prefix}\nexec {line}"],
        env=harness.clean_env() if env is None else env,
        cwd=folder,
        within=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines()


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount, and become another user")

# In a mount namespace of its own, so that nothing outside sees it.
ABSENT = """
mount -t tmpfs none /mnt && mkdir /mnt/fd
for node in null zero random urandom; do touch /mnt/$node && mount --bind /dev/$node /mnt/$node; done
rmdir /mnt/fd && ln -s /proc/self/fd /mnt/fd
mount --move /mnt /dev 2> /dev/null || mount --rbind /mnt /dev
[ ! -e /dev/shm ]
"""
SHARED_MEMORY = {
    "absent": ABSENT,
    "read-only": "mount -t tmpfs -o ro none /dev/shm\n! touch /dev/shm/x 2> /dev/null",
    "small": "mount -t tmpfs -o size=4k none /dev/shm",
}


def needs_mounts() -> None:
    if harness.run_command(["unshare", "--mount", "true"]).returncode != 0:
        pytest.skip("needs a mount namespace of its own")


@as_root
@pytest.mark.parametrize("servers", [(), ("--servers", "1")] if LONG else [()])
@pytest.mark.parametrize("kind", SHARED_MEMORY)
def test_dev_shm(folder, kind, servers):
    script = folder / "start"
    line = shlex.join([BPS, "run", "-np", "2", *servers, sys.executable, str(folder / "a job.py")])
    script.write_text(f"set -e\n{SHARED_MEMORY[kind]}\nexec {line}\n")
    needs_mounts()
    assert run_job(folder, command=["unshare", "--mount", "bash", str(script)]) == RIGHT


@pytest.mark.parametrize("options", [(), ("--servers", "2"), ("--transport", "tcp")])
def test_few_open_files(folder, options):
    assert run_job(folder, *options, prefix="ulimit -n 64") == RIGHT


def test_too_few_open_files_are_named(folder):
    done = harness.run_command(
        ["bash", "-c", f"ulimit -n 12; exec {shlex.join([sys.executable, str(folder / 'a job.py')])}"], cwd=folder
    )
    assert done.returncode != 0
    assert "ulimit -n" in done.stderr, done.stderr
    assert "firewall" not in done.stderr


def bare() -> dict[str, str]:
    """An environment of almost nothing: no HOME, no USER, no XDG_RUNTIME_DIR, no TMPDIR, no locale."""
    return {"PATH": os.environ["PATH"]}


@pytest.mark.parametrize("options", [(), ("--servers", "1")] if LONG else [("--servers", "1")])
def test_no_home(folder, options):
    assert run_job(folder, *options, env=bare()) == RIGHT


# Where another user may read this Python and what is installed, whichever folders they lie in.
READABLE = """
mount -t tmpfs -o mode=755 none /mnt && mkdir /mnt/python /mnt/packages
mount --bind {python} /mnt/python && mount --bind {packages} /mnt/packages
exec setpriv --reuid 65534 --regid 65534 --clear-groups env -i PATH=/mnt/python/bin:/usr/bin:/bin {home} \
  PYTHONPATH=/mnt/packages PYTHONDONTWRITEBYTECODE=1 /mnt/python/bin/{name} -P -m bps_rdma run -np 2 \
  /mnt/python/bin/{name} {job}
"""


@as_root
@pytest.mark.parametrize("home", ["", "HOME=/root", "HOME=/proc"] if LONG else ["HOME=/root"])
def test_another_user(folder, home):
    """Whose HOME may be another's, as after `su`, or in a container that is told a number."""
    needs_mounts()
    base = Path(os.path.realpath(sys.executable))
    script = READABLE.format(
        python=shlex.quote(sys.base_prefix), packages=shlex.quote(sysconfig.get_path("platlib")), home=home,
        name=base.name, job=shlex.quote(str(folder / "a job.py")),
    )  # fmt: skip
    assert run_job(folder, command=["unshare", "--mount", "bash", "-ec", script]) == RIGHT


def test_paths_with_spaces(folder):
    env = harness.clean_env(TMPDIR=str(folder), BPS_TRACE=str(folder / "a trace"), BPS_DUMP_DIR=str(folder / "dumps"))
    assert run_job(folder, "--servers", "1", env=env) == RIGHT
    merged = folder / "the trace.json"
    done = harness.run_command(
        [BPS, "trace", "merge", str(folder / "a trace"), "--out", str(merged)], env=env, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert merged.stat().st_size > 1000


PIPES = [
    "bps config | head -1",
    "bps --help | true",
    "bps version --json | true",
    "bps config | true",
    "bps run -np 2 --prefix seq 100000 | head -1",
]
PIPES += ["bps bench --sizes 4K --seconds 0.2 | head -1", "bps doctor --no-transfer | head -1"] if LONG else []


@pytest.mark.parametrize("line", PIPES)
def test_a_reader_that_ends_early(line):
    env = harness.clean_env(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = harness.run_command(["bash", "-c", f"{line}; echo ${{PIPESTATUS[0]}}"], env=env)
    assert "Traceback" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    status = int(done.stdout.splitlines()[-1])
    # Of a reader that is gone before anything comes the command surely learns.
    assert status in ({141} if "| true" in line or "bps run" in line else {0, 141}), done.stdout + done.stderr


NOTEBOOK = """
import asyncio, os, sys
import numpy as np
assert not hasattr(sys.modules["__main__"], "__file__")
async def cell():
    import bps_rdma as bps
    bps.init()
    bps.init()  # the cell is run again
    x = np.ones(1000, np.float32)
    first = await bps.push_pull_async(x, average=False, name="a")
    second, third = await asyncio.gather(*(bps.push_pull_async(x, name=n) for n in "bc"))
    assert (first == bps.size()).all() and (second == 1).all() and (third == 1).all()
    bps.shutdown()
    bps.init()  # and after the kernel has left the job
    assert bps.push_pull(x)[0] == 1
    bps.shutdown()
    os.write(1, b"sums are right\\n")
asyncio.run(cell())
"""


def test_a_notebook(folder):
    """No file of a main module, and a loop of asyncio that runs already: as in a cell of Jupyter."""
    done = harness.run_command([sys.executable, "-c", NOTEBOOK], cwd=folder)
    assert done.stdout == "sums are right\n", done.stderr
    ranks = run_job(folder, command=[BPS, "run", "-np", "2", sys.executable, "-c", NOTEBOOK])
    assert ranks == RIGHT


@pytest.mark.parametrize("options", [(), ("--servers", "1"), ("--transport", "tcp")] if LONG else [()])
def test_two_jobs_at_once(folder, options):
    """Each sums what its own ranks push, though both start in the same moment and use the same names."""
    rounds = "300" if LONG else "30"
    lines = [
        [BPS, "run", "-np", "2", *options, sys.executable, str(folder / "a job.py"), scale, rounds]
        for scale in ("1", "1024")
    ]
    assert harness.lines_of((line, harness.clean_env()) for line in lines) == RIGHT * 2
