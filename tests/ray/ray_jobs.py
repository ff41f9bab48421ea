# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the tests do, and what must not be left of them."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import PATIENCE, eventually, shared_memory_files

_OURS = ("bps-server", "bps-scheduler", "ray::rank", "ray::server", "ray::scheduler", "ray::Rank", "ray::Helper")


def processes() -> dict[int, str]:
    """The members of jobs that run now on our cluster, by process id; their output goes to its logs."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if not str((folder / "fd/1").readlink()).startswith(os.environ["RAY_TMPDIR"]):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if command.startswith(("ray::", "bps-")) or "/bps-" in command.split(" ")[0]:
                found[int(folder.name)] = command.strip()
    return {pid: text for pid, text in found.items() if any(sign in text for sign in _OURS)}


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if processes or segments of a job are still there shortly after the block."""
    before, shared = processes(), shared_memory_files()
    yield

    def left() -> list[str]:
        return [text for pid, text in processes().items() if pid not in before] + sorted(shared_memory_files() - shared)

    eventually(left, what="the end of all", until=lambda found: not found)


def await_nodes(cluster: Any) -> None:
    """Until Ray knows that nodes which an earlier test took away are dead: it counts their missed answers."""
    import ray

    def known() -> set[str]:
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]}

    there = {node.node_id for node in cluster.list_all_nodes()}
    eventually(known, 90, f"that Ray knows {there} alone", until=lambda found: found == there)  # it takes about 15 s


def await_room() -> None:
    """Until Ray tells that all processors are free: it learns late of the end of an earlier test's job."""
    import ray

    def are_free(available: dict[str, float]) -> bool:
        return available.get("CPU") == ray.cluster_resources()["CPU"]

    eventually(ray.available_resources, 30, "that all processors are free", until=are_free)


