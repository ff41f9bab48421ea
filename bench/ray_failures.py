# SPDX-License-Identifier: Apache-2.0
"""How fast a job on Ray learns of a failure, and how soon it goes on: one line per kind of failure.

    python bench/ray_failures.py [--rounds 3] [--only 'dead node,ray stop']

A cluster of two nodes (three for the loss of one) on this machine; two or three ranks take short steps, with a
checkpoint after each. Seconds, medians over the rounds: until the other ranks have their exception, until the driver
has named the cause, ended all members and found out which nodes answer, and until the restarted job has taken its
first step. For a driver that dies, and for `ray stop` after the first process that it ends: until no process of the job
is left, with which its sockets and shared memory go: neither has a name in a file system. The latter ends every Ray
that it sees, so all of it runs in a PID namespace, as root.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KINDS = ["killed worker", "killed server", "killed scheduler", "raising worker", "SIGTERM", "SIGSTOP", "dead node"]
ENDS = ["dead driver", "ray stop"]
_STEP_OF_THE_END = 20
_MEMBERS = ("bps-", "ray::rank", "ray::server", "ray::scheduler", "ray::Rank", "ray::Helper")


def train(plan: dict[str, Any]) -> None:
    """As one rank: takes steps; in the first start the last rank meets its end at some step."""
    import numpy as np

    import bps_rdma

    bps_rdma.init()
    rank, attempt = bps_rdma.rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    folder = Path(plan["folder"])
    saved = folder / f"step-{rank}"
    mine = float(saved.read_text()) if saved.exists() else 0.0
    step = int(bps_rdma.push_pull(np.array([mine]), op="min", name="begun", average=False)[0])
    try:
        while attempt == 0 or step < 2 * _STEP_OF_THE_END:
            if attempt == 0 and step == _STEP_OF_THE_END and rank == bps_rdma.size() - 1:
                note(folder, "happened")
                meet(plan["kind"])
            bps_rdma.push_pull_inplace(np.ones(100_000, np.float32), name="x")
            step += 1
            saved.write_text(str(step))
            note(folder, f"went-on-{rank}-{attempt}")
    except BaseException:
        note(folder, f"knew-{rank}-{attempt}")
        raise


def note(folder: Path, what: str) -> None:
    """Writes the time down, once."""
    with contextlib.suppress(FileExistsError), (folder / what).open("x") as file:
        file.write(repr(time.time()))


def meet(kind: str) -> None:
    """What happens to this rank, or to a server or the scheduler of its job."""
    if kind == "raising worker":
        raise ValueError("no such sample")
    if kind in ("killed server", "killed scheduler"):
        program = kind.replace("killed ", "bps-")
        os.kill(next(pid for pid, name in members() if name == program), signal.SIGKILL)
        return
    found = {"killed worker": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGSTOP": signal.SIGSTOP}.get(kind)
    if found is not None:
        os.kill(os.getpid(), found)
    time.sleep(600)  # the others wait for this rank; its node, or the driver, is ended from outside


def members() -> Iterator[tuple[int, str]]:
    """Processes whose output goes to the logs of this cluster, with their names."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str((folder / "fd/1").readlink()).startswith(os.environ["RAY_TMPDIR"]):
                yield int(folder.name), (folder / "comm").read_text().strip()


def of_the_job() -> int:
    """How many processes of the job there are."""
    return sum(1 for _, name in members() if name.startswith(_MEMBERS))


