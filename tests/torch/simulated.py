# SPDX-License-Identifier: Apache-2.0
"""A device that is not there: its memory is the host's, but its streams are threads, and nothing happens at once.

Copies that the pipeline does not order, or puts into memory that is not pinned, give wrong results as on a GPU.

install_on_route() is for the core's own route (BPS_DEVICE_ROUTE): all memory is that of the fake driver, whose threads
copy it.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import gpu_arrays
import harness
import torch
import torch.distributed as dist

from bps_rdma.torch import check_alike, transfer
from bps_rdma.torch.transfer import collectives, device, staged


class Stream:
    """Runs what is put into it in a thread of its own, in that order."""

    def __init__(self, delay: float = 0.0) -> None:
        self._work: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._delay = delay
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: Callable[[], Any]) -> None:
        self._work.put(work)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            time.sleep(self._delay)
            work()


class Immediate:
    """The stream of a caller that computes on the CPU: all work before a call is complete, and order() waits."""

    def put(self, work: Callable[[], Any]) -> None:
        work()


class SimulatedDevice:
    """Keeps the contract of transfer.device.Device, slowly.

    Args:
        delay: seconds before each thing that a stream does.
        immediate: the caller's stream is the CPU itself.
    """

    def __init__(self, delay: float = 0.0, immediate: bool = False) -> None:
        self._delay = delay
        self.compute = Immediate() if immediate else Stream()
        self.streams: list[Stream] = []
        self.pinned: dict[int, int] = {}  # address -> bytes
        self.kept: list[torch.Tensor] = []
        self.copies = 0
        self.copied_bytes = 0
        self._within = threading.local()  # the stream that stands for the one in which a thread computes
        self.users: set[int] = set()  # threads
        self.fail_copy = -1  # the number of the copy that fails when it is started

    def use(self) -> None:
        self.users.add(threading.get_ident())

    def stream(self) -> Stream:
        self.streams.append(Stream(self._delay))
        return self.streams[-1]

    def current(self) -> Any:
        return getattr(self._within, "stream", self.compute)

    @contextlib.contextmanager
    def computing(self, stream: Any) -> Iterator[None]:
        """The thread computes on the CPU, at once, behind what is in the stream."""
        self.wait(self.record(stream))
        before = self.current()
        self._within.stream = Immediate()
        try:
            yield
        finally:
            self._within.stream = before

    def record(self, stream: Any) -> threading.Event:
        event = threading.Event()
        stream.put(event.set)
        return event

    def order(self, stream: Any, event: threading.Event) -> None:
        stream.put(event.wait)

    def happened(self, event: threading.Event) -> bool:
        return event.is_set()

    def wait(self, event: threading.Event) -> None:
        event.wait()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        assert threading.get_ident() in self.users, "on a GPU this would go to device 0"
        self.copies += 1
        self.copied_bytes += target.nbytes
        if self.copies == self.fail_copy:
            raise RuntimeError("CUDA error: simulated")
        assert target.is_contiguous()
        assert source.is_contiguous()
        assert any(map(self._is_pinned, (target, source))), "neither side is pinned: this would not be asynchronous"
        stream.put(lambda: target.copy_(source))

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        self.kept.append(tensor)

    def pin(self, memory: torch.Tensor) -> None:
        self.pinned[memory.data_ptr()] = memory.nbytes

    def unpin(self, memory: torch.Tensor) -> None:
        assert self.pinned.pop(memory.data_ptr()) == memory.nbytes

    def await_end(self) -> None:
        """Returns when the threads of the library have ended that use it, which shutdown() awaits for a moment only."""
        names = {"bps_rdma down", "bps_rdma up", "bps_rdma host sums"}
        harness.eventually(lambda: not names & {one.name for one in threading.enumerate()}, what="the threads' end")
        assert not self.pinned, "the job is over"

    def identity(self) -> str:
        return f"simulated {os.environ['RANK']}"

    def backend(self, store: Any, rank: int, size: int, seconds: float) -> Any:
        return dist.distributed_c10d.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return any(
            begin <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= begin + size
            for begin, size in self.pinned.copy().items()  # another thread may pin
        )


def install(delay: float = 0.0, immediate: bool = False) -> SimulatedDevice:
    """From now on tensors of this process count as being on the device; undone by the process's end."""
    made = SimulatedDevice(delay, immediate)
    for module in (transfer, device, collectives, staged, check_alike):
        module.device_of = lambda _: made
    return made


class DefaultStream:
    """What torch.cuda.current_stream() gives."""

    cuda_stream = 0


def install_on_route() -> SimulatedDevice:
    """From now on tensors of this process count as CUDA tensors, as install() says; for jobs with gpu_arrays.env().

    Host memory that the pipeline has pinned stays the host's. All other memory is the fake driver's, too, although the
    processor reaches it.
    """
    made = install(immediate=True)
    gpu_arrays.fake().fake_own_everything()
    gpu_arrays.fake().fake_delay(100)

    def is_on_host(tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and made._is_pinned(tensor)

    torch.cuda.get_device_capability = lambda *_: (8, 0)  # torch's own collectives ask
    torch.cuda.current_stream = lambda _: DefaultStream()  # type: ignore[assignment, return-value]
    torch.Tensor.is_cpu = property(is_on_host)  # type: ignore[assignment, misc]
    torch.Tensor.is_cuda = property(lambda tensor: not is_on_host(tensor))  # type: ignore[assignment, misc]
    return made
