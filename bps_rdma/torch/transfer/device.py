# SPDX-License-Identifier: Apache-2.0
"""The devices of tensors, and what staging needs of them: copy streams, events that order them, pinned host memory."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

import bps_rdma
from bps_rdma.errors import InvalidTensorError, TransportError


class Device(Protocol):
    """A device with streams: work that is put into a stream runs in that order, later, while the caller goes on."""

    def use(self) -> None:
        """Selects the device for the calling thread; every thread that works with it calls this first."""

    def stream(self) -> Any:
        """A new stream, for copies."""

    def current(self) -> Any:
        """The stream in which the calling thread computes."""

    def computing(self, stream: Any) -> AbstractContextManager[Any]:
        """Within it, the calling thread computes in this stream."""

    def record(self, stream: Any) -> Any:
        """An event that happens once all work that is in the stream now is complete."""

    def order(self, stream: Any, event: Any) -> None:
        """Work that is put into the stream from now on waits for the event."""

    def happened(self, event: Any) -> bool:
        """Returns whether the event has happened. Does not block."""

    def wait(self, event: Any) -> None:
        """Blocks the calling thread, asleep, until the event has happened."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Puts a copy into the stream. One of the two is pinned memory, both are contiguous."""

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keeps the tensor's memory from being reused before the work that is in the stream by then is complete."""

    def pin(self, memory: torch.Tensor) -> None:
        """Makes memory of the host reachable for the device's copy engines."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Undoes pin()."""

    def identity(self) -> str:
        """Tells it from other devices of the host; "": it cannot sum with them."""

    def backend(self, store: Any, rank: int, size: int, seconds: float) -> Any:
        """A backend of torch for collectives of several devices of the host.

        Args:
            store: of torch, by which they find each other.
            rank: of this process among them.
            size: how many they are.
            seconds: its patience.
        """


class CudaDevice:
    """One CUDA device.

    Args:
        index: of the device.
    """

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)

    def use(self) -> None:
        """Selects the device for the calling thread: otherwise every thread would open a context on device 0 too."""
        torch.cuda.set_device(self._device)

    def stream(self) -> Any:
        """A new stream, for copies."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def current(self) -> Any:
        """The stream in which the calling thread computes."""
        return torch.cuda.current_stream(self._device)

    def computing(self, stream: Any) -> AbstractContextManager[Any]:
        """Within it, the calling thread computes in this stream."""
        return torch.cuda.stream(stream)

    def record(self, stream: Any) -> Any:
        """An event that happens once all work that is in the stream now is complete."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # a thread that waits for it sleeps
        event.record(stream)
        return event

    def order(self, stream: Any, event: Any) -> None:
        """Work that is put into the stream from now on waits for the event."""
        stream.wait_event(event)

    def happened(self, event: Any) -> bool:
        """Returns whether the event has happened."""
        return bool(event.query())

    def wait(self, event: Any) -> None:
        """Blocks the calling thread, asleep, until the event has happened."""
        event.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Puts a copy into the stream."""
        with self.computing(stream):
            target.copy_(source, non_blocking=True)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tells torch's allocator that the stream uses the tensor's memory."""
        tensor.record_stream(stream)

    def pin(self, memory: torch.Tensor) -> None:
        """Registers memory of the host with CUDA."""
        portable = 1  # for every device of this process
        self._check(self._runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, portable), memory.nbytes)

    def unpin(self, memory: torch.Tensor) -> None:
        """Undoes pin()."""
        self._check(self._runtime().cudaHostUnregister(memory.data_ptr()), memory.nbytes)

    def identity(self) -> str:
        """Its UUID, if torch has NCCL."""
        if not (dist.is_available() and dist.is_nccl_available()):
            return ""
        return str(getattr(torch.cuda.get_device_properties(self._device), "uuid", ""))

    def backend(self, store: Any, rank: int, size: int, seconds: float) -> Any:
        """NCCL's."""
        nccl: Any = dist.distributed_c10d.ProcessGroupNCCL  # builds for the CPU lack it
        options = nccl.Options()
        options._timeout = timedelta(seconds=seconds)
        return nccl(store, rank, size, options)

    def _runtime(self) -> Any:
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def _check(self, status: Any, count: int) -> None:
        if int(status) != 0:
            raise TransportError(
                f"CUDA cannot pin {count} bytes of host memory for {self._device}: error {int(status)}",
                "make BPS_GPU_CHUNK_BYTES or BPS_GPU_CHUNKS smaller, or allow more locked memory (ulimit -l)",
            )


@functools.cache
def _cuda_device(index: int) -> Device:
    return CudaDevice(index)


def device_of(tensor: torch.Tensor) -> Device | None:
    """The device from which a tensor must be staged; None: it lies in CPU memory, which is used in place.

    Raises:
        InvalidTensorError: it is neither on the CPU nor on a CUDA device.
    """
    if tensor.is_cpu:
        return None
    if not tensor.is_cuda:
        raise InvalidTensorError(f"the tensor is on {tensor.device}", "move it to the CPU, or to a CUDA device")
    return _cuda_device(tensor.device.index)


def mapped(count: int, dtype: torch.dtype) -> torch.Tensor:
    """A zeroed flat tensor of `count` elements in CPU memory that the other processes of the host can map."""
    memory = bps_rdma.empty(max(count, 1) * dtype.itemsize, "uint8")
    return torch.from_numpy(memory).view(dtype)[:count]


def zeros_beside(tensor: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A zeroed flat tensor of `count` elements on the device of `tensor`; on the CPU it is mapped()."""
    if device_of(tensor) is None:
        return mapped(count, dtype)
    return torch.zeros(count, dtype=dtype, device=tensor.device)
