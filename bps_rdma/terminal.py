# SPDX-License-Identifier: Apache-2.0
"""Shared by all commands: printing errors, and running a command line."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from bps_rdma.errors import BpsError, InvalidArgumentError

if TYPE_CHECKING:
    import typer
    from rich.console import Console


def print_error(message: str, hint: str = "") -> None:
    """Write `error: ...` and `hint: ...` to standard error, in colour on a terminal unless NO_COLOR is set."""
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    for word, colour, text in (("error", 31, message), ("hint", 36, hint)):
        if text:
            label = f"\x1b[1;{colour}m{word}:\x1b[0m" if coloured else f"{word}:"
            print(label, text, file=sys.stderr)
    sys.stderr.flush()


def wide_console() -> Console:
    """A rich console on standard output. A pipe counts as 160 columns wide, so that tables are not wrapped."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=160)


def run_app(app: typer.Typer, name: str) -> NoReturn:
    """Run `app` on this process's arguments and exit.

    The exit status is 0 or what the command returns, 1 for an error of the library, 2 for an invalid command line or
    setting, 130 after Ctrl-C. A user's mistake never prints a traceback.
    """
    import typer

    # The base class of all errors about the command line. Its module differs between versions of typer.
    usage_error: Any = typer.BadParameter.__mro__[2]
    status: object = 1
    try:
        status = typer.main.get_command(app).main(prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except BpsError as error:
        print_error(error.message, error.hint)
        status = 2 if isinstance(error, InvalidArgumentError) else 1
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except usage_error as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            print(error.format_message())
            sys.exit(2)
        print_error(error.format_message(), f"`{name} --help` lists the options")
        status = 2
    sys.exit(status if isinstance(status, int) else 0)
