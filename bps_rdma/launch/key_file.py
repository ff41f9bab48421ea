# SPDX-License-Identifier: Apache-2.0
"""The secret of this user, in the home directory, for jobs on several hosts that share it.

The core keeps the same file for jobs on one host where there is no runtime directory (csrc/node/secret_file.cc). Both
make it in the same way: it appears whole or not at all, and the first process makes it, also on a network file system.
It stays, like a key of ssh: the handshake mixes the name of the job into it.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from bps_rdma import files
from bps_rdma.errors import InvalidArgumentError

_HINT = "or set BPS_SECRET_FILE to a file of your own that all hosts see (openssl rand -hex 32 > FILE; chmod 600 FILE)"


def shared_key_file() -> Path:
    """The path of the file, which is there afterwards and private to this user.

    Raises:
        InvalidArgumentError: it cannot be made, or others can use it or its folder.
    """
    try:
        folder = Path.home() / ".config" / "bps_rdma"
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_private(folder, stat.S_ISDIR)
        path = folder / "secret"
        if not os.path.lexists(path):
            files.keep_first(path, secrets.token_hex(32).encode() + b"\n", 0o600)
        _check_private(path, stat.S_ISREG)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        raise InvalidArgumentError(
            f"this job runs on several hosts, and its secret cannot be kept in the home directory: {error}",
            f"make ~/.config/bps_rdma writable, {_HINT}",
        ) from None
    return path


def _check_private(path: Path, right_kind: Callable[[int], bool]) -> None:
    found = path.lstat()
    if not right_kind(found.st_mode):
        raise InvalidArgumentError(f"{path} is a link, or not what it should be", f"remove it, {_HINT}")
    if found.st_uid != os.geteuid():
        raise InvalidArgumentError(
            f"{path} belongs to user {found.st_uid}, not to user {os.geteuid()}", f"remove it, {_HINT}"
        )
    if found.st_mode & 0o077:
        raise InvalidArgumentError(
            f"{path} can be used by other users: its mode is {stat.S_IMODE(found.st_mode):04o}",
            f"chmod go= {path}, and make a new secret if others may have read this one; {_HINT}",
        )
