# SPDX-License-Identifier: Apache-2.0
"""What runs in the processes of a test's job; see job.py."""

import atexit
import faulthandler
import os
import pickle
import runpy
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .waiting import eventually

_rank = -1


def run_rank(body: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], folder: str, rank: int,
             init: bool) -> None:  # fmt: skip
    """Process entry: becomes rank `rank`, calls the body, leaves its result in the folder."""
    global _rank
    _rank = rank
    _enter(env, Path(folder) / f"rank-{rank}.log")
    value, error = None, ""
    try:
        import bps_rdma

        if init:
            bps_rdma.init()
        value = getattr(body, "on_each_rank", body)(bps_rdma, *args)  # of a test that on_ranks() has made
        _leave_process_group(bps_rdma)
        if init:
            bps_rdma.shutdown()
    except BaseException:
        error = traceback.format_exc()
    _leave(Path(folder) / f"rank-{rank}.pickle", (value, error))


def _leave_process_group(bps: Any) -> None:
    """Ends torch.distributed for a body that has begun it and returned, and the job that it has begun beside gloo."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        if distributed.get_backend() == "gloo":
            bps.shutdown()  # no rank ends its group while another one still joins over it
        distributed.destroy_process_group()


def run_server(env: dict[str, str], folder: str, index: int) -> None:
    """Process entry: a dedicated server, like bps-server, whose counters can be read afterwards."""
    _enter(env, Path(folder) / f"server-{index}.log")
    from bps_rdma import _core

    config = _core.Config()
    startup = _core.Startup()
    startup.server_rank = index
    startup.workers = config.integer("BPS_NUM_WORKERS")
    startup.servers = config.integer("BPS_NUM_SERVERS")
    startup.scheduler_ports = [config.integer("BPS_ROOT_PORT")]
    startup.job = config.text("BPS_JOB_ID")
    process = _core.Process.start(config, startup, _core.Stop())
    process.wait_for_end()
    _leave(Path(folder) / f"server-{index}.pickle", dict(process.metrics()))
    process.shutdown(1)


def _enter(env: dict[str, str], log: Path) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell's background job has it ignored
    for deprecated in (DeprecationWarning, FutureWarning):  # as in pyproject.toml
        warnings.filterwarnings("error", category=deprecated, module="bps_rdma")


def _leave(path: Path, value: object) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(pickle.dumps(value))
    part.rename(path)


# ---- For bodies


def mark(name: str) -> None:
    """Tells the test that this rank has come so far."""
    (Path(os.environ["BPS_TEST_FOLDER"]) / f"mark-{_rank}-{name}").touch()


def is_marked(name: str, by: int | str = "test") -> bool:
    """Whether the test has called set_mark(name), or that rank mark(name)."""
    return (Path(os.environ["BPS_TEST_FOLDER"]) / f"mark-{by}-{name}").exists()


def is_interrupted(call: Callable[[], object]) -> None:
    """Makes a call that waits until the test interrupts it: see Job.interrupt(), and the option of run()."""
    mark("waiting")
    try:
        call()
    except KeyboardInterrupt:
        mark("interrupted")
    else:
        raise AssertionError("the call was not interrupted")


def await_mark(name: str, *ranks: int, timeout: float = 60) -> None:
    """Waits until the test has called set_mark(name), or these ranks mark(name)."""
    for by in ranks or ("test",):
        eventually(lambda by=by: is_marked(name, by), timeout, f"{name!r}, a mark of {by}")


# ---- Scripts


def run_script(_: Any, words: tuple[str, ...], folder: str, unset: tuple[str, ...]) -> tuple[int, str, str]:
    """Body of harness.scripts(): is `python words...` from here on; its status, output and errors."""
    for name in unset:
        os.environ.pop(name, None)
    os.chdir(folder)
    here = Path(os.environ["BPS_TEST_FOLDER"])
    streams = [here / f"script-{_rank}.{name}" for name in ("out", "err")]
    for number, stream in enumerate(streams, start=1):
        file = os.open(stream, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    status: Any = 0
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            sys.path.insert(0, "")
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status, *(stream.read_text() for stream in streams)
