# SPDX-License-Identifier: Apache-2.0
"""Joining the job from torch: by the launcher's variables, or over a torch.distributed group that is there already.

With any backend and init_method only the store of a group is used: rank 0 writes a job id and the address of
the scheduler into it, all ranks read them, and bps_rdma starts with the same ranks. A store is not authenticated: the
secret of the job never goes through it (see SECURITY.md for where it comes from).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist

import bps_rdma
from bps_rdma import Group, _core, job
from bps_rdma.errors import BpsError, DeadlineError, InvalidArgumentError, RoundAbortedError
from bps_rdma.failover import WORLD
from bps_rdma.hosts import host_identity
from bps_rdma.job import Membership
from bps_rdma.running_job import Job
from bps_rdma.settings import config_with
from bps_rdma.torch import rendezvous

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bps_rdma.setting_types import Settings

    AnyGroup: TypeAlias = Group | dist.ProcessGroup | None  # None: all workers
else:  # a build of torch may be without torch.distributed, and then has no such class
    AnyGroup = Any

_suspended: Names | None = None  # the names of the job that suspend() left, for the one that resume() joins


class _TorchGroups:
    """The ties of a job to torch.distributed."""

    def __init__(self) -> None:
        self.world: Any = None  # weak reference to the default group from which the job was started
        self.ours: dict[str, Group] = {}  # by torch's name of a group


def init(lazy: bool = True, **settings: Unpack[Settings]) -> Membership:
    """Joins the job; see bps_rdma.init(). Calling it again while it runs does nothing.

    In a process with an initialised torch.distributed group the ranks are those of that group, and every rank of it
    must make this call. If that group has been destroyed and another one made since, this leaves the job and joins a
    new one.

    Args:
        lazy: accepted for compatibility with BytePS and ignored.
        settings: as for bps_rdma.init().

    Returns:
        An object for a `with` statement, which leaves the job at the end of its block.

    Raises:
        InvalidArgumentError: the running job has other ranks than the torch.distributed group.
        DeadlineError: not all ranks of the group came.
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if bps_rdma.is_initialized() and world is not None:
        origin = job.current().part(_TorchGroups).world
        if origin is not None and origin() is not world:
            bps_rdma.shutdown()
    joined = Membership(joined=False)
    if not bps_rdma.is_initialized():
        if world is None or _servers_are_configured(settings):
            joined = job.join(settings, resumes=False)
        else:
            store = dist.distributed_c10d._get_default_store()
            joined = init_from_store(store, dist.get_rank(), dist.get_world_size(), settings)
            set_origin(world)
    if world is not None and (bps_rdma.rank(), bps_rdma.size()) != (dist.get_rank(), dist.get_world_size()):
        raise InvalidArgumentError(
            f"this is worker {bps_rdma.rank()} of {bps_rdma.size()}, but rank {dist.get_rank()} of "
            f"{dist.get_world_size()} in torch.distributed",
            "start both with the same RANK and WORLD_SIZE, or unset BPS_* and DMLC_* variables, so that bps_rdma takes "
            "the ranks of torch.distributed",
        )
    return joined


def suspend() -> None:
    """Leaves the job, to come back with resume(). Every rank calls it, with no operation in progress.

    Dedicated servers and a scheduler of its own live on and wait for the workers that resume the job, for
    BPS_RESUME_TIMEOUT seconds. A rank that is not to take part in it any more just does not call resume().
    """
    global _suspended
    if bps_rdma.is_initialized():
        _suspended = job.current().part(Names)
    job.leave(None, suspends=True)


