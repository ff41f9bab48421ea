"""What a collective returns: waited for in the calling thread, or by a future, which a thread completes."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from select import POLLIN, poll
from typing import Any

import torch
import torch.distributed as dist

from bps_rdma import Handle
from bps_rdma.errors import DeadlineError
from bps_rdma.torch.backend import completion
from bps_rdma.torch.backend.dense import Finish
from bps_rdma.torch.staging.operation import StagedOperation

profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
_making_futures = threading.Lock()
_NO_LIMIT = timedelta(0)  # torch's word for it; the operation has its own deadline


class BpsWork(dist.Work):
    """One collective, of one operation of the core or several. Its errors are those of bps_rdma, raised by wait()."""

    def __init__(
        self,
        kind: str,
        handles: Sequence[Handle | StagedOperation],
        finishes: Sequence[Finish],
        tensors: list[Any],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        """Arguments: what to wait for, what then remains to be done, the results; name and inputs for the profiler."""
        super().__init__()
        self._handles = handles
        self._finishes = finishes
        self._tensors = tensors
        self._lock = threading.Lock()  # a handle is waited for by one thread at a time, and gives its result once
        self._over = False
        self._error: Exception | None = None
        self._future: Any = None
        self._record: Any = None
        if profiling():
            self._start_record(kind, list(inputs))

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Blocks until the tensors are there. True.

        Raises:
            DeadlineError: not within `timeout`, if one is given; the operation goes on.
            PeerLostError, DeadlineError, ...: what became of the operation.
        """
        if self._over and self._error is None:
            return self._follow()
        if timeout > _NO_LIMIT:
            self._await(timeout.total_seconds())
        if self._record is not None:
            with contextlib.suppress(RuntimeError):
                self._future.wait()  # so that what is profiled is complete when the caller stops profiling
        self._settle()
        if self._error is not None:
            raise self._error
        return self._follow()

    def _follow(self) -> bool:
        # As with NCCL's works, the stream of every thread that waits goes on once the results are on the device.
        for handle in self._handles:
            if isinstance(handle, StagedOperation):
                handle.follow()
        return True

    def _settle(self) -> None:
        with self._lock:
            if self._over:
                return
            try:
                settle(self._handles, self._finishes)
            except Exception as error:
                self._error = error
            self._over = True
            self._finishes = ()

    def _await(self, seconds: float) -> None:
        if self._over:
            return
        end = time.monotonic() + seconds
        for handle in self._handles:
            waiting = poll()
            waiting.register(handle.completion_fd(), POLLIN)
            if not waiting.poll(max(0.0, 1000 * (end - time.monotonic()))):
                raise DeadlineError(
                    f"a collective was not complete within the {seconds:g} s that wait() was given",
                    "wait longer, or look for the rank that is late",
                )

    def next_fd(self) -> int:
        """Readable when another of the operations is over; -1 when all are."""
        for handle in self._handles:
            if not (self._over or handle.taken or handle.done()):
                return handle.completion_fd()
        return -1

    def get_future(self) -> Any:
        """A future of the list of tensors; made when it is asked for. Callbacks may wait for works, not for futures."""
        with _making_futures:  # not the work's lock, which is held by who waits
            if self._future is not None:
                return self._future
            base: Any = torch.futures.Future()
            self._future = base.then(self._result_of)
        if self.next_fd() == -1 and self._record is None:
            base.set_result(None)
        else:
            completion.complete(base, self)
        return self._future

    def _result_of(self, _: Any) -> list[Any]:
        # Only what a callback throws is an error for torch's C++ too; one set on a future is not.
        self._settle()
        if self._record is not None:
            self._record.__exit__(None, None, None)
        if self._error is not None:
            raise self._error
        return self._tensors

    def _start_record(self, kind: str, inputs: list[Any]) -> None:
        # Ends in the thread that completes futures: for the profiler, what ends in another thread is asynchronous.
        record = torch._C._profiler._RecordFunctionFast(f"bps:{kind}", inputs, {})
        record.__enter__()
        self._record = record
        self.get_future()

    def is_completed(self) -> bool:
        """Whether wait() would return, or raise, at once."""
        return self.next_fd() == -1

    def is_success(self) -> bool:
        """Whether it is over, and well."""
        return self.exception() is None and self._over

    def exception(self) -> Exception | None:
        """What became of it, once it is over."""
        if self.is_completed():
            self._settle()
        return self._error

    def result(self) -> list[Any]:
        """The tensors; waits for them."""
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        """wait()."""
        self.wait()


def settle(handles: Sequence[Handle | StagedOperation], finishes: Sequence[Finish]) -> None:
    """Waits for all operations and does what then remains. Raises the first error once all are over."""
    failed: Exception | None = None
    for handle in handles:
        try:
            handle.wait()
        except DeadlineError as error:
            failed = failed or _of_the_group(error)
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed
    for finish in finishes:
        finish()


@functools.cache
def done() -> BpsWork:
    """A work that is over."""
    work = BpsWork("", (), (), [], [])
    work.wait()
    return work


def _of_the_group(error: DeadlineError) -> DeadlineError:
    return DeadlineError(
        f"the timeout of the collective is over: {error.message}",
        "check that those ranks are alive and call the same operation with the same dtype and size, or raise the "
        "timeout of init_process_group() or new_group()",
    )
