# SPDX-License-Identifier: Apache-2.0
"""The Work that a collective returns: waited for in the calling thread, or by a future, which a thread completes."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from select import POLLIN, poll
from typing import Any

import torch
import torch.distributed as dist

from bps_rdma import job
from bps_rdma.blockers import Blocker
from bps_rdma.errors import DeadlineError
from bps_rdma.handle import PythonHandle, blocker_of
from bps_rdma.kept_errors import keeping
from bps_rdma.torch import transfer
from bps_rdma.torch.backend.call_order import order
from bps_rdma.torch.backend.completion import Completer
from bps_rdma.torch.backend.pending import Pace
from bps_rdma.torch.transfer import AnyHandle, StagedOperation
from bps_rdma.torch.transfer.dense import Finish
from bps_rdma.torch.transfer.device import Device

profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
_making_futures = threading.Lock()
_log = logging.getLogger("bps_rdma")
_NO_LIMIT = timedelta(0)  # torch's word for it; the operation has its own deadline


class BpsWork(dist.Work):
    """One collective, of one operation of the core or several. Its errors are those of bps_rdma, raised by wait()."""

    def __init__(
        self,
        kind: str,
        handles: Sequence[AnyHandle | PythonHandle[Any]],
        finishes: Sequence[Finish],
        tensors: list[Any],
        inputs: Sequence[torch.Tensor],
        pace: Pace | None = None,
    ) -> None:
        """Makes the Work of operations in progress.

        Args:
            kind: of the collective, for the profiler.
            handles: the operations.
            finishes: what remains to be done once they are over.
            tensors: the results.
            inputs: for the profiler.
            pace: of the group, unless only two of its ranks are concerned.
        """
        super().__init__()
        self.number = order.number
        self._pace = pace
        self._handles = handles
        self._finishes = finishes
        self._tensors = tensors
        self._device = self._device_to_finish_on() if finishes else None
        self._stream = self._device.current() if self._device is not None else None  # in which to finish
        self._finished: Any = None  # event
        self._lock = threading.Lock()  # one thread at a time may wait for a handle, which gives its result once
        self._errors: list[Exception] = []  # of the handles that were waited for
        self._over = False
        self._error: Exception | None = None
        self._told = False  # somebody knows of the error
        self._future: Any = None
        self._record: Any = None
        if profiling():
            self._start_record(kind, inputs)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Blocks until the collective is complete, and returns True.

        Raises:
            DeadlineError: not complete within `timeout`, if one is given; the operation goes on.
            PeerLostError, DeadlineError, ...: the error of the operation.
        """
        if self._over and self._error is None and self._record is None:
            return self._follow()
        if timeout > _NO_LIMIT:
            self._await(timeout.total_seconds())
        self._settle()  # here first: operations that are awaited are driven by the thread that waits for them
        if self._record is not None:
            with contextlib.suppress(RuntimeError):
                self._future.wait()  # so that the profiler's record is complete when the caller stops profiling
        self._follow()
        if (error := self._tell()) is not None:
            raise job.raised(error)
        return True

    def _tell(self) -> Exception | None:
        self._told = True
        _open.end(self)
        return self._error

    def _follow(self) -> bool:
        # The stream of every thread that waits then waits for the copies to the device, as with NCCL's works.
        for handle in self._handles:
            if isinstance(handle, StagedOperation):
                handle.follow()
        if self._finished is not None and self._device is not None:
            self._device.order(self._device.current(), self._finished)
        return True

    def _settle(self, *, finishes: bool = True) -> None:
        with self._lock:
            if self._over:
                return
            try:
                with keeping:
                    _wait_for(self._handles, self._errors)
                    _raise_first(self._errors, self._pace)
                    if not finishes:
                        return
                    self._finish()
            except Exception as error:
                self._error = error
            self._over = True
            self._finishes = ()
        if self._error is None:
            _open.end(self)

    def _device_to_finish_on(self) -> Device | None:
        # Where nothing is staged, as with messages and sparse tensors, what remains are copies to the results.
        for handle in self._handles:
            if isinstance(handle, StagedOperation):
                return handle.device
        return next((found for one in self._results() if (found := transfer.device_of(one)) is not None), None)

    def _results(self) -> list[torch.Tensor]:
        parts = (one if isinstance(one, list | tuple) else (one,) for one in self._tensors)
        return [tensor for part in parts for tensor in part]

    def _finish(self) -> None:
        if self._device is None:
            for finish in self._finishes:
                finish()
            return
        # This may be the thread that completes futures. It works in the stream of the call, whose memory is used.
        with self._device.computing(self._stream):
            for handle in self._handles:
                if isinstance(handle, StagedOperation):
                    handle.follow()
            for finish in self._finishes:
                finish()
            self._finished = self._device.record(self._stream)

    def _await(self, seconds: float) -> None:
        if self._over:
            return
        end = time.monotonic() + seconds
        while (blocker := self.blocker()) is not None:
            waiting = poll()
            waiting.register(blocker.completion_fd(), POLLIN)
            if not waiting.poll(max(0.0, 1000 * (end - time.monotonic()))):
                raise DeadlineError(
                    f"the collective did not complete within the timeout of wait(), {seconds:g} s",
                    "pass a longer timeout, or find the rank that is late",
                )

    def blocker(self) -> Blocker | None:
        """One of the operations that is not over; None when all are."""
        for handle in self._handles:
            if not (self._over or handle.taken or handle.done()):
                return blocker_of(handle)
        return None

    def get_future(self) -> Any:
        """A future of the list of tensors; made on the first call."""
        with _making_futures:  # not the work's lock, which a waiting thread holds
            if self._future is not None:
                return self._future
            base: Any = torch.futures.Future(devices=self._cuda_devices() or None)
            if self._record is not None:  # first, so that the record has ended when the callback below is run
                torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(self._record, base)
            self._future = base.then(self._result_of)
        if not job.is_initialized() or (self.blocker() is None and self._record is None):
            base.set_result(None)
        else:
            job.current().part(Completer).add(base, self)
        return self._future

    def _cuda_devices(self) -> list[int | str | torch.device]:
        """The devices whose streams must wait for the results when they wait for the future."""
        staged = {handle.place for handle in self._handles if isinstance(handle, StagedOperation)}
        places = staged | {tensor.device for tensor in self._results()}
        return [place for place in sorted(places, key=str) if place.type == "cuda"]

    def _result_of(self, _: Any) -> list[Any]:
        # torch's C++ code sees only errors that a callback raises; one that is set on a future it does not see.
        self._settle()
        if (error := self._tell()) is not None:
            raise error
        self._follow()  # this callback's stream is that of the future
        return self._tensors

    def _start_record(self, kind: str, inputs: Sequence[torch.Tensor]) -> None:
        # The profiler takes a record that ends in another thread for an asynchronous one. Its state belongs to the
        # thread that started it, so that a record is not ended by other threads themselves, but by torch's operator
        # for it, which runs with that state in the thread that completes the future.
        self._record = torch._C._autograd._record_function_with_args_enter(f"bps:{kind}", *inputs)
        self.get_future()

    def is_completed(self) -> bool:
        """Returns whether wait() would return or raise at once. If so, the results are in the tensors."""
        if self.blocker() is not None:
            return False
        self._settle()
        return True

    def unseen_error(self) -> Exception | None:
        """The error of a work that is over, if nobody has been told of it. Its tensors stay as they are."""
        self._settle(finishes=False)  # who has not waited may have other values in them by now
        return None if self._told or self._error is None else self._tell()

    def is_small(self) -> bool:
        """True if its results take next to no memory."""
        return all(isinstance(one, torch.Tensor) and _bytes_of(one) <= 1024 for one in self._tensors)

    def nbytes(self) -> int:
        """The size of its results."""
        return sum(map(_bytes_of, self._results()))

    def is_success(self) -> bool:
        """Returns whether it is over without an error."""
        return self.exception() is None and self._over

    def exception(self) -> Exception | None:
        """Its error, once it is over; None without one."""
        return self._tell() if self.is_completed() else None

    def result(self) -> list[Any]:
        """The tensors; waits for them."""
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        """wait()."""
        self.wait()


