# SPDX-License-Identifier: Apache-2.0
"""The actors of a job: a Rank calls the training function, a Helper runs `bps-server` or `bps-scheduler`.

They are plain classes; group.py makes actors of them. Actors run their methods one after the other, in the main thread
of a process of their own.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
import ray.cloudpickle

from bps_rdma import job
from bps_rdma.errors import BpsError
from bps_rdma.launch.environment import find_binary, free_port
from bps_rdma.launch.run import STEPPED_DOWN, TERMINATED
from bps_rdma.ray.environment import adopt
from bps_rdma.ray.errors import RayError, ServerEndedError, StartError
from bps_rdma.ray.scheduler_run import start_scheduler


@dataclass(frozen=True)
class Whereabouts:
    """Of an actor: its host, process, and a port that is free there."""

    host: str
    pid: int
    port: int


class Member:
    """What all actors of a job have in common. `label`, such as "rank 1", stands before what it prints."""

    def __init__(self, label: str) -> None:
        self.label = label

    def __repr__(self) -> str:
        return self.label

    def whereabouts(self) -> Whereabouts:
        """Where this actor is."""
        return Whereabouts(ray.util.get_node_ip_address(), os.getpid(), free_port(""))

    def adopt(self, env: Mapping[str, str]) -> None:
        """Take on an identity, before anything has read the environment."""
        adopt(env)


class Rank(Member):
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
                if isinstance(handled, BpsError):  # which a script has printed before it gives up
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


class Helper(Member):
    """A process that belongs to no rank."""

    _scheduler: subprocess.Popen[bytes] | None = None

    def start_scheduler(self, known: bytes | None) -> bytes | None:
        """Start `bps-scheduler`, for which serve() then waits; see scheduler_run.start_scheduler()."""
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
