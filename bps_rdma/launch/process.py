# SPDX-License-Identifier: Apache-2.0
"""Child processes that never outlive their launcher; the launcher waits for them without polling, if the system can.

Each child leads a process group of its own, so that its own children end with it. It ends by `stop()`, at the end of
the `with` block, or when the launcher dies (by the kernel's parent-death signal for the child, and guard.py for its
group). An ended child stays a zombie until the end of the block, so that its process id cannot be reused before.

Threading: use from the main thread only, before it starts other threads. The kernel ties the parent-death signal to the
thread that started the child, and no lock may be held between fork and exec.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from bps_rdma.errors import BpsError
from bps_rdma.launch.output import LineCopier, Output, line_prefix, write_all

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_LOOK_S = 0.05  # between two looks at children whose end the system does not tell
_libc = ctypes.CDLL(None)


@dataclass(eq=False)
class Child:
    """One child: `label` names it in messages, `status` is None while it runs, then Popen's returncode.

    `pid` is the number on its host; `pidfd` and `popen` are None for one of another host, and `pidfd` as well where the
    system has no such descriptors.
    """

    label: str
    pid: int
    pidfd: int | None = None
    popen: subprocess.Popen[bytes] | None = None
    status: int | None = None

    def describe_end(self) -> str:
        """`rank 1 (pid 77) was killed by SIGKILL`, or `... ended with status 3`."""
        status = self.status or 0
        how = f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"
        return f"{self.label} (pid {self.pid}) {how}"


def exit_status(status: int) -> int:
    """The exit status as a shell reports it: 128 + n for a child that signal n killed."""
    return 128 - status if status < 0 else status


class Parent(Protocol):
    """What starts the processes of a job and tells of their ends: Children on this host, or the agents of several."""

    @property
    def running(self) -> list[Child]:
        """See Children.running."""

    def spawn(self, label: str, command: Sequence[str], env: Mapping[str, str]) -> Child:
        """See Children.spawn."""

    def has_place(self, label: str) -> bool:
        """See Children.has_place."""

    def wait(self, timeout: float | None = None) -> list[Child]:
        """See Children.wait."""

    def end_late(self, candidates: Sequence[Child], looking: Callable[[], set[int]]) -> list[Child]:
        """See Children.end_late."""

    def pass_on(self, to: Sequence[Child], signum: int) -> None:
        """See Children.pass_on."""

    def stop(self, signum: int = signal.SIGTERM, grace: float = 3.0) -> None:
        """See Children.stop."""


class Children:
    """The children of one launcher; use as `with Children() as children:`."""

    def __init__(self, *, prefixed: bool = False, output: Output | None = None) -> None:
        """`prefixed`: each line of output starts with `[label]`. `output`: where it goes, if not to ours.

        Lines of all children go out whole. Without prefixes, children that write to a terminal inherit it.
        """
        self._prefixed = prefixed
        self._output = output
        self._all: list[Child] = []
        self._selector = selectors.EpollSelector()
        script = str(Path(__file__).with_name("guard.py"))
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", script],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,  # out of reach of the terminal's Ctrl-C
            )  # fmt: skip
        except OSError as error:
            raise _not_started(sys.executable, error) from None

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()

    def fileno(self) -> int:
        """A descriptor that is readable when wait() has something to do, except for children without a pidfd."""
        return self._selector.fileno()

    @property
    def running(self) -> list[Child]:
        """The children that had not ended at the last call of `wait`."""
        return [child for child in self._all if child.status is None]

    def spawn(self, label: str, command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int] = ()) -> Child:
        """Start `command` with exactly `env`, no standard input, and the descriptors `pass_fds` kept open.

        Raises BpsError when the command cannot be started.
        """
        launcher = os.getpid()

        def between_fork_and_exec() -> None:
            os.setpgid(0, 0)
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:  # the launcher died before the signal was set
                os._exit(1)

        output, errors = self._outputs()
        try:
            popen = subprocess.Popen(
                command, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                pass_fds=tuple(pass_fds), preexec_fn=between_fork_and_exec, bufsize=0,  # noqa: PLW1509  # we have no threads
            )  # fmt: skip
        except OSError as error:
            raise _not_started(command[0], error) from None
        self._tell_guard(f"+{popen.pid}\n")
        child = Child(label, popen.pid, _pidfd_of(popen.pid), popen)
        self._all.append(child)
        if child.pidfd is not None:
            self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        for pipe, target in ((popen.stdout, 1), (popen.stderr, 2)):
            if pipe is not None:
                coloured = self._output.coloured if self._output else _coloured(target)
                prefix = line_prefix(label, len(self._all) - 1, coloured=coloured) if self._prefixed else b""
                write = self._output.write if self._output else write_all
                copier = LineCopier(os.dup(pipe.fileno()), target, prefix, write)
                pipe.close()
                self._selector.register(copier.source, selectors.EVENT_READ, copier)
        return child

    def has_place(self, label: str) -> bool:
        """Returns whether a process that is lost can be started again: always, on this host."""
        del label
        return True

    def pass_on(self, to: Sequence[Child], signum: int) -> None:
        """Send a signal to those of `to` that run, and not to their children. A signal handler may call this."""
        for child in to:
            if child.status is None:
                os.kill(child.pid, signum)  # it may have ended, and is a zombie then: the number stays its own

    def end_late(self, candidates: Sequence[Child], looking: Callable[[], set[int]]) -> list[Child]:
        """End those of `candidates` that look for a job that is over; returns them. wait() does not report them.

        Args:
            candidates: children that were started again.
            looking: says which process groups of this host look for a job.
        """
        groups = looking()
        late = [child for child in candidates if child.status is None and child.pid in groups]
        for child in late:
            self.end(child)
        return late

    def wait(self, timeout: float | None = None) -> list[Child]:
        """Children that ended since the last call; waits up to `timeout` seconds (None: no limit) for the first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        ended: list[Child] = []
        while not ended and self.running:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left < 0:
                break
            unseen = [child for child in self.running if child.pidfd is None]
            if unseen:
                left = _LOOK_S if left is None else min(left, _LOOK_S)
            for key, _ in self._selector.select(left):
                if isinstance(key.data, LineCopier):
                    self._copy(key.data)
                else:
                    ended.append(self._note_end(key.data))
            ended += [self._note_end(child) for child in unseen if _has_ended(child)]
        return ended

    def remove_if_killed(self, folder: str) -> None:
        """Have a folder of plain files removed when the launcher is killed; otherwise that is left to the caller."""
        self._tell_guard(f"/{folder}\n")

    def end(self, child: Child) -> None:
        """Kill one child and wait for it. wait() does not report it."""
        if child.status is None:
            _signal_group(child, signal.SIGKILL)
            self._note_end(child)
            child.status = 0

    def stop(self, signum: int = signal.SIGTERM, grace: float = 3.0) -> None:
        """Send `signum` to all children, and SIGKILL to those left after `grace` seconds or at a second Ctrl-C."""
        with contextlib.suppress(KeyboardInterrupt):
            self._signal_running(signum)
            deadline = time.monotonic() + grace
            while self.running and time.monotonic() < deadline:
                self.wait(deadline - time.monotonic())
        self._signal_running(signal.SIGKILL)
        while self.running:
            self.wait()

    def _note_end(self, child: Child) -> Child:
        # WNOWAIT: the zombie keeps its process id, and that of its group, until _finish.
        result = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert result is not None
        exited = result.si_code == os.CLD_EXITED
        child.status = result.si_status if exited else -result.si_status
        if child.pidfd is not None:
            self._selector.unregister(child.pidfd)
        _signal_group(child, signal.SIGTERM)  # processes that it left behind
        return child

    def signal(self, child: Child, signum: int) -> None:
        """Send a signal to a child and its own children."""
        if child.status is None:
            _signal_group(child, signum)

    def _outputs(self) -> tuple[int | None, int | None]:
        """Standard output and standard error of a child, as Popen takes them."""
        if self._output:
            return subprocess.PIPE, subprocess.STDOUT if self._output.joined else subprocess.PIPE
        ours = [subprocess.PIPE if self._prefixed or _takes_lines(target) else None for target in (1, 2)]
        if not self._prefixed and None not in ours and os.path.sameopenfile(1, 2):
            return subprocess.PIPE, subprocess.STDOUT  # in the order in which the child writes to them
        return ours[0], ours[1]

    def _copy(self, copier: LineCopier) -> None:
        source = copier.source
        if not copier.copy():
            self._selector.unregister(source)

    def _signal_running(self, signum: int) -> None:
        for child in self.running:
            _signal_group(child, signum)

    def _tell_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a job runs without its guard, too
            self._guard.stdin.write(line.encode())
            self._guard.stdin.flush()

    def _finish(self) -> None:
        for child in self._all:
            _signal_group(child, signal.SIGKILL)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, LineCopier) and key.data.copy():
                key.data.close()
        for child in self._all:
            assert child.popen is not None
            child.popen.wait()
            if child.pidfd is not None:
                os.close(child.pidfd)
            self._tell_guard(f"-{child.pid}\n")
        self._all.clear()
        self._selector.close()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()


def _pidfd_of(pid: int) -> int | None:
    """None before Linux 5.3, and where a container's profile does not know the system call."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, PermissionError):  # Python may have been built with older headers
        return None
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return None


def _has_ended(child: Child) -> bool:
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _not_started(command: str, error: OSError) -> BpsError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    hint = "check the command and PATH"
    if error.errno in (errno.EAGAIN, errno.ENOMEM):
        limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        known = "" if limit == resource.RLIM_INFINITY else f" (the limit on this user's processes is {limit})"
        reason, hint = (
            reason + known,
            "end other processes, or raise the limit: `ulimit -u 65536`, docker's --pids-limit",
        )
    return BpsError(f"cannot start {command!r}: {reason}", hint)


def _signal_group(child: Child, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signum)


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # real-time signals have no names
        return f"signal {signum}"


def _takes_lines(descriptor: int) -> bool:
    """Returns whether a descriptor is open and no terminal, by which programs tell how they should write."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return not os.isatty(descriptor)


def _coloured(descriptor: int) -> bool:
    return os.isatty(descriptor) and not os.environ.get("NO_COLOR")
