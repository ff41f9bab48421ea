# SPDX-License-Identifier: Apache-2.0
"""Starts the teams of processes that measure together, one process per rank.

One team runs bps_rdma and the baselines that can share its processes. Each MPI baseline has a team of its own, because
its own mpiexec has to start it. All teams have the same size, and sleep on a socket while another team measures.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import bps_rdma
from bps_rdma.errors import BpsError, DeadlineError
from bps_rdma.launch.environment import LocalJob
from bps_rdma.launch.process import Child, Children
from bps_rdma.tools.bench import worker
from bps_rdma.tools.bench.peers import environments
from bps_rdma.tools.bench.plan import Plan
from bps_rdma.tools.ranks import Ranks

_ANSWER_SECONDS = 330.0  # longer than the default of BPS_TIMEOUT, so that the message of the library arrives first
_START_SECONDS = 60.0


def start_ours(children: Children, plan: Plan, job: LocalJob, shared: tuple[int, int] | None) -> Ranks:
    """Start the ranks of `job`; `shared`: descriptor and size of the memory for the upper bound."""
    ranks = Ranks(children, _ANSWER_SECONDS)
    for rank in range(job.workers):
        ours, theirs = socket.socketpair()
        env = job.worker(rank) | {worker.CHANNEL: str(theirs.fileno()), worker.PLAN: plan.to_json()}
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo resolves the host name, which may fail
        descriptors = [theirs.fileno()]
        if shared is not None:
            env[worker.SHARED] = f"{shared[0]} {shared[1]}"
            descriptors.append(shared[0])
        label = f"rank {rank}"
        command = job.placed(label, [sys.executable, *_importing(worker.__name__)])
        ranks.add(children.spawn(label, command, env, descriptors), ours)
        theirs.close()
    return ranks


def start_mpi(children: Children, plan: Plan, name: str, workers: int, shared: Path) -> Ranks:
    """Start the ranks of the MPI baseline `name`; see start_under_mpi()."""
    env = {"BPS_BENCH_TEAM": name, worker.PLAN: plan.to_json()}
    return start_under_mpi(children, name, _importing("bps_rdma.tools.bench.peers.mpi"), env, workers, shared)


def start_under_mpi(
    children: Children, name: str, words: list[str], env: dict[str, str], workers: int, shared: Path
) -> Ranks:
    """Start ranks by the mpiexec of the MPI library `name`; Open MPI keeps its shared memory in the folder `shared`.

    Args:
        words: the arguments of the interpreter that has this library's mpi4py.
        env: added to the environment, as is worker.CHANNEL, the socket to which each rank connects.

    Raises BpsError when they do not connect.
    """
    where = environments.require(name)
    command = [str(where / "bin" / "mpiexec"), "-n", str(workers), str(where / "bin" / "python"), *words]
    with tempfile.TemporaryDirectory(prefix="bps-bench-") as folder, socket.socket(socket.AF_UNIX) as listener:
        address = str(Path(folder) / "socket")
        listener.bind(address)
        listener.listen(workers)
        # Open MPI refuses to run as root, or more ranks than cores, without these.
        settings = {
            worker.CHANNEL: address,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            # Files of ranks that were killed would stay in /dev/shm itself.
            "OMPI_MCA_btl_sm_backing_directory": str(shared),
        }
        launcher = children.spawn(name, command, dict(os.environ) | settings | env)
        return _accept(children, launcher, listener, workers)


def _accept(children: Children, launcher: Child, listener: socket.socket, workers: int) -> Ranks:
    connections: list[socket.socket] = []  # in any order: only MPI has to know which is which rank
    deadline = time.monotonic() + _START_SECONDS
    listener.settimeout(0.2)
    while len(connections) < workers:
        try:
            connections.append(listener.accept()[0])
        except TimeoutError:
            children.wait(0.0)
            if launcher.status is not None:
                raise BpsError(launcher.describe_end(), "see its output above") from None
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{launcher.label} started {len(connections)} of {workers} ranks within {_START_SECONDS:.0f} s",
                    "run its mpiexec by hand to see why",
                ) from None
    ranks = Ranks(children, _ANSWER_SECONDS)
    for connection in connections:
        ranks.add(launcher, connection)
    return ranks


@contextlib.contextmanager
def folder_for_shared_memory(needed: bool) -> Iterator[Path]:
    """A folder in /dev/shm, or where there is none among temporary files, that goes with all that is in it.

    None is made, and the path is /dev/shm, unless it is `needed`.
    """
    if not needed:
        yield Path("/dev/shm")  # noqa: S108
        return
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    with tempfile.TemporaryDirectory(prefix="openmpi-", dir=memory, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def busy(children: Children, processes: int) -> Iterator[None]:
    """Run `processes` additional processes that each keep a core busy."""
    loads = [children.spawn(f"load {i}", ["/bin/sh", "-c", "while :; do :; done"], {}) for i in range(processes)]
    try:
        yield
    finally:
        for load in loads:
            children.end(load)


def _importing(module: str) -> list[str]:
    # Not -m, which searches the current folder first: in a checkout that is the package without its native part.
    root = str(Path(bps_rdma.__file__).parent.parent)
    return ["-c", f"import sys; sys.path = [p for p in sys.path if p] + [{root!r}]; from {module} import main; main()"]
