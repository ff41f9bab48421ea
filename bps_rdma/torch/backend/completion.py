"""The thread that completes futures of works. It exists once a future is asked for, and until the job is left."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import threading
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bps_rdma.torch.backend.work import BpsWork

_lock = threading.Lock()
_thread: _Completer | None = None


def complete(future: Any, work: BpsWork) -> None:
    """Sets the future once the work is over, in a thread that runs its callbacks."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = _Completer()
        _thread.add(future, work)


def stop() -> None:
    """Ends the thread, once all that it waits for is over: every operation has a deadline."""
    global _thread
    with _lock:
        thread, _thread = _thread, None
    if thread is not None:
        thread.stop()


def _forget() -> None:
    """A forked child has no such thread."""
    global _lock, _thread
    _lock, _thread = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
atexit.register(stop)


class _Completer:
    def __init__(self) -> None:
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._fresh: deque[tuple[Any, BpsWork]] = deque()  # any thread appends, this one takes
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="bps_rdma futures", daemon=True)
        self._thread.start()

    def add(self, future: Any, work: BpsWork) -> None:
        self._fresh.append((future, work))
        self._rouse()

    def stop(self) -> None:
        self._stopping = True
        self._rouse()
        if self._thread is not threading.current_thread():  # a callback may leave the job
            self._thread.join()

    def _rouse(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it will be read
            os.write(self._waker, b"+")

    def _run(self) -> None:
        waiting = select.poll()
        waiting.register(self._wake, select.POLLIN)
        pending: dict[int, tuple[Any, BpsWork]] = {}
        while pending or self._fresh or not self._stopping:
            for fd, _ in waiting.poll():
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                    entries = [self._fresh.popleft() for _ in range(len(self._fresh))]
                else:
                    waiting.unregister(fd)
                    entries = [pending.pop(fd)]
                for future, work in entries:
                    following = work.next_fd()
                    if following == -1:
                        _complete(future)
                    else:
                        waiting.register(following, select.POLLIN)
                        pending[following] = (future, work)
        os.close(self._wake)
        os.close(self._waker)


def _complete(future: Any) -> None:
    try:
        future.set_result(None)  # runs the callbacks, here
    except Exception:
        traceback.print_exc()  # of one callback; the other futures need this thread
