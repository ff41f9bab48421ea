# SPDX-License-Identifier: Apache-2.0
"""The job of this process: joining and leaving it, its groups, its memory, its counters."""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from bps_rdma import _core, startup
from bps_rdma.errors import InvalidArgumentError, NotInitializedError
from bps_rdma.group import Group

T = TypeVar("T")


@dataclass(frozen=True)
class SettingValue:
    """One setting: see `bps config`."""

    name: str
    value: str
    source: str
    default: str
    aliases: tuple[str, ...]
    help: str


class Job:
    """Everything that lives from init() to shutdown().

    Args:
        process: this process in the core.
        config: the settings that init() used.
        world: the group of all workers.
    """

    def __init__(self, process: _core.Process, config: _core.Config, world: Group) -> None:
        self.process = process
        self.config = config
        self.world = world
        self.groups: dict[int, Group] = {0: world}
        self.tensors: dict[tuple[int, str], _core.Tensor] = {}
        self.window_start = time.monotonic()
        self.window_bytes = 0
        self._parts: dict[type[Any], Any] = {}
        self._making = threading.RLock()

    def part(self, kind: type[T]) -> T:
        """The one object of this class that belongs to the job: made at first use, and closed when the job ends.

        Faces keep their state here instead of in module globals, so that two jobs of one process share nothing.

        Args:
            kind: called without arguments; if its objects have a method close(), it is called after shutdown().
        """
        found: T | None = self._parts.get(kind)
        if found is None:
            with self._making:
                found = self._parts.get(kind)
                if found is None:
                    found = self._parts[kind] = kind()
        return found

    def close(self) -> None:
        """Ends all parts; called when none of the job's operations is in progress any more."""
        while self._parts:
            _, part = self._parts.popitem()
            if hasattr(part, "close"):
                part.close()


_job: Job | None = None
_lock = threading.Lock()


def current() -> Job:
    """The job of this process."""
    if _job is None:
        raise NotInitializedError("bps_rdma is not initialised", "call bps_rdma.init() first")
    return _job


# ---- Life


def init(**settings: object) -> None:
    """Joins the job; starts the members that are not running yet. Further calls have no effect while the job runs.

    Args:
        settings: values that override the environment, named without BPS_ and in lower case, for example
            `init(transport="tcp", partition_bytes=1 << 20)`. `config()` lists them.

    Raises:
        InvalidArgumentError: a setting or launcher variable cannot be used.
        UnreachableError, AuthenticationError, VersionError, PortTakenError: the connection to the scheduler or a server
            failed.
        DeadlineError: not all members joined within BPS_JOIN_TIMEOUT seconds.
    """
    global _job
    with _lock:
        if _job is not None:
            return
        config = config_with(settings)
        process = _core.Process.start(config, startup.from_config(config))
        _job = Job(process, config, Group(0, tuple(range(process.workers))))
        atexit.register(shutdown)


def shutdown() -> None:
    """Leaves the job once all workers do, or after BPS_SHUTDOWN_TIMEOUT seconds. Without a job it has no effect."""
    global _job
    with _lock:
        if _job is None:
            return
        job, _job = _job, None
        atexit.unregister(shutdown)
        try:
            job.process.shutdown(job.config.seconds("BPS_SHUTDOWN_TIMEOUT"))
        finally:
            job.close()
        _core.release_orphans(all=True)  # no peer can write into them any more


def is_initialized() -> bool:
    """Whether this process is in a job."""
    return _job is not None


def rank() -> int:
    """Rank of this worker, from 0."""
    return current().process.rank


def size() -> int:
    """Number of workers."""
    return current().world.size


def local_rank() -> int:
    """Rank of this worker on its host, as set by the launcher; 0 without a launcher. Can be called without a job."""
    return int(_settings().text("BPS_LOCAL_RANK") or 0)


def local_size() -> int:
    """Number of workers on this host, as set by the launcher; 1 without a launcher. Can be called without a job."""
    return int(_settings().text("BPS_LOCAL_SIZE") or 1)


def _settings() -> _core.Config:
    return _job.config if _job is not None else _core.Config()


