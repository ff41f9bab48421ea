# SPDX-License-Identifier: Apache-2.0
"""Writes what a tool shows beside its table: files, checked before anything is measured, and progress."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bps_rdma.errors import InvalidArgumentError

PLOT_FORMATS = (".png", ".svg", ".pdf")
_LINE_SECONDS = 10.0  # between two lines of progress where there is no terminal


def check_outputs(json_file: Path | None, plot: Path | None) -> None:
    """Raises InvalidArgumentError, before hours of measuring, for files that could not be written after them."""
    for path in (json_file, plot):
        if path is not None and str(path) != "-":
            _check_file(path)
    if plot is not None and plot.suffix.lower() not in PLOT_FORMATS:
        raise InvalidArgumentError(
            f"--plot {plot} has no known format", f"end its name with one of {', '.join(PLOT_FORMATS)}"
        )


def _check_file(path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InvalidArgumentError(f"the folder {folder} does not exist", "create it, or choose another file")
    if path.is_dir():
        raise InvalidArgumentError(f"{path} is a folder", "name a file in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidArgumentError(f"{path} cannot be written", "choose another file, or change its permissions")


def wrote(path: Path) -> None:
    """Says on standard error where a result is."""
    print(f"wrote {path}", file=sys.stderr)


@contextlib.contextmanager
def progress(announcement: str) -> Iterator[Callable[[str, float], None]]:
    """Shows on standard error what is being measured, and which share of it is done.

    On a terminal this is a bar. Elsewhere it is the announcement, what is measured and how long it takes, and a line
    every ten seconds.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    print(announcement, file=sys.stderr, flush=True)
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines().tell
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


class _Lines:
    """Progress as lines of text."""

    def __init__(self) -> None:
        self._begin = self._last = time.monotonic()

    def tell(self, what: str, share: float) -> None:
        """Prints a line, unless the last one is less than ten seconds old."""
        now = time.monotonic()
        if now - self._last >= _LINE_SECONDS:
            self._last = now
            print(f"{share:.0%} after {now - self._begin:.0f} s: {what}", file=sys.stderr, flush=True)
