# SPDX-License-Identifier: Apache-2.0
"""Shared by all commands: printing errors, and running a command line."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from bps_rdma.errors import BpsError, InvalidArgumentError
from bps_rdma.settings import no_text

if TYPE_CHECKING:
    import typer
    from rich.console import Console

_TELL_S = 5.0


def print_error(message: str, hint: str = "") -> None:
    """Write `error: ...` and `hint: ...` to standard error, in colour on a terminal unless NO_COLOR is set."""
    coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    for word, colour, text in (("error", 31, message), ("hint", 36, hint)):
        if text:
            label = f"\x1b[1;{colour}m{word}:\x1b[0m" if coloured else f"{word}:"
            print(label, text, file=sys.stderr)
    sys.stderr.flush()


@contextmanager
def showing_progress() -> Iterator[Callable[[str], None]]:
    """Say on standard error what is waited for: all the time in a line of a terminal, elsewhere every five seconds."""
    on_terminal = sys.stderr.isatty()
    told_at = time.monotonic()

    def show(text: str) -> None:
        nonlocal told_at
        if on_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - told_at > _TELL_S:
            told_at = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if on_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def wide_console(columns: int = 160, *, markup: bool = False) -> Console:
    """A rich console on standard output.

    Args:
        columns: of a pipe, so that tables are not wrapped, unless COLUMNS says otherwise.
        markup: [red] begins a colour. Else it is text: names of users may hold anything.
    """
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # for run_app(), which knows the exit status

    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else columns
    return Ours(width=width, markup=markup, emoji=False)


def closing(*examples: str, status: str = "") -> str:
    """The end of a command's --help: examples of its use, and what its exit status means.

    Args:
        examples: command lines.
        status: what 1 means, and what else there is beside 0, 2 and 130.
    """
    statuses = (
        "0: it worked.",
        f"1: {status or 'it failed; standard error says why.'}",
        "2: the command line, a variable or a file cannot be used.",
        "128 + n: signal n ended it, such as 130 after Ctrl-C.",
    )
    blocks = (("Examples:", examples), ("Exit status:", statuses))
    # \b: click does not wrap the lines that follow.
    return "\n\n".join("\n  ".join((f"\b\n{title}", *lines)) for title, lines in blocks)


def _prepare_standard_streams() -> None:
    """Opens those that are closed, and lets those that take no letter of other languages take its number instead.

    A descriptor that is closed would become that of the next file, to which output would then be written.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # this takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() not in ("utf-8", "utf8"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _without_a_reader() -> int:
    """Discards the output from now on, for its reader, such as `head`, has ended; the status of programs in C then."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
    return 128 + signal.SIGPIPE


def _is_explained(error: OSError) -> bool:
    """Prints an error of a file that the user has named, or for which there is no room; returns whether it is one."""
    if error.filename is not None:
        print_error(f"{error.filename}: {error.strerror}", "name another file, or make room for it")
    elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        _without_a_reader()  # else the rest would be written again at the end of the process
        print_error(f"cannot write: {error.strerror}", "make room, or write elsewhere")
    else:
        return False
    return True


def _path_of(command: Any, name: str, words: Sequence[str]) -> str:
    for word in words:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        name += f" {word}"
    return name


def run_app(app: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `app` on these arguments, by default those of this process, and exit.

    The exit status is 0 or what the command returns, 1 for an error of the library, 2 for an invalid command line or
    setting, 130 after Ctrl-C, 141 where the reader of the output has ended. A user's mistake never prints a traceback.
    """
    import typer

    _prepare_standard_streams()
    # The base class of all errors about the command line. Its module differs between versions of typer.
    usage_error: Any = typer.BadParameter.__mro__[2]
    status: object = 1
    command, given = typer.main.get_command(app), None if arguments is None else list(arguments)
    try:
        status = command.main(given, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except BpsError as error:
        print_error(error.message, error.hint)
        status = 2 if isinstance(error, InvalidArgumentError) else 1
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except BrokenPipeError:
        status = _without_a_reader()
    except SystemExit:
        # click has seen the broken pipe itself, ends with 1, and has put its own object in the place of stdout.
        if type(sys.stdout).__name__ != "PacifyFlushWrapper":
            raise
        status = _without_a_reader()
    except usage_error as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            print(error.format_message())
            sys.exit(2)
        place = getattr(error, "ctx", None)
        path = place.command_path if place else _path_of(command, name, sys.argv[1:] if given is None else given)
        print_error(error.format_message(), f"`{path} --help` lists the options")
        status = 2
    except UnicodeDecodeError:
        refusal = no_text()
        if refusal is None:
            raise
        print_error(refusal.message, refusal.hint)
        status = 2
    except OSError as error:
        if not _is_explained(error):
            raise
    sys.exit(status if isinstance(status, int) else 0)
