# SPDX-License-Identifier: Apache-2.0
"""One process of a job: a program, or a function in a forked process.

Whatever has the same methods is one, too: pid (None: it is on another machine), status (as subprocess says it; None
while it runs), wait(seconds), which returns the status, kill(signum), end(), which returns when it has ended, and
output().
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .forkserver import CONTEXT, start_forkserver
from .waiting import PATIENCE


def has_stopped(pid: int) -> bool:
    """Whether no thread of a process runs any more: the one that gets SIGSTOP stops the others when it runs itself."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return not set(states) - set("TtZX")


def is_blocked(pid: int) -> bool:
    """Whether the main thread of a process waits in the kernel, longer than one of Python does for the GIL.

    So a test knows of a rank that has told by mark() what it is about to call that the call waits now.
    """
    before = _sleep_of(pid)
    if before is None:
        return False
    time.sleep(8 * sys.getswitchinterval())  # at which a thread that waits for the GIL wakes up
    return _sleep_of(pid) == before


def _sleep_of(pid: int) -> str | None:
    """The number of times that the main thread has begun to sleep; None: it does not sleep now."""
    try:
        status = Path(f"/proc/{pid}/task/{pid}/status").read_text()
    except OSError:  # it has ended
        return None
    found = dict(line.split(":\t", 1) for line in status.splitlines())
    return found["voluntary_ctxt_switches"] if found["State"].startswith("S") else None


class Command:
    """A program.

    Args:
        words: the command.
        env: all its variables.
        log: the file that gets what it prints, after what is there.
        inside: words in front of the command that take it elsewhere, such as `ip netns exec X`.
        cwd: its folder.
        told: whether it listens to tell().
        answers: whether its standard output is for answer(), instead of for the log.
    """

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], log: Path, *, inside: Sequence[str] = (),
        cwd: Path | str | None = None, told: bool = False, answers: bool = False,
    ) -> None:  # fmt: skip
        self._log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [*inside, *words], env=dict(env), cwd=cwd, stdin=subprocess.PIPE if told else subprocess.DEVNULL,
                stdout=subprocess.PIPE if answers else file, stderr=file, start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        return self._process.poll()

    def wait(self, seconds: float | None = None) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def kill(self, signum: int = signal.SIGKILL) -> None:
        self._process.send_signal(signum)

    def end(self) -> None:
        if self.status is None:
            self.kill()
        self._process.communicate()

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def tell(self, line: str) -> None:
        """Writes a line to its standard input, if it still reads that."""
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.write(f"{line}\n".encode())
            pipe.flush()

    def answer(self, within: float = 30) -> str:
        """The next line of its standard output. It prints one for each that it is told."""
        pipe = self._process.stdout
        assert pipe is not None
        assert select.select([pipe], [], [], within * PATIENCE)[0], f"no answer; it has printed {self.output()}"
        line = pipe.readline().decode()
        assert line, f"no answer, but an end with status {self.wait()}; it has printed {self.output()}"
        return line


class Forked:
    """A function in a process that is forked from the forkserver, and that writes its own log."""

    def __init__(self, log: Path, target: Callable[..., None], *args: Any) -> None:
        start_forkserver()
        self._log = log
        self._process = CONTEXT.Process(target=target, args=args, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def status(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int | None:
        self._process.join(seconds)
        return self.status

    def kill(self, signum: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and the forkserver has not said so yet
            os.kill(self.pid, signum)

    def end(self) -> None:
        self._process.kill()
        self._process.join()

    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""