def work_of(works: Sequence[BpsWork]) -> BpsWork:
    """Several works as one."""
    handles = [handle for work in works for handle in work._handles]
    tensors = [tensor for work in works for tensor in work._tensors]
    return BpsWork("coalesced", handles, [work.synchronize for work in works], tensors, ())


class ReceivedWork(BpsWork):
    """A message that this rank receives; it knows the rank that has sent it."""

    def __init__(self, *arguments: Any) -> None:
        """Makes the work of all arguments but the last one, which gives the rank in the group once it is known."""
        super().__init__(*arguments[:-1])
        self._sender: Callable[[], int] = arguments[-1]

    def _source_rank(self) -> int:
        return self._sender()


def settle(
    handles: Sequence[AnyHandle | PythonHandle[Any]], finishes: Sequence[Finish], pace: Pace | None = None
) -> None:
    """Waits for all operations, then does what remains to be done. Raises the first error once all are over."""
    errors: list[Exception] = []
    _wait_for(handles, errors)
    _raise_first(errors, pace)
    try:
        for finish in finishes:
            finish()
    except DeadlineError as error:  # what remained were the operations themselves
        raise _failed(error, pace) from None


def _wait_for(handles: Sequence[AnyHandle | PythonHandle[Any]], errors: list[Exception]) -> None:
    """Waits for all operations that were not waited for before: a signal handler may have raised something then."""
    for handle in handles:
        try:
            if not handle.taken:
                handle.wait()
        except Exception as error:
            errors.append(error)  # before Python lets a signal handler run


