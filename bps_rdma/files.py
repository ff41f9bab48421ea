# SPDX-License-Identifier: Apache-2.0
"""Files in folders that other users may write, as /tmp is; csrc/core/files.h is the same for the native part.

Another user can put something there before, under the name that a process is about to use: a symbolic link to a file of
this user, a FIFO that holds up the process that opens it, a file that the other user reads or changes later.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from bps_rdma.errors import InvalidArgumentError

_HINT = "somebody else may have put it there: remove it, or name another folder"


def read_text(path: Path) -> str:
    """The text of a regular file, which a link may lead to.

    Raises:
        InvalidArgumentError: it is something else, which reading could wait for.
        OSError: it cannot be read.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(file, encoding="utf-8") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise InvalidArgumentError(f"{path} is not a regular file", _HINT)
        return opened.read()


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file, which replaces one of its name at the end of the block; after an error the new file is gone."""
    with _new(path, mode) as (part, out):
        yield out
        out.flush()
        part.replace(path)


def keep_first(path: Path, content: bytes, mode: int) -> None:
    """Makes a file that appears whole, for other hosts too, unless something has its name already."""
    with _new(path, mode) as (part, out):
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(part, path)


@contextlib.contextmanager
def output(path: Path) -> Iterator[BinaryIO]:
    """A file that the user has named, written in place: a device too, or a link or a FIFO of this user or of root.

    Raises:
        InvalidArgumentError: another user has put it there.
        OSError: it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY
    try:
        found = path.lstat()
    except FileNotFoundError:
        flags |= os.O_EXCL
    else:
        _check_owner(path, found)
        if not stat.S_ISLNK(found.st_mode) and not stat.S_ISFIFO(found.st_mode):
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK  # it may have been replaced
    file = os.open(path, flags, 0o666)
    with os.fdopen(file, "wb") as out:
        os.set_blocking(file, True)
        if stat.S_ISREG(os.fstat(file).st_mode):
            os.ftruncate(file, 0)
        yield out


@contextlib.contextmanager
def _new(path: Path, mode: int) -> Iterator[tuple[Path, BinaryIO]]:
    """A file under a name that nobody knows, with its name, which it loses at the end."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(file, "wb") as out:
            yield part, out
    finally:
        part.unlink(missing_ok=True)


def _check_owner(path: Path, found: os.stat_result) -> None:
    """A network file system may give the files of this user to another one: then those of that one are ours."""
    if found.st_uid in (os.geteuid(), 0):
        return
    with contextlib.suppress(OSError), _new(path, 0o600) as (_, probe):
        if os.fstat(probe.fileno()).st_uid == found.st_uid:
            return
    raise InvalidArgumentError(f"{path} belongs to user {found.st_uid}, not to user {os.geteuid()}", _HINT)
