"""Teams: processes that measure together, one per rank.

Ours, with the contenders that can live in the same processes; and one for each MPI peer, which has to be started by its
own mpiexec. All teams are of the same size, and idle (asleep on a socket) while another one measures.
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
from bps_rdma.bench import worker
from bps_rdma.bench.peers import environments
from bps_rdma.bench.plan import Plan
from bps_rdma.bench.ranks import Ranks
from bps_rdma.errors import BpsError, DeadlineError
from bps_rdma.launch.environment import LocalJob
from bps_rdma.launch.process import Child, Children

_ANSWER_SECONDS = 330.0  # longer than BPS_TIMEOUT's default, so that the library's own message comes first
_START_SECONDS = 60.0


def start_ours(children: Children, plan: Plan, job: LocalJob, shared: tuple[int, int] | None) -> Ranks:
    """The ranks of `job`; `shared`: descriptor and size of the memory for the machine's bound."""
    ranks = Ranks(children, _ANSWER_SECONDS)
    for rank in range(job.workers):
        ours, theirs = socket.socketpair()
        env = job.worker(rank) | {worker.CHANNEL: str(theirs.fileno()), worker.PLAN: plan.to_json()}
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo otherwise looks up this host's name, which may have none
        descriptors = [theirs.fileno()]
        if shared is not None:
            env[worker.SHARED] = f"{shared[0]} {shared[1]}"
            descriptors.append(shared[0])
        label = f"rank {rank}"
        command = job.placed(label, _python(sys.executable, worker.__name__))
        ranks.add(children.spawn(label, command, env, descriptors), ours)
        theirs.close()
    return ranks


def start_mpi(children: Children, plan: Plan, name: str, workers: int) -> Ranks:
    """The ranks of MPI peer `name`. Raises BpsError when they do not come."""
    where = environments.require(name)
    python = _python(str(where / "bin" / "python"), "bps_rdma.bench.peers.mpi")
    command = [str(where / "bin" / "mpiexec"), "-n", str(workers), *python]
    with tempfile.TemporaryDirectory(prefix="bps-bench-") as folder, socket.socket(socket.AF_UNIX) as door:
        address = str(Path(folder) / "door")
        door.bind(address)
        door.listen(workers)
        # Open MPI refuses root, and more ranks than cores, unless it is told twice that this is meant.
        env = dict(os.environ) | {
            "BPS_BENCH_TEAM": name,
            worker.CHANNEL: address,
            worker.PLAN: plan.to_json(),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }
        launcher = children.spawn(name, command, env)
        return _accept(children, launcher, door, workers)


def _accept(children: Children, launcher: Child, door: socket.socket, workers: int) -> Ranks:
    callers: list[socket.socket] = []  # in any order: who is which rank matters to MPI only
    deadline = time.monotonic() + _START_SECONDS
    door.settimeout(0.2)
    while len(callers) < workers:
        try:
            callers.append(door.accept()[0])
        except TimeoutError:
            children.wait(0.0)
            if launcher.status is not None:
                raise BpsError(launcher.describe_end(), "what it wrote before is above") from None
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{launcher.label} started {len(callers)} of {workers} ranks within {_START_SECONDS:.0f} s",
                    "run its mpiexec by hand",
                ) from None
    ranks = Ranks(children, _ANSWER_SECONDS)
    for caller in callers:
        ranks.add(launcher, caller)
    return ranks


@contextlib.contextmanager
def busy(children: Children, processes: int) -> Iterator[None]:
    """Keeps `processes` more processes running, each of which wants a core for itself."""
    loads = [children.spawn(f"load {i}", ["/bin/sh", "-c", "while :; do :; done"], {}) for i in range(processes)]
    try:
        yield
    finally:
        for load in loads:
            children.end(load)


def _python(interpreter: str, module: str) -> list[str]:
    # Not -m, which would look in the current folder first: in a checkout that is the package without its native part.
    root = str(Path(bps_rdma.__file__).parent.parent)
    code = f"import sys; sys.path = [p for p in sys.path if p] + [{root!r}]; from {module} import main; main()"
    return [interpreter, "-c", code]
