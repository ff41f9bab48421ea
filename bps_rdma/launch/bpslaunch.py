# SPDX-License-Identifier: Apache-2.0
"""`bpslaunch`: BytePS's launcher. DMLC_ROLE is the role of this machine; scripts and variables need no change.

A worker machine runs the command BYTEPS_LOCAL_SIZE times, each with its BYTEPS_LOCAL_RANK. Servers and the scheduler
need no command: this process becomes `bps-server` or `bps-scheduler`. These count worker processes, so they also need
BYTEPS_LOCAL_SIZE when a worker machine runs more than one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from bps_rdma.errors import BpsError, InvalidArgumentError
from bps_rdma.launch.environment import find_binary
from bps_rdma.launch.process import Children, exit_status
from bps_rdma.launch.run import Interrupted, signals_raise
from bps_rdma.terminal import print_error

USAGE = """\
usage: bpslaunch COMMAND...      with DMLC_ROLE=worker
       bpslaunch                 with DMLC_ROLE=server or scheduler

  Needs DMLC_ROLE, DMLC_NUM_WORKER, DMLC_NUM_SERVER, DMLC_PS_ROOT_URI and
  DMLC_PS_ROOT_PORT.
  With several worker machines, workers also need DMLC_WORKER_ID.
  BYTEPS_LOCAL_SIZE: processes per worker machine; default: one per
  visible GPU, or one.

example: DMLC_ROLE=worker DMLC_NUM_WORKER=1 DMLC_NUM_SERVER=1 \\
           DMLC_PS_ROOT_URI=127.0.0.1 DMLC_PS_ROOT_PORT=9010 \\
           bpslaunch python train.py

exit status: that of the first process that failed;
             1: nothing was started; 2: a variable or the command is missing."""

_REQUIRED = ("DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command `bpslaunch`; `arguments`: by default those of this process."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return
    try:
        sys.exit(launch(arguments, os.environ))
    except BpsError as error:
        print_error(error.message, error.hint)
        sys.exit(2 if isinstance(error, InvalidArgumentError) else 1)


def launch(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Start what `env` asks for; returns the exit status. Does not return for a server or the scheduler.

    Raises InvalidArgumentError when a variable or the command is missing, BpsError for a binary.
    """
    role = env.get("DMLC_ROLE", "")
    if role not in ("worker", "server", "scheduler"):
        raise InvalidArgumentError(f"DMLC_ROLE={role!r} is not a role", "set DMLC_ROLE to worker, server or scheduler")
    needed = [*_REQUIRED]
    if role == "worker" and env.get("DMLC_NUM_WORKER", "1") != "1":
        needed.append("DMLC_WORKER_ID")
    if missing := [name for name in needed if not env.get(name)]:
        raise InvalidArgumentError(f"unset variables: {', '.join(missing)}", f"a {role} needs {', '.join(needed)}")
    if role != "worker":
        binary = find_binary(f"bps-{role}")
        os.execve(binary, [binary], dict(env))  # noqa: S606  # signals and the exit status are then the role's own
    if not command:
        raise InvalidArgumentError("a worker needs a command to run", "give one, as in `bpslaunch python train.py`")
    return _run_workers(command, env, local_size(env))


def local_size(env: Mapping[str, str]) -> int:
    """Worker processes on this machine: BYTEPS_LOCAL_SIZE, else one per visible GPU, else 1.

    Raises InvalidArgumentError when BYTEPS_LOCAL_SIZE is no such number.
    """
    if text := env.get("BYTEPS_LOCAL_SIZE"):
        if not text.isdecimal() or int(text) == 0:
            raise InvalidArgumentError(
                f"BYTEPS_LOCAL_SIZE={text!r} is not a positive number", "set it to 1 or more, or unset it"
            )
        return int(text)
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        if devices := env.get(name):
            # "all", "none" and "void" are values of the container runtime that contain no number.
            return 1 if devices in ("all", "none", "void") else len(devices.split(","))
    return 1


def _run_workers(command: Sequence[str], env: Mapping[str, str], size: int) -> int:
    with signals_raise(), Children() as children:
        try:
            for rank in range(size):
                ours = {"BYTEPS_LOCAL_RANK": str(rank), "BYTEPS_LOCAL_SIZE": str(size)}
                children.spawn(f"local rank {rank}", command, {**env, **ours})
            while children.running:
                for child in children.wait():
                    if child.status:
                        print_error(
                            child.describe_end(),
                            "the other local ranks are terminated",
                        )
                        children.stop(signal.SIGTERM)
                        return exit_status(child.status)
        except Interrupted as interrupted:
            children.stop(interrupted.signum)
            return 128 + interrupted.signum
    return 0


if __name__ == "__main__":
    main()
