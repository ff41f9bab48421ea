"""The virtual environments of peers that cannot share one with us or with each other: an MPI library and its mpi4py.

    python -m bps_rdma.bench.peers openmpi mpich

makes them, once, below $XDG_CACHE_HOME/bps_rdma/peers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bps_rdma.errors import BpsError, InvalidArgumentError

PACKAGES = {"openmpi": ["mpi4py", "openmpi>=5"], "mpich": ["mpi4py", "mpich>=4.3"]}


def folder(name: str) -> Path:
    """Where the environment of peer `name` is, or will be."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "bps_rdma" / "peers" / f"{name}-{sys.version_info[0]}.{sys.version_info[1]}"


def require(name: str) -> Path:
    """The environment of `name`. Raises InvalidArgumentError when nobody has made it."""
    if not (folder(name) / "bin" / "mpiexec").exists():
        raise InvalidArgumentError(
            f"--compare {name} needs {name} in a virtual environment of its own, which is not there yet",
            f"{sys.executable} -m bps_rdma.bench.peers {name}",
        )
    return folder(name)


def make(name: str) -> Path:
    """Makes the environment of `name`, or finds it made. Raises BpsError when pip cannot."""
    where = folder(name)
    if (where / "bin" / "mpiexec").exists():
        return where
    # The interpreter of our own kind: the peer's ranks run our measuring code.
    commands = ([sys.executable, "-m", "venv", "--clear", where], [where / "bin" / "pip", "install", "numpy"])
    for command in (*commands, [where / "bin" / "pip", "install", *PACKAGES[name]]):
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise BpsError(f"cannot install {name} in {where}: {' '.join(said)}", "see pip's message")
    return where
