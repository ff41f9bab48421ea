# SPDX-License-Identifier: Apache-2.0
"""Virtual environments of the MPI baselines. Each MPI library, with its mpi4py, needs one of its own.

    python -m bps_rdma.tools.bench.peers openmpi mpich

creates them, once, below $XDG_CACHE_HOME/bps_rdma/peers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bps_rdma.errors import BpsError, InvalidArgumentError

PACKAGES = {"openmpi": ["mpi4py", "openmpi>=5"], "mpich": ["mpi4py", "mpich>=4.3"]}


def folder(name: str) -> Path:
    """The folder of the environment of `name`, which may not exist yet."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "bps_rdma" / "peers" / f"{name}-{sys.version_info[0]}.{sys.version_info[1]}"


def require(name: str) -> Path:
    """The environment of `name`. Raises InvalidArgumentError when it has not been created."""
    if not (folder(name) / "bin" / "mpiexec").exists():
        raise InvalidArgumentError(
            f"--compare {name} needs a virtual environment with {name}, which does not exist yet",
            f"{sys.executable} -m bps_rdma.tools.bench.peers {name}",
        )
    return folder(name)


def make(name: str) -> Path:
    """Create the environment of `name` if it does not exist. Raises BpsError when pip fails."""
    where = folder(name)
    if (where / "bin" / "mpiexec").exists():
        return where
    # The same interpreter as ours, because the ranks run the measuring code of this package.
    commands = ([sys.executable, "-m", "venv", "--clear", where], [where / "bin" / "pip", "install", "numpy"])
    for command in (*commands, [where / "bin" / "pip", "install", *PACKAGES[name]]):
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise BpsError(
                f"cannot install {name} in {where}: {' '.join(said)}", "run pip by hand to see all of its output"
            )
    return where