def of(pid: int, name: str) -> int:
    """The process of this name that `pid` is the parent of."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (found,) = [int(c) for c in children if Path(f"/proc/{c}/comm").read_text().strip() == name]
    return found


def sums(rounds: int) -> dict[str, Any]:
    """Sums, and tells where it ran."""
    import numpy as np

    import bps_rdma

    bps_rdma.init()
    x = bps_rdma.empty(10_000)
    for _ in range(rounds):
        x[:] = bps_rdma.rank() + 1
        bps_rdma.push_pull_inplace(x, name="x", average=False)
        assert np.all(x == sum(range(1, bps_rdma.size() + 1)))
    import ray

    return {
        "rank": bps_rdma.rank(), "size": bps_rdma.size(), "local": (bps_rdma.local_rank(), bps_rdma.local_size()),
        "env": dict(os.environ), "node": ray.get_runtime_context().get_node_id(), "pid": os.getpid(),
        "routes": bps_rdma.metrics()["transports"],
    }  # fmt: skip


def looks_for_its_secret(_: Any) -> dict[str, Any]:
    """While the job runs: in the command lines of all processes; and what Ray keeps of the environment."""
    import numpy as np
    import ray

    import bps_rdma

    bps_rdma.init()
    bps_rdma.push_pull(np.ones(10), name="x")
    secret = os.environ["BPS_SECRET"]
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if secret.encode() in file.read_bytes():
                found.append(str(file))
    bps_rdma.barrier()
    runtime_env = ray.get_runtime_context().get_runtime_env_string()
    return {"secret": secret, "in_command_lines": found, "runtime_env": runtime_env}


def files_with(text: str) -> list[str]:
    """What Ray has written to its folder and has this text in it: logs, events, sessions."""
    found = []
    for folder, _, names in os.walk(os.environ["RAY_TMPDIR"]):
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(OSError):
                if path.is_file() and text.encode() in path.read_bytes():
                    found.append(str(path))
    return found


def await_text(text: str) -> None:
    """Until Ray has written it; what was told before that is then written, too."""
    eventually(lambda: files_with(text), 30, f"a file with {text!r}")


def meets_an_end(config: dict[str, Any]) -> list[float]:
    """Takes steps whose sums say how far the job is; in the first start, one rank meets an end after some steps.

    It saves each step in its folder and goes on from the last one. It writes down when ranks learn of the end, and when
    the next start has taken a step.
    """
    try:
        return takes_steps(config)
    except Exception:
        note(Path(config["folder"]) / f"knew-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}")
        raise


def plan(folder: Path, end: str, rank: int = 1) -> dict[str, Any]:
    """The argument of meets_an_end()."""
    return {"folder": str(folder), "steps": 6, "at": 3, "rank": rank, "end": end}


def undisturbed(folder: Path, ranks: int = 2) -> list[float]:
    """What every rank of meets_an_end() returns."""
    import bps_rdma.ray

    folder.mkdir()
    found = bps_rdma.ray.run(meets_an_end, plan(folder, "", rank=-1), hosts=ranks)
    assert all(one == found[0] for one in found)
    return found[0]


def note(file: Path) -> None:
    """Writes down when something happened."""
    whole = file.with_name(f".{file.name}")
    whole.write_text(repr(time.time()))
    whole.rename(file)


def noted(file: Path) -> float:
    return float(file.read_text())


def takes_steps(config: dict[str, Any]) -> list[float]:
    import numpy as np

    import bps_rdma

    bps_rdma.init()
    rank, first = bps_rdma.rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    saved = Path(config["folder"]) / f"rank-{rank}.npy"
    weights = np.load(saved) if saved.exists() else np.zeros(1000)
    # A rank may have died between the others' saving and its own: all go on from the earliest.
    begun = int(bps_rdma.push_pull(np.array([weights[0]]), op="min", name="begun", average=False)[0])
    history = np.load(saved.with_suffix(".history.npy"))[:begun] if begun else np.zeros(0)
    weights[:] = begun
    for step in range(begun, config["steps"]):
        if first and rank == config["rank"] and step == config["at"]:
            note(Path(config["folder"]) / "happened")
            end(config["end"])
        found = bps_rdma.push_pull(np.random.default_rng([step, rank]).random(1000), name="x", timeout=60 * PATIENCE)
        if not first and step == begun:
            note(Path(config["folder"]) / f"went-on-{rank}")
        history = np.append(history, found.sum())
        weights[:] = step + 1
        np.save(saved.with_suffix(".history.npy"), history)
        np.save(saved, weights)
    return [float(value) for value in history]


def survives(config: dict[str, Any]) -> dict[str, Any]:
    """One member meets an end in step 3; the others go on until 5 steps were taken by as many ranks as they expect."""
    import numpy as np

    import bps_rdma

    bps_rdma.init()
    happened = Path(config["folder"]) / "happened"
    step, in_view, sizes, texts = 0, 0, [], []
    while True:
        try:
            if in_view == 0:  # the members are new: those who enter learn how far the others are
                step = int(bps_rdma.push_pull(np.array([float(step)]), op="max", name="step")[0])
                sizes.append(bps_rdma.size())
            if step == 3 and bps_rdma.rank() == config["rank"] and not happened.exists():
                happened.write_text(repr(time.time()))
                end(config["end"])
            size = bps_rdma.size()
            total = bps_rdma.push_pull(np.full(1000, bps_rdma.rank() + 1.0), name="x", average=False)
            assert np.all(total == size * (size + 1) / 2), (total, size)
            bps_rdma.commit()
        except bps_rdma.RoundAbortedError as error:
            texts.append(str(error))
            in_view = 0
            continue
        step += 1
        in_view += 1
        if step > 3 and size == config["last"] and in_view >= 5:
            return {"rank": bps_rdma.rank(), "sizes": sizes, "texts": texts, "pid": os.getpid()}


def is_late_for_a_barrier(_: Any) -> str | None:
    """Rank 1 does not come; what rank 0 is told."""
    import numpy as np

    import bps_rdma

    bps_rdma.init()
    said = None
    if bps_rdma.rank() == 0:
        try:
            bps_rdma.barrier(timeout=0.5)
        except bps_rdma.DeadlineError as error:
            said = str(error)
    bps_rdma.push_pull(np.ones(1), name="afterwards")
    return said


def never_joins(_: Any) -> None:
    end("stop" if os.environ["RANK"] == "1" else "hang")


def end(how: str) -> None:
    if how == "raise":
        raise ValueError("no such sample")
    if how == "exit":
        raise SystemExit(3)
    if how == "hang":
        time.sleep(600)
    if how in ("server", "scheduler"):
        (pid, *_) = [pid for pid, text in processes().items() if f"bps-{how}" in text.split(" ")[0]]
        os.kill(pid, signal.SIGKILL)
        return
    if how == "scheduler's actor":
        (pid, *_) = [pid for pid, text in processes().items() if "bps-scheduler" in text.split(" ")[0]]
        os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        eventually(lambda: pid not in processes())  # Ray kills it when it has noticed the end of the actor
        return
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[how])
    time.sleep(60)