def config_with(settings: Mapping[str, object]) -> Any:
    """The settings that init() uses with these arguments."""
    config = _core.Config()
    for name, value in settings.items():
        text = ("1" if value else "0") if isinstance(value, bool) else str(value)
        config.set(f"BPS_{name.upper()}", text, "argument")
    return config


def config() -> list[SettingValue]:
    """Every setting with its value and the source of the value. Can be called before init().

    The value of a secret is only "set" or "unset".
    """
    values = _settings()
    return [
        SettingValue(name, _shown(values, name, secret), values.source(name), default, tuple(aliases.split()), text)
        for name, aliases, default, text, secret in _core.Config.table()
    ]


def _shown(values: Any, name: str, secret: bool) -> str:
    text: str = values.text(name)
    return ("set" if text else "unset") if secret else text


# ---- Groups and barriers


def new_group(ranks: Iterable[int], name: str = "") -> Group:
    """Creates the group of some worker ranks, or finds it. Only the ranks of the group call this.

    Args:
        ranks: worker ranks, in any order.
        name: distinguishes groups of the same ranks.

    Raises:
        InvalidArgumentError: a rank occurs twice or is out of range, or this rank is not among them.
        DeadlineError: a member did not call it in time. PeerLostError: a member was lost.
    """
    job = current()
    members = sorted(ranks)
    if not members or len(set(members)) != len(members) or members[0] < 0 or members[-1] >= job.world.size:
        raise InvalidArgumentError(
            f"{members} are not ranks of a world of {job.world.size}", "name each rank once, from 0"
        )
    if job.process.rank not in members:
        raise InvalidArgumentError(
            f"rank {job.process.rank} is not in the group {members}", "call new_group() on its members only"
        )
    number = job.process.new_group(members, name, job.process.timeout_s)
    group = Group(number, tuple(members))
    job.groups[number] = group
    return group


def barrier(group: Group | None = None, timeout: float | None = None) -> None:
    """Waits until every rank of the group has called it.

    Raises:
        DeadlineError: after `timeout` seconds (default: BPS_TIMEOUT); names the missing ranks.
        PeerLostError: a rank of the group was lost.
    """
    job = current()
    job.process.barrier(group_of(job, group).id, job.process.timeout_s if timeout is None else timeout)


def group_of(job: Job, group: Group | None) -> Group:
    """The group that is passed as an argument; None: all workers."""
    if group is None:
        return job.world
    if job.groups.get(group.id) != group:
        raise InvalidArgumentError(f"{group} is not a group of this job", "make it with new_group() after init()")
    return group


# ---- Memory


def empty(shape: int | Sequence[int], dtype: Any = "float32") -> np.ndarray[Any, Any]:
    """A zeroed numpy array that the other processes of this host can map, so that it is synchronised without copies.

    Args:
        shape: as for numpy.empty.
        dtype: as for numpy.empty; any that push_pull takes.

    Raises:
        TransportError: there is not enough shared memory.
    """
    wanted = np.dtype(dtype)
    extent = (shape,) if isinstance(shape, int) else tuple(shape)
    count = math.prod(extent)
    shared = _core.SharedMemory(max(count * wanted.itemsize, 1))
    view = memoryview(shared)
    array: np.ndarray[Any, Any] = np.frombuffer(view, dtype=wanted, count=count)
    return array.reshape(extent)


# ---- Counters


def metrics() -> dict[str, Any]:
    """Counters of this process since init(): {"total": {name: count}, "transports": [route to each server]}.

    Data-plane and control-plane traffic, copies, stalls and rounds; csrc/core/metrics.h explains each one.
    """
    process = current().process
    return {"total": dict(process.metrics()), "transports": list(process.routes)}


def get_pushpull_speed() -> tuple[int, float]:
    """(milliseconds since the epoch, MB/s of tensors finished since the last call or since init())."""
    job = current()
    now = time.monotonic()
    done = dict(job.process.metrics())["operation_bytes"]
    elapsed = max(now - job.window_start, 1e-9)
    speed = (done - job.window_bytes) / elapsed / 1e6
    job.window_start, job.window_bytes = now, done
    return int(time.time() * 1000), speed
