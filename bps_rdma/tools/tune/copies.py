# SPDX-License-Identifier: Apache-2.0
"""What copies between a GPU and pinned memory cost, and the sizes that follow from it.

CUDA's driver is opened as the core opens it. Copies follow each other in a stream, as those of a tensor do, so that the
overhead of each is what it costs there, and not how long a single one takes.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bps_rdma.errors import TransportError
from bps_rdma.tools.bench.pattern import WrongResultError
from bps_rdma.tools.gpus import Driver, DriverError
from bps_rdma.tools.tune.model import Costs, fit

_SIZES = tuple(1 << power for power in range(16, 25, 2))  # 64 KiB to 16 MiB
_CHUNKS = tuple(1 << power for power in range(18, 27))  # 256 KiB to 64 MiB
_IN_A_ROW = 16
_LEAST_ROUNDS = 3
_PORTABLE = 1  # of memory that is pinned
_NON_BLOCKING = 1  # of a stream
_PATIENCE_S = 20.0
_DEFAULT_CHUNK = 4 << 20  # BPS_GPU_CHUNK_BYTES
_DEFAULT_PARTITION = 512 << 10  # BPS_PARTITION_BYTES
_NOISE = 1.02
_MOST_OVERHEAD = 0.1  # of a copy, where no link is slower than the copies


@dataclass(frozen=True)
class Point:
    """Seconds of a copy of so many bytes from the GPU, and to it."""

    nbytes: int
    down_s: float
    up_s: float


@dataclass(frozen=True)
class Copies:
    """The costs of copies from a GPU, and to it.

    Attributes:
        gpu: its number for CUDA.
        down: from it.
        up: to it.
    """

    gpu: int
    points: list[Point]
    down: Costs
    up: Costs


def measure_copies(library: str, local_rank: int, seconds: float) -> Copies | None:
    """Measures the copies of this rank's GPU: that of its local rank, which ranks share where there are fewer.

    Args:
        library: name or path of CUDA's driver.
        local_rank: of this process.
        seconds: how long it may take, roughly.

    Returns:
        None where there is no GPU.

    Raises:
        TransportError: the GPU refuses a call, or hangs.
        WrongResultError: it has copied other bytes.
    """
    try:
        driver = Driver(library)
        driver.call("cuInit", 0)
        count = driver.number("cuDeviceGetCount")
    except (OSError, AttributeError, DriverError):
        return None
    return _in_time(lambda: _measure(driver, local_rank % count, seconds)) if count else None


def _in_time(work: Callable[[], Copies]) -> Copies:
    """Lets another thread do it, because a GPU that hangs holds up the calls of its driver."""
    found: list[Copies | Exception] = []

    def run() -> None:
        try:
            found.append(work())
        except (DriverError, WrongResultError) as error:
            found.append(error)

    thread = threading.Thread(target=run, name="bps_rdma copies", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    hint = "see nvidia-smi and the kernel log (dmesg) for the state of the GPU"
    if not found:
        raise TransportError(f"a GPU has not copied for {_PATIENCE_S:g} s", hint)
    if isinstance(found[0], DriverError):
        raise TransportError(f"a GPU has refused a copy: {found[0]}", hint)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _measure(driver: Driver, gpu: int, seconds: float) -> Copies:
    context, stream, host, device = (ctypes.c_void_p() for _ in range(4))
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu)
    driver.call("cuCtxPushCurrent_v2", context)
    try:
        driver.call("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, 0)
        driver.call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(_SIZES[-1]), _PORTABLE)
        driver.call("cuMemAlloc_v2", ctypes.byref(device), ctypes.c_size_t(_SIZES[-1]))

        def copy(function: str, to: ctypes.c_void_p, of: ctypes.c_void_p, nbytes: int, times: int = 1) -> None:
            for _ in range(times):
                driver.call(function, to, of, ctypes.c_size_t(nbytes), stream)
            driver.call("cuStreamSynchronize", stream)

        def down(nbytes: int, times: int) -> None:
            copy("cuMemcpyDtoHAsync_v2", host, device, nbytes, times)

        def up(nbytes: int, times: int) -> None:
            copy("cuMemcpyHtoDAsync_v2", device, host, nbytes, times)

        _check(host, down, up)
        each = seconds / len(_SIZES) / 2
        points = [Point(size, _seconds(down, size, each), _seconds(up, size, each)) for size in _SIZES]
        driver.call("cuMemFree_v2", device)
        driver.call("cuMemFreeHost", host)
        driver.call("cuStreamDestroy_v2", stream)
    finally:
        driver.call("cuCtxPopCurrent_v2", ctypes.byref(context))
    sizes = [point.nbytes for point in points]
    by_size = ([point.down_s for point in points], [point.up_s for point in points])
    return Copies(gpu, points, *(fit(sizes, times) for times in by_size))


def _check(host: ctypes.c_void_p, down: Callable[[int, int], None], up: Callable[[int, int], None]) -> None:
    """Lets bytes go to the GPU and back."""
    size = _SIZES[-1]
    pattern = (bytes(range(251)) * (size // 251 + 1))[:size]
    ctypes.memmove(host, pattern, size)
    up(size, 1)
    ctypes.memset(host, 0, size)
    down(size, 1)
    if ctypes.string_at(host, size) != pattern:
        raise WrongResultError("the GPU has copied other bytes than it was given")


def _seconds(copy: Callable[[int, int], None], nbytes: int, seconds: float) -> float:
    """Seconds of one of many copies in a row: of the fastest row, as other work only ever adds to a time."""
    copy(nbytes, 1)
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < _LEAST_ROUNDS or time.perf_counter() < end:
        begin = time.perf_counter()
        copy(nbytes, _IN_A_ROW)
        found.append((time.perf_counter() - begin) / _IN_A_ROW)
    return min(found)


# ---- What follows from it


def pipeline_seconds(nbytes: int, chunk: int, stages: Sequence[Costs]) -> float:
    """The time that a tensor takes through stages that each have one chunk at a time."""
    count = max(math.ceil(nbytes / chunk), 1)
    times = [stage.seconds(min(chunk, nbytes)) for stage in stages]
    return sum(times) + (count - 1) * max(times)


def best_chunk(copies: Copies, network: Costs, nbytes: int) -> int | None:
    """The size of chunks with which a tensor of `nbytes` is copied, summed and copied back fastest.

    Args:
        copies: of the GPU.
        network: the costs of an operation on memory of the host.
        nbytes: of the tensor.

    Returns:
        BPS_GPU_CHUNK_BYTES; None: the default is as good.
    """

    def seconds(chunk: int) -> float:
        return pipeline_seconds(nbytes, chunk, (copies.down, network, copies.up))

    best = min(_CHUNKS, key=seconds)
    return None if seconds(_DEFAULT_CHUNK) < _NOISE * seconds(best) else best


def least_partition(copies: Copies, network: Costs) -> int:
    """The least size of partitions, a power of two, with which the copies of the core's route hold up no link.

    Where the link is no slower than the copies, it is the size with which overhead is a tenth of a copy.
    """

    def holds_up(size: int, copy: Costs) -> bool:
        link_s = size / network.bytes_per_s
        return copy.seconds(size) > max(link_s, size / copy.bytes_per_s / (1 - _MOST_OVERHEAD))

    sizes = [1 << power for power in range(16, 25)]
    fitting = (size for size in sizes if not any(holds_up(size, copy) for copy in (copies.down, copies.up)))
    return next(fitting, sizes[-1])


def partition_for(copies: Copies, network: Costs, partition: int | None) -> int | None:
    """The size of partitions for the core's route: the one that was best on the host, unless copies want larger ones.

    Args:
        copies: of the GPU.
        network: the costs of an operation on memory of the host.
        partition: the best one there; None: the default.
    """
    least = least_partition(copies, network)
    return partition if least <= (partition or _DEFAULT_PARTITION) else least
