"""Ends what a launcher started when the launcher itself was killed.

Run as a script by process.py, in a session of its own. Reads `+GROUP` and `-GROUP` lines on standard input; at its end,
which comes with the end of the launcher however that ended, the process groups that are left are killed. The death
signal that process.py sets reaches only direct children; a rank started through a shell script is a grandchild.

Imports nothing but the standard library and runs with -I -S, so that starting it costs some ten milliseconds.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Read the launcher's lines until it is gone, then kill what it left."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the guard outlives the launcher, or it is of no use
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
