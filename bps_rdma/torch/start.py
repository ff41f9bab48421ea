"""Joining the job from torch: by the launcher's variables, or over a torch.distributed group that is there already.

Over a group nothing but its store is used, on any port and with any init_method: rank 0 makes a secret and says where
the scheduler is, all ranks read it, and bps_rdma starts with the same ranks.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist

import bps_rdma
from bps_rdma import Group, job
from bps_rdma.errors import DeadlineError, InvalidArgumentError

_started_over: Any = None  # weak reference to the default group over whose store this process joined
_groups: dict[Any, Group] = {}  # (job, torch's name of a group) -> ours


def init(lazy: bool = True, **settings: object) -> None:
    """Joins the job; see bps_rdma.init(). Calling it again while it runs does nothing.

    In a process with an initialised torch.distributed group the ranks are those of that group, and every rank of it
    must make this call. When that group has been destroyed and another one made, the job is left and joined anew.

    Args:
        lazy: accepted for BytePS's sake.
        settings: as for bps_rdma.init().

    Raises:
        InvalidArgumentError: the job that runs has other ranks than the torch.distributed group.
        DeadlineError: not all ranks of the group came.
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if bps_rdma.is_initialized() and world is not None and _started_over is not None and _started_over() is not world:
        bps_rdma.shutdown()
    if not bps_rdma.is_initialized():
        if world is None or _servers_are_configured(settings):
            bps_rdma.init(**settings)
        else:
            store = dist.distributed_c10d._get_default_store()
            start_over(store, dist.get_rank(), dist.get_world_size(), settings)
            follow(world)
    if world is not None and (bps_rdma.rank(), bps_rdma.size()) != (dist.get_rank(), dist.get_world_size()):
        raise InvalidArgumentError(
            f"this is worker {bps_rdma.rank()} of {bps_rdma.size()}, but rank {dist.get_rank()} of "
            f"{dist.get_world_size()} in torch.distributed",
            "start both with the same RANK and WORLD_SIZE, or let bps_rdma start over the group: unset BPS_ and DMLC_",
        )


def suspend() -> None:
    """Leaves the job, to come back with resume(). Every rank calls it, with nothing on its way."""
    bps_rdma.shutdown()


def resume(
    num_workers: int, num_servers: int | None = None, global_rank: int | None = None, **settings: object
) -> None:
    """Joins the job again after suspend(), with another number of members perhaps.

    What has been wrapped before (modules, optimizers) goes on, unless it belongs to a group of its own.

    Args:
        num_workers: workers from now on; with DMLC_ROLE set, machines with workers, as BytePS counts.
        num_servers: dedicated servers from now on, where there are any.
        global_rank: rank of this worker from now on; default: as before.
        settings: as for init().
    """
    config = job.config_with(settings)
    if config.text("BPS_NUM_SERVERS"):
        settings["num_workers"] = num_workers
        settings["num_servers"] = config.text("BPS_NUM_SERVERS") if num_servers is None else num_servers
    else:
        settings["world_size"] = num_workers
    if global_rank is not None:
        settings["rank"] = global_rank
    bps_rdma.init(**settings)


def follows() -> bool:
    """Whether the running job belongs to a torch.distributed group."""
    return _started_over is not None


def follow(world: Any) -> None:
    """Notes that the running job belongs to this torch.distributed group, and ends with it."""
    global _started_over
    _started_over = weakref.ref(world)


def _servers_are_configured(settings: dict[str, object]) -> bool:
    return bool(job.config_with(settings).text("BPS_NUM_SERVERS"))


def start_over(store: Any, rank: int, world: int, settings: dict[str, object]) -> None:
    """bps_rdma.init() with what the ranks agree upon in a torch store.

    Args:
        store: a torch.distributed store that all `world` ranks share; nothing of it is used after this call.
        settings: as for bps_rdma.init(); what is given here wins.
    """
    try:
        agreed = _agree(store, rank, world)
    except (RuntimeError, ValueError) as error:  # what stores raise when a key does not come
        raise DeadlineError(
            f"rank {rank} of {world} could not agree with the others over torch's store: {error}",
            "every rank of the group must make this call (init, DistributedDataParallel, ...)",
        ) from error
    bps_rdma.init(**{"rank": rank, "world_size": world, **agreed, **settings})


def _agree(store: Any, rank: int, world: int) -> dict[str, object]:
    # A store may serve several lives of the job, one after the other; all ranks are in one before any is in the next.
    prefix = f"bps_rdma/{(store.add('bps_rdma/arrivals', 1) - 1) // world}"
    store.set(f"{prefix}/host/{rank}", _host_identity())
    if rank == 0:
        hosts = [store.get(f"{prefix}/host/{other}").decode() for other in range(world)]
        store.set(f"{prefix}/job", json.dumps({
            "job_id": secrets.token_hex(16),
            "secret": secrets.token_hex(32),
            "root_uri": "127.0.0.1" if len(set(hosts)) == 1 else _address_of_rank_0(store),
            "hosts": [hosts.index(host) for host in hosts],
        }))  # fmt: skip
    agreed: dict[str, object] = json.loads(store.get(f"{prefix}/job"))
    hosts = agreed.pop("hosts")  # type: ignore[assignment]
    agreed["local_rank"] = hosts[:rank].count(hosts[rank])
    agreed["local_size"] = hosts.count(hosts[rank])
    return agreed


def _host_identity() -> str:
    """The same for all processes of a machine that can reach each other by loopback, and for no others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/net').readlink()}"


def _address_of_rank_0(store: Any) -> str:
    config = job.config_with({})
    if config.source("BPS_ROOT_URI") != "default":
        return str(config.text("BPS_ROOT_URI"))
    with contextlib.suppress(AttributeError):
        while not hasattr(store, "host"):
            store = store.underlying_store
        return str(store.host)  # a TCPStore, which all ranks have reached there
    return socket.getfqdn()


def group_of(group: Any) -> Group | None:
    """Our group of the same ranks as a torch.distributed group; a Group of ours and None stay as they are.

    Every rank of the group must make the first call for it.
    """
    if group is None or isinstance(group, Group):
        return group
    ranks = dist.get_process_group_ranks(group)
    if ranks == list(range(bps_rdma.size())):
        return None
    key = (job.current(), group.group_name)
    if key not in _groups:
        for gone in [old for old in _groups if old[0] is not key[0]]:
            del _groups[gone]
        _groups[key] = bps_rdma.new_group(ranks, name=f"torch {group.group_name}")
    return _groups[key]
