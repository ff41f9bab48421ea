# SPDX-License-Identifier: Apache-2.0
"""`python -m bps_rdma.torch.run script.py ...` runs a script whose framework chooses the backend by itself.

    torchrun --nproc-per-node 2 -m bps_rdma.torch.run script.py --its options
    torchrun --nproc-per-node 2 -m bps_rdma.torch.run -m package.module --its options

The process group is there before the script begins, on the backend `bps`. Frameworks that find one use it. A call of
init_process_group() has no effect; once a script has destroyed the group, its next call makes one on `bps` again.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import logging
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

import bps_rdma.torch  # noqa: F401  # registers the backend
from bps_rdma.errors import BpsError, InvalidArgumentError
from bps_rdma.terminal import print_error

_OURS = (__file__, runpy.__file__, "<frozen runpy>")  # where frames lie that are no part of a script's traceback
_log = logging.getLogger("bps_rdma")


def main(arguments: list[str] | None = None) -> None:
    """Entry point; `arguments` are the script and its own, by default this process's."""
    parser = argparse.ArgumentParser(
        "python -m bps_rdma.torch.run", description="Run a script on a process group of the backend bps."
    )
    parser.add_argument("-m", action="store_true", dest="is_module", help="the script is the name of a module")
    parser.add_argument(
        "--backend", default="bps", help="of the process group; cpu:bps,cuda:nccl leaves tensors on GPUs to NCCL"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the script, and its arguments")
    given = parser.parse_args(arguments)
    try:
        _check(given.script, given.is_module)
        make_group(given.backend)
    except BpsError as error:
        _end(error)
    sys.argv = given.script
    sys.excepthook = functools.partial(_show, sys.excepthook)
    if given.is_module and not _exists(given.script[0]):  # only now, because this runs the code of packages
        _end(_no_module(given.script[0]))
    try:
        if given.is_module:
            runpy.run_module(given.script[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(given.script[0], run_name="__main__")
    except SystemExit as end:
        if not end.code:
            _leave()
        raise
    _leave()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _end(error: BpsError) -> NoReturn:
    print_error(error.message, error.hint)
    sys.exit(2 if isinstance(error, InvalidArgumentError) else 1)


def _check(script: list[str], is_module: bool) -> None:
    if not script:
        raise InvalidArgumentError("the script to run is missing", "python -m bps_rdma.torch.run SCRIPT [ARGUMENTS]")
    if is_module:
        _look_first_in(Path.cwd())
        if not _exists(script[0].partition(".")[0]):
            raise _no_module(script[0])
    elif not Path(script[0]).is_file():
        raise InvalidArgumentError(f"there is no file {script[0]!r}", "name a script, or a module after -m")
    else:
        _look_first_in(Path(script[0]).resolve().parent)


def _look_first_in(folder: Path) -> None:
    """Puts the folder where Python has put that of this module, unless it was told not to (`python -P`)."""
    if not getattr(sys.flags, "safe_path", False):  # from 3.11 on
        sys.path[0] = str(folder)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return False
        raise  # one of its packages misses another module


def _no_module(module: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"there is no module {module!r}", "name one that `python -m` would run")


def make_group(backend: str = "bps") -> None:
    """Makes torch's default process group, and lets init_process_group() keep to it.

    Raises:
        InvalidArgumentError: no launcher has started this process.
        Errors of init_process_group().
    """
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise InvalidArgumentError(f"{', '.join(missing)} not set", "start this with torchrun, or with bps run")
    make = dist.init_process_group
    make(backend)

    @functools.wraps(make)
    def keep(*arguments: Any, **options: Any) -> None:
        if not dist.is_initialized():
            make(*(backend, *arguments[1:]), **{name: value for name, value in options.items() if name != "backend"})
        elif arguments or options:
            _log.info("init_process_group() has no effect: bps_rdma.torch.run has made the group")

    for place in (dist, dist.distributed_c10d, dist.device_mesh):
        setattr(place, make.__name__, keep)


def _show(shown: Any, kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
    """Shows an exception of the script as Python would without this module."""
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    shown(kind, value.with_traceback(trace), trace)  # Python shows that of the exception


if __name__ == "__main__":
    main()
