# SPDX-License-Identifier: Apache-2.0
"""The processes of a job, by name. They end with their `with` block, and then nothing is left of them."""

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .leftovers import leftovers, shared_memory_files
from .process import Command, Forked, has_stopped
from .waiting import PATIENCE, Value, WaitedInVainError, eventually

Self = TypeVar("Self", bound="Members")


class JobFailedError(AssertionError):
    """A member did not do what it should; shows the output of all."""


class Members:
    """Starts members, and says what they do and did.

    Attributes:
        folder: holds their logs. One that was made here is removed at the end.
        processes: "rank 1", "server 0", "scheduler", ...: in the order in which they were started.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.mkdtemp(prefix="bps-test-"))
        self.processes: dict[str, Any] = {}  # see process.py
        self._is_ours = folder is None
        self._sessions: set[int] = set()
        self._signalled: set[str] = set()
        self._shared_memory_before = shared_memory_files()

    # ---- Starting

    def add(self, member: str, process: Any) -> Any:
        """Takes a process that has been started as that member."""
        self.processes[member] = process
        self._signalled.discard(member)
        if process.pid is not None:
            self._sessions.add(process.pid)
        return process

    def command(self, member: str, words: Sequence[str], env: Mapping[str, str], **options: Any) -> Command:
        """Starts a program as that member. Options as those of Command."""
        return self.add(member, Command(words, env, self.log_of(member), **options))

    def fork(self, member: str, target: Callable[..., None], *args: Any) -> Forked:
        """Starts a function in a process of its own as that member."""
        return self.add(member, Forked(self.log_of(member), target, *args))

    def log_of(self, member: str) -> Path:
        """The file that gets what the member prints."""
        return self.folder / f"{member.replace(' ', '-')}.log"

    # ---- While they run

    def pid(self, member: str) -> int:
        """Of "rank 1", "server 0" or "scheduler"."""
        pid = self.processes[member].pid
        assert pid is not None
        return pid

    def kill(self, member: str, signum: int = signal.SIGKILL) -> float:
        """Sends a signal, and waits for the effect of SIGSTOP.

        Returns the moment, on the clock that time.monotonic() of every process reads.
        """
        self._signalled.add(member)
        self.processes[member].kill(signum)
        if signum == signal.SIGSTOP:
            eventually(lambda: has_stopped(self.pid(member)), 30, f"the stop of {member}")
        return time.monotonic()

    def log(self, member: str) -> str:
        """What the member has printed so far."""
        return self.processes[member].output()

    def dumps(self, member: str) -> list[dict[str, Any]]:
        """What the member has told so far because of SIGUSR1. It may be writing a line at this moment."""
        whole, _, _ = self.log(member).rpartition("\n")
        head = "bps DUMP "
        return [json.loads(line.removeprefix(head)) for line in whole.splitlines() if line.startswith(head)]

    def eventually(
        self,
        condition: Callable[[], Value],
        within: float = 60,
        what: str = "",
        of: Collection[str] | None = None,
        until: Callable[[Value], Any] = bool,
    ) -> Value:
        """As harness.eventually(), but not beyond the end of a member without which it cannot happen.

        Args:
            condition, within, what, until: as there.
            of: those members; default: none that runs now may fail, but for those to which the test has sent a signal.
        """
        running = [name for name, one in self.processes.items() if one.status is None and name not in self._signalled]

        def hopeless() -> str:
            if of is None:
                return ", ".join(f"{name} failed" for name in running if self.has_failed(name))
            return ", ".join(f"{name} ended" for name in of if self.processes[name].status is not None)

        try:
            return eventually(condition, within, what, hopeless, until)
        except WaitedInVainError as error:
            raise JobFailedError(f"{error}\n{self.report()}") from None

    def has_failed(self, member: str) -> bool:
        """Whether it has ended as it should not."""
        return self.processes[member].status not in (None, 0)

    # ---- Their end

    def wait(self, member: str, within: float = 60) -> int:
        """Waits until a member has ended, however it ends; returns its status."""
        status = self.processes[member].wait(within * PATIENCE)
        if status is None:
            raise JobFailedError(f"{member} did not end\n{self.report()}")
        return status

    def statuses(self, within: float, but: Collection[str] = ()) -> dict[str, int | None]:
        """Waits for all members (except `but`) together: how each ended, None for one that still runs."""
        end = time.monotonic() + within * PATIENCE
        awaited = {name: one for name, one in self.processes.items() if name not in but}
        return {name: one.wait(max(0.0, end - time.monotonic())) for name, one in awaited.items()}

    def succeed(self, within: float = 60) -> None:
        """Waits until all have ended, and well."""
        if wrong := {name: status for name, status in self.statuses(within).items() if status != 0}:
            raise JobFailedError(f"statuses of those that did not end well: {wrong}\n{self.report()}")

    def report(self) -> str:
        """How all have ended so far, and what they have printed."""
        return "\n".join(f"---- {name}: status {one.status}\n{one.output()}" for name, one in self.processes.items())

    def end(self, with_children: bool = False) -> None:
        """Ends those that still run, and on request all that is in their process groups."""
        for process in [one for one in self.processes.values() if one.status is None]:
            if with_children and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        for process in self.processes.values():
            process.end()

    def left(self, within: float = 5) -> list[str]:
        """What they have left behind although they have ended, and although it got some seconds to vanish."""
        return leftovers(self._sessions, within) + sorted(shared_memory_files() - self._shared_memory_before)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(with_children=kind is not None)  # of which nobody will say that they were left
        left = self.left()
        if self._is_ours:
            shutil.rmtree(self.folder, ignore_errors=True)
        if kind is None and left:
            raise JobFailedError(f"left behind: {left}")
