"""What staging needs of a device: streams of copies, events that order them, and memory of the host that it reaches."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from bps_rdma.errors import TransportError


class Device(Protocol):
    """A device with streams. What is put into a stream happens in that order, later, and the caller goes on."""

    def use(self) -> None:
        """A thread that works with the device calls it first."""

    def stream(self) -> Any:
        """A new stream, for copies."""

    def current(self) -> Any:
        """The stream in which the calling thread computes."""

    def record(self, stream: Any) -> Any:
        """An event: all that is in the stream by now has happened."""

    def order(self, stream: Any, event: Any) -> None:
        """What is put into the stream from now on happens after the event."""

    def wait(self, event: Any) -> None:
        """Blocks the calling thread until the event, asleep."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Puts a copy into the stream. One of the two is pinned memory, both are contiguous."""

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """The tensor's memory is used in the stream: it is not to be given to others before that has happened."""

    def pin(self, memory: torch.Tensor) -> None:
        """Makes memory of the host reachable for the device's copy engines."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Undoes pin()."""


class CudaDevice:
    """One CUDA device.

    Args:
        index: of the device.
    """

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)

    def use(self) -> None:
        """Makes it the calling thread's device: else every thread would open a context on device 0, too."""
        torch.cuda.set_device(self._device)

    def stream(self) -> Any:
        """A new stream, for copies."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def current(self) -> Any:
        """The stream in which the calling thread computes."""
        return torch.cuda.current_stream(self._device)

    def record(self, stream: Any) -> Any:
        """An event: all that is in the stream by now has happened."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits for it sleeps
        event.record(stream)
        return event

    def order(self, stream: Any, event: Any) -> None:
        """What is put into the stream from now on happens after the event."""
        stream.wait_event(event)

    def wait(self, event: Any) -> None:
        """Blocks the calling thread until the event, asleep."""
        event.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Puts a copy into the stream."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """The tensor's memory is used in the stream."""
        tensor.record_stream(stream)

    def pin(self, memory: torch.Tensor) -> None:
        """Registers memory of the host with CUDA."""
        portable = 1  # for every device of this process
        self._check(self._runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, portable), memory.nbytes)

    def unpin(self, memory: torch.Tensor) -> None:
        """Undoes pin()."""
        self._check(self._runtime().cudaHostUnregister(memory.data_ptr()), memory.nbytes)

    def _runtime(self) -> Any:
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def _check(self, status: Any, count: int) -> None:
        if int(status) != 0:
            raise TransportError(
                f"CUDA cannot pin {count} bytes of host memory for {self._device}: error {int(status)}",
                "make BPS_GPU_CHUNK_BYTES or BPS_GPU_CHUNKS smaller, or allow more locked memory (ulimit -l)",
            )
