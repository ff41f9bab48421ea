# SPDX-License-Identifier: Apache-2.0
"""The Slurm cluster that ci/slurm/run has built around pytest: jobs on it, and what they must not leave behind."""

import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import harness

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "examples" / "slurm"
TRAIN = str(ROOT / "examples" / "train.py")
RANK = str(Path(__file__).with_name("rank.py"))
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
_OWN = ("slurmd", "slurmstepd", "sh", "cat")  # processes of a node that belong to no job


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 * harness.PATIENCE)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Job:
    """A batch job."""

    number: int
    file: Path  # its output

    @property
    def output(self) -> str:
        return self.file.read_text() if self.file.exists() else ""

    def field(self, name: str) -> str:
        """A field of `scontrol show job`; of the first component where there are several."""
        found = re.search(rf"\b{name}=(\S+)", run("scontrol", "show", "job", "-o", str(self.number)))
        assert found is not None
        return found[1]

    def await_output(self, pattern: str) -> None:
        """Waits until a line of the output matches."""
        self._eventually(lambda: re.search(pattern, self.output), f"{pattern!r}")

    def await_end(self) -> str:
        """Waits until the job is over; returns its state."""
        self._eventually(lambda: self.field("JobState") in _OVER, "the end")
        return self.field("JobState")

    def _eventually(self, condition: Callable[[], object], what: str) -> None:
        try:
            harness.eventually(condition, 150, f"{what} of job {self.number}")
        except harness.WaitedInVainError as error:
            raise AssertionError(f"{error}\n{self.output}") from None


class Slurm:
    """The cluster."""

    folder = Path(os.environ.get("BPS_TEST_SLURM", "/nowhere"))
    home = folder / "home"

    def submit(self, template: str, *words: str, options: tuple[str, ...] = ()) -> Job:
        """Submits examples/slurm/TEMPLATE.sbatch as a user does, with the environment of Python active."""
        return self.submit_script(TEMPLATES / f"{template}.sbatch", *words, options=options)

    def submit_script(self, script: Path, *words: str, options: tuple[str, ...] = ()) -> Job:
        """Submits any batch script."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        output = self.home / f"{script.stem}-{time.monotonic_ns()}.out"
        done = harness.run_command(
            ["sbatch", "--parsable", "--output", str(output), *options, str(script), *words],
            env=harness.clean_env(PATH=path, HOME=str(self.home)),
            cwd=self.home,
            within=120,
        )
        assert done.returncode == 0, done.stderr
        return Job(int(done.stdout), output)

    def left(self) -> list[str]:
        """What a job has left on the nodes: processes, segments, sockets, and files in the folder of the secret."""
        found = []
        for node in (1, 2):
            inside = ("nsenter", "--target", os.environ[f"BPS_TEST_SLURM_N{node}"], "--all")
            # Without the first process, which is that of the namespace.
            names = run(*inside, "sh", "-c", "cat /proc/[2-9]/comm /proc/[0-9][0-9]*/comm || :").split()
            found += [f"n{node}: process {name}" for name in names if name not in _OWN]
            found += [f"n{node}: segment {name}" for name in run(*inside, "ls", "/dev/shm").split()]
            found += [
                f"n{node}: {line}" for line in run(*inside, "cat", "/proc/net/unix").splitlines() if "bps" in line
            ]
            lines = run(*inside, "ss", "-ltnpH").splitlines()
            found += [f"n{node}: {line}" for line in lines if '"slurmd"' not in line]
        keys = sorted((self.home / ".config" / "bps_rdma").glob("*"))
        found += [str(key) for key in keys if key.name != "secret" or stat.S_IMODE(key.stat().st_mode) != 0o600]
        return found
