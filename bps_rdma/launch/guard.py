# SPDX-License-Identifier: Apache-2.0
"""Kills the processes of a launcher when the launcher itself has been killed, and removes its folder.

process.py runs this script in a session of its own. It reads `+GROUP`, `-GROUP` and `/FOLDER` lines from standard
input. Standard input ends when the launcher ends, for whatever reason. The guard then kills the remaining process
groups and removes what is left of the folder. The parent-death signal that process.py sets is not enough: it reaches
direct children only, and a rank that was started through a shell script is a grandchild.

The script imports only the standard library and runs with -I -S, so that it starts within some ten milliseconds.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    """Read the launcher's lines until it has ended, then kill the remaining groups."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the guard must outlive the launcher
    groups: set[int] = set()
    folders: list[str] = []
    for line in sys.stdin:
        if line[0] == "/":
            folders.append(line[1:-1])
            continue
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for folder in folders:
        with contextlib.suppress(OSError):  # the launcher has removed it itself
            for file in Path(folder).iterdir():
                file.unlink()
            Path(folder).rmdir()


if __name__ == "__main__":
    main()
