# SPDX-License-Identifier: Apache-2.0
"""`python -m bps_rdma.megatron pretrain_gpt.py ...` runs an unchanged script of Megatron's with the flags of bps_rdma.

Start it as that script is started: `torchrun ... -m bps_rdma.megatron pretrain_gpt.py ... --use-bps`. Without
one of the flags Megatron is not changed.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

from bps_rdma import extras
from bps_rdma.errors import BpsError, InvalidArgumentError
from bps_rdma.megatron.adapter import enable
from bps_rdma.megatron.arguments import FLAGS, canonical, extend_parser, extend_yaml, name_of
from bps_rdma.terminal import print_error


def main(arguments: list[str] | None = None) -> None:
    """Entry point; `arguments` are the script and its own, by default this process's."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if not extras.is_installed("megatron.core"):
            raise InvalidArgumentError("megatron-core is not installed", extras.install_command("megatron.core"))
        if not arguments or arguments[0].startswith("-"):
            raise InvalidArgumentError(
                "the script to run is missing", "python -m bps_rdma.megatron pretrain_gpt.py [its arguments] [flags]"
            )
        script = Path(arguments[0])
        if not script.is_file():
            raise InvalidArgumentError(
                f"the script {script} does not exist", "name Megatron's pretrain_gpt.py, or your own"
            )
        sys.argv = arguments
        sys.path.insert(0, str(script.resolve().parent))
        _switch_on(arguments)
    except BpsError as error:
        _give_up(error)
    runpy.run_path(str(script), run_name="__main__")


def _switch_on(arguments: list[str]) -> None:
    """Enables at once, for scripts with a parser of their own, and again with what Megatron's own parser finds."""
    wanted = {name_of(flag): True for flag in map(canonical, arguments) if flag in FLAGS}

    def look(options: Any) -> None:
        for name in wanted:
            setattr(options, name, True)  # a YAML file may have replaced the command line
        try:
            enable(options)
        except BpsError as error:
            _give_up(error)

    by_file = any(word.split("=")[0] == "--yaml-cfg" for word in arguments)
    if not (wanted or by_file):
        return
    known = extend_parser(look)
    if known and by_file:
        extend_yaml(look)
    if not known:
        sys.argv = [word for word in arguments if canonical(word) not in FLAGS]
    if wanted:
        enable(**{name: name in wanted for name in map(name_of, FLAGS)})


def _give_up(error: BpsError) -> NoReturn:
    print_error(error.message, error.hint)
    sys.exit(1)


if __name__ == "__main__":
    main()