def resume(
    num_workers: int, num_servers: int | None = None, global_rank: int | None = None, **settings: object
) -> None:
    """Joins the job again after suspend(), possibly with another number of members.

    New ranks take part with init() and the same numbers. They get no parameters by being wrapped: all ranks call
    broadcast_parameters() and broadcast_optimizer_state() then, or use a TrainingState.

    Modules and optimizers that were wrapped before remain usable, unless they belong to a group of their own.

    Args:
        num_workers: workers from now on; with DMLC_ROLE set, machines with workers, as BytePS counts.
        num_servers: dedicated servers from now on, where there are any: of fewer those that come back last end, for
            more new ones have to be started. Default: BPS_NUM_SERVERS.
        global_rank: rank of this worker from now on; default: as before.
        settings: as for init().
    """
    global _suspended
    changed: dict[str, object] = dict(settings)
    config = config_with(settings)
    counts_machines = bool(config.text("BPS_ROLE") and config.text("BPS_NUM_WORKERS"))
    changed["num_workers" if counts_machines else "world_size"] = num_workers
    if config.text("BPS_NUM_SERVERS"):
        if config.text("BPS_ROLE") == "joint":  # each rank is a server
            num_servers = num_workers * (int(config.text("BPS_LOCAL_SIZE") or 1) if counts_machines else 1)
        changed["num_servers"] = config.text("BPS_NUM_SERVERS") if num_servers is None else num_servers
    if global_rank is not None:
        changed["rank"] = global_rank
    job.join(changed, resumes=_suspended is not None)
    if _suspended is not None:
        job.current().part(Names).go_on_from(_suspended)
        _suspended = None


def has_origin() -> bool:
    """Returns whether the running job was started from a torch.distributed group."""
    return job.current().part(_TorchGroups).world is not None


def set_origin(world: Any) -> None:
    """Notes that the running job was started from this torch.distributed group, and ends with it."""
    job.current().part(_TorchGroups).world = weakref.ref(world)


def _servers_are_configured(settings: Mapping[str, object]) -> bool:
    return bool(config_with(settings).text("BPS_NUM_SERVERS"))


def init_from_store(store: Any, rank: int, world: int, settings: Mapping[str, object]) -> Membership:
    """Calls bps_rdma.init() with an address and a job id on which the ranks agree through a torch store.

    Args:
        store: a torch.distributed store that all `world` ranks share; not used after this call.
        rank: of this process.
        world: number of ranks.
        settings: as for bps_rdma.init(); they override what the ranks agree on.

    Raises:
        DeadlineError: not all ranks made this call within the store's timeout.
    """
    try:
        agreed = _agree(store, rank, world)
    except (RuntimeError, ValueError) as error:  # DeadlineError, and what stores raise
        raise DeadlineError(
            f"rank {rank} of {world} could not agree with the others over torch's store: "
            f"{error.message if isinstance(error, BpsError) else error}",
            "every rank of the group must make this call (init, DistributedDataParallel, ...)",
        ) from error
    return job.join({"rank": rank, "world_size": world, **agreed, **settings}, resumes=False)


def _agree(store: Any, rank: int, world: int) -> dict[str, object]:
    def tell(hosts: list[str]) -> dict[str, Any]:
        return {
            "job_id": secrets.token_hex(16),
            "root_uri": "127.0.0.1" if len(set(hosts)) == 1 else _address_of_rank_0(store),
            "hosts": [hosts.index(host) for host in hosts],
        }

    told = rendezvous.agree(store, rank, world, host_identity(), tell)
    agreed: dict[str, object] = {name: str(told[name]) for name in ("job_id", "root_uri")}  # nothing else counts
    hosts = told["hosts"]
    agreed["local_rank"] = hosts[:rank].count(hosts[rank])
    agreed["local_size"] = hosts.count(hosts[rank])
    return agreed


def _address_of_rank_0(store: Any) -> str:
    config = config_with({})
    if config.source("BPS_ROOT_URI") not in ("default", "MASTER_ADDR"):
        return str(config.text("BPS_ROOT_URI"))
    return own_address(store)


def own_address(store: Any) -> str:
    """An address at which this host can be reached by those that share a torch store with it."""
    tcp = _tcp_store(store)
    host = tcp.host if tcp else os.environ.get("MASTER_ADDR", "")
    return str(_core.name_for_others(host or socket.getfqdn()))


def _tcp_store(store: Any) -> Any:
    """The TCPStore under a torch store; None if it is of another kind."""
    with contextlib.suppress(AttributeError):
        while not hasattr(store, "host"):
            store = store.underlying_store
        return store
    return None