def _raise_first(errors: Sequence[Exception], pace: Pace | None) -> None:
    told = [_failed(error, pace) for error in errors]
    if told:
        raise told[0]


def _failed(error: Exception, pace: Pace | None) -> Exception:
    if not isinstance(error, DeadlineError):
        return error
    if pace is not None:
        pace.lose()
    return of_the_group(error)


class _Open:
    """References to works to which perhaps only torch's C++ code has one, as to the work of DDP's join().

    Python would free the half of such a work that is written in Python, and waiting for the other half would never end.
    References are kept until works are over; then to the last ones, if small, because join() asks for the result later.
    Perhaps nobody ever waits: those that are over are let go when there are 64 works, or twice as many as were in
    progress at the last look; those that are not small also when there are 64 MiB more than at the last look.
    """

    _MOST_BYTES = 64 << 20

    def __init__(self) -> None:
        self.works: set[BpsWork] = set()
        self._over: deque[BpsWork] = deque(maxlen=16)
        self._many = 64
        self._bytes = 0  # bytes of works since the last look

    def add(self, work: BpsWork) -> None:
        are_many = len(self.works) >= self._many
        if are_many or self._bytes >= self._MOST_BYTES:
            chosen = [one for one in list(self.works) if are_many or not one.is_small()]
            self.works.difference_update(self.over(chosen))
            self._bytes = 0
            if are_many:
                self._many = max(64, 2 * len(self.works))
        self.works.add(work)
        self._bytes += work.nbytes()

    def end(self, work: BpsWork) -> None:
        if work in self.works:
            self.works.discard(work)
            if work.is_small():
                self._over.append(work)

    def over(self, among: list[BpsWork]) -> list[BpsWork]:
        """Those that are over; says in the log what they have failed with, where nobody has waited for them."""
        found = [one for one in among if one.blocker() is None]
        errors = [error for one in found if (error := one.unseen_error()) is not None]
        if errors:
            more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
            _log.warning("a collective for which nobody waited has failed: %s%s", errors[0], more)
        return found


_open = _Open()


def report_unseen() -> None:
    """Says in the log what works have failed with for which nobody has waited."""
    _open.over(list(_open.works))


def kept(work: BpsWork) -> BpsWork:
    """Keeps a reference to the work until it is over, and returns the work."""
    _open.add(work)
    return work


@functools.cache
def done() -> BpsWork:
    """A work that is over."""
    work = BpsWork("", (), (), [], [])
    work.wait()
    return work


def of_the_group(error: DeadlineError) -> DeadlineError:
    """The error of an operation, in the words of torch."""
    return DeadlineError(
        f"the collective did not complete within its timeout: {error.message}",
        "check that those ranks are alive and call the same operation with the same dtype and size, or set a longer "
        "timeout in init_process_group() or new_group()",
    )


def _bytes_of(tensor: torch.Tensor) -> int:
    """The size of a tensor; a sparse one does not tell its own."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes
