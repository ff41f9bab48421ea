# SPDX-License-Identifier: Apache-2.0
"""The actors of a job: a RankActor calls the training function, a HelperActor runs `bps-server` or `bps-scheduler`.

They are plain classes; members.py makes actors of them. An actor runs its methods one after the other, in the main
thread of a process of its own.

A scheduler is started so that another one, in another actor, can take its place. The next one has to know which run of
the job it may take over. A scheduler keeps that in a file (BPS_SCHEDULER_STATE), which would stay behind on the node
when the actor is killed. The driver therefore keeps its text, with which it also ends, and the file exists only while a
scheduler starts. The text is no secret.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.cloudpickle

from bps_rdma import files, job
from bps_rdma.errors import BpsError
from bps_rdma.launch.environment import find_binary, free_port
from bps_rdma.launch.run import STEPPED_DOWN, TERMINATED
from bps_rdma.ray.errors import RayError, ServerEndedError, StartError
from bps_rdma.ray.placement import adopt


@dataclass(frozen=True)
class Whereabouts:
    """The place where an actor runs: its host, its process, and a port that is free there."""

    host: str
    pid: int
    port: int


class MemberActor:
    """The base class of all actors of a job. `label`, such as "rank 1", stands before what an actor prints."""

    def __init__(self, label: str) -> None:
        self.label = label

    def __repr__(self) -> str:
        return self.label

    def whereabouts(self) -> Whereabouts:
        """Returns where this actor runs."""
        return Whereabouts(ray.util.get_node_ip_address(), os.getpid(), free_port(""))

    def adopt(self, env: Mapping[str, str]) -> None:
        """Take on an identity, before anything has read the environment."""
        adopt(env)


class RankActor(MemberActor):
    """One rank."""

    def run(self, pickled: bytes) -> Any:
        """Call the function with its argument, both pickled; then leave the job, if the function has not."""
        try:
            function, argument = ray.cloudpickle.loads(pickled)
        except Exception as error:
            raise StartError(
                f"the training function cannot be loaded here: {type(error).__name__}: {error}",
                "make its modules importable on every node: an installed package, PYTHONPATH, or "
                "run(..., runtime_env={'working_dir': ...})",
            ) from error
        try:
            result = function(argument)
        except SystemExit as exit_:
            if exit_.code:
                handled = exit_.__context__
                if isinstance(handled, BpsError):  # the script has printed it before it gave up
                    raise handled from None
                ended = RayError(f"{self.label} ended with sys.exit({exit_.code!r}), or by SIGTERM")
                job.report_exception(ended)
                raise ended from exit_
            result = None
        except BaseException as error:
            job.report_exception(error)  # or the others would wait for BPS_TIMEOUT: this process lives on
            raise
        job.shutdown()
        return result


class HelperActor(MemberActor):
    """A process that belongs to no rank."""

    _scheduler: subprocess.Popen[bytes] | None = None

    def start_scheduler(self, known: bytes | None) -> bytes | None:
        """Start `bps-scheduler`, for which serve() then waits."""
        self._scheduler, known = start_scheduler(known)
        return known

    def serve(self, role: str) -> None:
        """Run the plain binary of a role until it ends; it does not outlive this call, nor this process.

        It stays in the process group of the actor, which Ray kills with the actor.
        """
        child = self._scheduler or subprocess.Popen([find_binary(f"bps-{role}")], stdin=subprocess.DEVNULL)
        try:
            status = child.wait()
        finally:
            child.kill()
        if status < 0 or status == TERMINATED:
            number = -status if status < 0 else status - 128
            raise ServerEndedError(f"bps-{role} was killed by signal {number}", killed=True)
        if status == STEPPED_DOWN:
            raise ServerEndedError(f"bps-{role} was stopped for too long", killed=True)
        if status:
            raise ServerEndedError(f"bps-{role} ended with status {status}; its output says why", killed=False)


_LOOK_S = 0.01
_STARTS_S = 30.0
_PREDECESSOR_ENDS_S = 5.0  # the raylet kills it when it has noticed the end of its actor


def start_scheduler(known: bytes | None) -> tuple[subprocess.Popen[bytes], bytes | None]:
    """Start the scheduler that this process's environment describes.

    Args:
        known: the text of the scheduler in whose place it starts; None: it is the first of its job.

    Returns:
        The process, and the text for the next one: None if the job ends with its scheduler, or this one did not start.
    """
    command = [find_binary("bps-scheduler")]
    if "BPS_MIN_WORKERS" not in os.environ:  # the job ends with its scheduler
        return subprocess.Popen(command, stdin=subprocess.DEVNULL), None
    with tempfile.TemporaryDirectory(prefix="bps-ray-") as folder:
        file = Path(folder, "scheduler")
        if known is not None:
            with files.replacing(file, 0o600) as out:
                out.write(known)
            deadline = time.monotonic() + _PREDECESSOR_ENDS_S
            while _listens() and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
        environment = os.environ | {"BPS_SCHEDULER_STATE": str(file)}
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
        deadline = time.monotonic() + _STARTS_S
        # It reads or makes the file before. The members that wait for the job to start find one that never listens.
        while child.poll() is None and not _listens() and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return child, known if known is not None else file.read_bytes() if file.exists() else None


def _listens() -> bool:
    """Returns whether the scheduler listens. A connection that says nothing costs it nothing."""
    try:
        socket.create_connection((os.environ["BPS_ROOT_URI"], int(os.environ["BPS_ROOT_PORT"])), 1.0).close()
    except OSError:
        return False
    return True