def group_of(group: AnyGroup) -> Group | None:
    """The bps_rdma.Group with the ranks of a torch.distributed group; a Group and None are returned as they are.

    The first call for a group is collective: every rank of it must make it.
    """
    if group is None or isinstance(group, Group):
        return group
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgumentError(
            f"{group!r} is not a group, or one that this rank is not in",
            "pass one of bps_rdma.new_group() or torch.distributed.new_group(), on its ranks only; None: all ranks",
        )
    ranks = dist.get_process_group_ranks(group)
    if ranks == list(range(bps_rdma.size())):
        return None
    ours = job.current().part(_TorchGroups).ours
    found = ours.get(group.group_name)
    if found is None:
        found = ours[group.group_name] = bps_rdma.new_group(ranks, name=f"torch {group.group_name}")
    return found


def barrier(group: AnyGroup = None, timeout: float | None = None) -> None:
    """Waits until every rank of the group has called it; see bps_rdma.barrier().

    Args:
        group: a group of bps_rdma or of torch.distributed; default: all workers.
        timeout: seconds; default BPS_TIMEOUT.
    """
    bps_rdma.barrier(group_of(group), timeout)


def commit(group: AnyGroup = None, timeout: float | None = None) -> None:
    """Agrees that a step is complete, in a job that may go on without lost members; see bps_rdma.commit()."""
    bps_rdma.commit(group_of(group), timeout)


_jobs = itertools.count(1)  # that this process has been in


class Names:
    """The names given out in one job.

    Each group counts for itself: its ranks make its wrappers in one order, and may be in other groups as well.
    """

    outlives_view = True  # modules and optimizers that have the names stay

    def __init__(self) -> None:
        self.given: Counter[tuple[str, str]] = Counter()  # by key of the group, and prefix
        self.job = next(_jobs)

    def give(self, prefix: str, key: str) -> str:
        """A name that nothing else in the group with this key has: "ddp 0", "ddp 1", "ddp 2", ..."""
        self.given[key, prefix] += 1
        return f"{prefix} {self.given[key, prefix] - 1}"

    def take_back(self, prefix: str, key: str, name: str) -> None:
        """Lets give() return a name again, if it was the last one: what had it could not be made."""
        if name == f"{prefix} {self.given[key, prefix] - 1}":
            self.given[key, prefix] -= 1

    def go_on_from(self, before: Names) -> None:
        """Modules that go on in this job keep their names: new ones must not get them. Groups of `before` do not."""
        self.given.update({each: count for each, count in before.given.items() if each[0] == WORLD})


View: TypeAlias = tuple[int, int]  # the number of the job in this process, and that of the view in the job


def view() -> View:
    """The view that this process is in. A job that resume() joins may count its views from the beginning."""
    running = job.current()
    return running.part(Names).job, running.epoch


def unique(prefix: str, group: Group | None) -> str:
    """A name that nothing else in the group has. What may raise RoundAbortedError before it is made needs naming()."""
    running = job.current()
    return running.part(Names).give(prefix, _key_of(running, group))


def _key_of(running: Job, group: Group | None) -> str:
    if group is None:
        return WORLD
    # A copy that is evaluated in another job may get a name for a group of the first one. It cannot use that name.
    return running.numbering.keys[group._id] if running.groups.get(group._id) == group else ""


@contextlib.contextmanager
def naming(prefix: str, group: Group | None) -> Iterator[str]:
    """Gives such a name to what all ranks of the group make inside.

    Where members may be lost, all ranks have made it at the end, or none has, and the next one gets the name. Otherwise
    a rank that has to make it again would have another name for it than a rank that had made it before the loss. Ranks
    do not wait for each other while one has just entered the job: it may have made its own before.
    """
    init()
    running = job.current()
    names, key = running.part(Names), _key_of(running, group)
    name = names.give(prefix, key)
    try:
        yield name
    except RoundAbortedError:
        names.take_back(prefix, key, name)
        raise
    if running.may_lose_members and not job.current().has_entrants:
        try:
            bps_rdma.barrier(group)
        except BaseException:  # also Ctrl-C: the others, which still come to this barrier, have not made it either
            names.take_back(prefix, key, name)
            raise