class Attempts(logging.Handler):
    """Notes when the driver begins to start again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.WARNING)
        self.folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        """A line of bps_rdma.ray.run."""
        note(self.folder, "driver")


def one_round(kind: str, cluster: Any) -> tuple[float, float, float]:
    """Seconds until the other ranks knew, until the driver began to start again, and until the job went on."""
    import bps_rdma.ray

    folder = Path(tempfile.mkdtemp(prefix="bps-ray-failures-"))
    attempts = Attempts(folder)
    logging.getLogger("bps_rdma.ray").addHandler(attempts)
    ranks = 3 if kind == "dead node" else 2
    ending = threading.Thread(target=lambda: None)
    if kind == "dead node":
        third = cluster.add_node(num_cpus=2, object_store_memory=80_000_000)
        cluster.wait_for_nodes()
        ending = threading.Thread(target=lambda: (when(folder), cluster.remove_node(third, allow_graceful=False)))
    ending.start()
    bps_rdma.ray.run(
        train, {"folder": str(folder), "kind": kind}, hosts=ranks, max_failures=1,
        servers=2 if kind == "killed server" else 0, server_resources={"CPU": 0.5},
        own_scheduler=kind == "killed scheduler",
    )  # fmt: skip
    ending.join()
    logging.getLogger("bps_rdma.ray").removeHandler(attempts)
    happened = read(folder, "happened")
    # A driver that has named the cause kills the others, some before they have noted that they knew.
    knew = [float(path.read_text()) for path in folder.glob("knew-*-0") if path.name != f"knew-{ranks - 1}-0"]
    on = max(read(folder, f"went-on-{rank}-1") for rank in range(ranks))
    return max(knew, default=float("nan")) - happened, read(folder, "driver") - happened, on - happened


def when(folder: Path) -> None:
    """Waits until it has happened."""
    while not (folder / "happened").exists():
        time.sleep(0.005)


def read(folder: Path, what: str) -> float:
    """A time that was written down."""
    return float((folder / what).read_text())


def until_all_gone(how: Callable[[subprocess.Popen[bytes]], float], address: str) -> float:
    """Starts a driver with a job, ends them, and waits until no process of the job is left."""
    folder = Path(tempfile.mkdtemp(prefix="bps-ray-failures-"))
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import ray, bps_rdma.ray, ray_failures; ray.init(address={address!r})\n"
        f"bps_rdma.ray.run(ray_failures.train, {{'folder': {str(folder)!r}, 'kind': 'hangs'}}, hosts=2, servers=2,\n"
        f"    server_resources={{'CPU': 0.5}}, env={{'PYTHONPATH': {os.environ['PYTHONPATH']!r}}})\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], cwd=folder, stderr=subprocess.DEVNULL)
    when(folder)
    begun = how(driver)
    while of_the_job():
        time.sleep(0.005)
    taken = time.monotonic() - begun
    driver.kill()
    driver.wait()
    return taken


def kill(driver: subprocess.Popen[bytes]) -> float:
    """Kills the driver, now."""
    driver.kill()
    return time.monotonic()


def stop_ray(_: subprocess.Popen[bytes]) -> float:
    """`ray stop`: ends all of Ray in this PID namespace. It takes seconds before it ends the first process."""
    count = of_the_job()
    subprocess.Popen([str(Path(sys.executable).with_name("ray")), "stop"], stdout=subprocess.DEVNULL)
    while of_the_job() >= count:
        time.sleep(0.005)
    return time.monotonic()


def measure(rounds: int, only: list[str]) -> None:
    """Prints the table."""
    import ray
    from ray.cluster_utils import Cluster

    nodes = {"object_store_memory": 80_000_000, "num_cpus": 3}
    cluster = Cluster(initialize_head=True, head_node_args=nodes | {"include_dashboard": False})
    cluster.add_node(**nodes)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    print("| failure | ranks know | next start begins | training goes on |\n|---|---|---|---|", flush=True)
    for kind in [kind for kind in KINDS if kind in only]:
        found = [one_round(kind, cluster) for _ in range(rounds)]
        shown = [f"{statistics.median(column):.2f}" for column in zip(*found, strict=True)]
        print(f"| {kind} | {' | '.join(shown)} |", flush=True)
    ray.shutdown()  # `ray stop` would end a driver, which this process is
    for kind in [kind for kind in ENDS if kind in only]:
        how = stop_ray if kind == "ray stop" else kill
        times = [until_all_gone(how, cluster.address) for _ in range(1 if kind == "ray stop" else rounds)]
        print(f"| {kind} | all gone after {statistics.median(times):.2f} | | |", flush=True)


def main() -> None:
    """Entry point: starts itself again in a PID namespace, whose first process, a shell, collects what ends there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(KINDS + ENDS), help="kinds of failure, separated by commas")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    only = options.only.split(",")
    if unknown := set(only) - {*KINDS, *ENDS}:
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(KINDS + ENDS)}")
    if options.inside:
        measure(options.rounds, only)
        return
    with tempfile.TemporaryDirectory(prefix="bps-ray-") as folder:
        env = os.environ | {
            "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0",
            "RAY_raylet_start_wait_time_s": "120", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])),
        }  # fmt: skip
        again = [sys.executable, __file__, "--inside", "--rounds", str(options.rounds), "--only", options.only]
        command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", '"$@"; exit $?', "-"]
        sys.exit(subprocess.run([*command, *again], env=env, cwd=folder, check=False).returncode)


if __name__ == "__main__":
    main()
