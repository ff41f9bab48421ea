# SPDX-License-Identifier: Apache-2.0
"""Runs a function as the ranks of a job on a Ray cluster, again and again until it succeeds."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
import ray.cloudpickle

import bps_rdma
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.ray.errors import JobFailedError, PlacementError, RayError
from bps_rdma.ray.members import Members, silent_nodes
from bps_rdma.ray.placement import JobShape, reserve
from bps_rdma.ray.supervision import Losses, results_of

_log = logging.getLogger(__name__)
_ONE_CPU = {"CPU": 1.0}


def run(
    train: Callable[[Any], Any],
    config: Any = None,
    *,
    hosts: int = 1,
    per_host: int = 1,
    rank_resources: Mapping[str, float] = _ONE_CPU,
    servers: int = 0,
    server_resources: Mapping[str, float] = _ONE_CPU,
    strict_spread: bool = False,
    own_scheduler: bool = False,
    env: Mapping[str, str] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    max_failures: int = 0,
    min_workers: int = 0,
    restarts: int = 0,
    start_timeout: float = 120.0,
    timeout: float | None = None,
) -> list[Any]:
    """Call `train(config)` on hosts * per_host ranks; connects to Ray first, if this process has not.

    Each rank is an actor. Before `train` is loaded there, its environment has what torchrun sets (RANK, LOCAL_RANK,
    MASTER_ADDR, ...) and what bps_rdma.init() needs; nothing that says which rank of which job the driver is.

    Args:
        train: a function; what it imports must be importable on every node.
        config: its argument.
        hosts: bundles of ranks. The ranks of a bundle share a node; bundles lie on different nodes if possible.
        per_host: ranks of a bundle.
        rank_resources: of each rank, for example {"CPU": 8, "GPU": 1}.
        servers: dedicated servers, on nodes of their own if possible; 0: every rank is also a server.
        server_resources: of each dedicated server. A resource of your own, such as {"CPU": 8, "bps_server": 1}, pins
            them to the nodes that were started with it.
        strict_spread: each bundle and each server needs a node of its own.
        own_scheduler: run the scheduler in an actor of its own also without dedicated servers, so that no rank is
            special; otherwise rank 0 hosts it. With dedicated servers it always is.
        env: settings for all members, there before their interpreters start.
        runtime_env: Ray's, for all members.
        max_failures: times to start again after a failure. `train` then has to go on from its last checkpoint;
            TORCHELASTIC_RESTART_COUNT counts the starts from 0.
        min_workers: go on without lost members while that many ranks, and a server, are left; each rank then gets a
            RoundAbortedError (docs/elastic.md). 0: the loss of a member is a failure. Implies own_scheduler.
        restarts: with min_workers, how often lost members are started again, all together; they enter the running job.
        start_timeout: seconds until the cluster must have room, and then until all members must run.
        timeout: seconds until all ranks must have returned, from each start; None: no limit.

    Returns:
        What `train` returned, in the order of ranks at the start. With min_workers there is None for a rank that was
        lost, if no other entered in its place.

    Raises:
        PlacementError: the cluster has no room.
        StartError: members did not start.
        JobFailedError: a rank raised, or a member died, once more than `max_failures` allows. The message names the
            first failure; it is also the `__cause__`.
    """
    if max_failures < 0:
        raise InvalidArgumentError(f"max_failures is {max_failures}", "use 0 or more")
    if restarts < 0 or (restarts and not min_workers):
        raise InvalidArgumentError(
            f"restarts is {restarts}, and min_workers is {min_workers}",
            "set min_workers, too; max_failures is for jobs that start again as a whole",
        )
    shape = JobShape(
        hosts,
        per_host,
        dict(rank_resources),
        servers,
        dict(server_resources),
        strict_spread,
        own_scheduler,
        min_workers,
    )
    connect()
    pickled = ray.put(ray.cloudpickle.dumps((train, config)))
    silent: set[str] = set()
    for attempt in range(max_failures + 1):
        begun = time.monotonic()
        try:
            placement = reserve(shape, start_timeout, silent)
            _log.info("room reserved after %.1f s", time.monotonic() - begun)
            with Members(shape, placement, env or {}, runtime_env) as members:
                try:
                    members.identify(time.monotonic() + start_timeout, attempt)
                    _log.info("all members run after %.1f s", time.monotonic() - begun)
                    return results_of(members, pickled, timeout, Losses(members, pickled, min_workers, restarts))
                except RayError as error:
                    members.kill()
                    if attempt < max_failures:
                        silent = silent_nodes(members.actors, error if isinstance(error, JobFailedError) else None)
                    raise
        except RayError as error:
            # A cluster that never had room will have none.
            if attempt == max_failures or (attempt == 0 and isinstance(error, PlacementError)):
                raise
            after = time.monotonic() - begun
            _log.warning("attempt %d of %d failed after %.1f s: %s", attempt + 1, max_failures + 1, after, error)
    raise AssertionError("the last attempt returns or raises")


def connect() -> None:
    """Do what `ray.init()` does, except for a driver that runs in a checkout of bps_rdma.

    Ray puts the driver's current directory in front of the path of all actors. A checkout, whose package has no native
    part, would hide the installed package there, as it does not on the driver (`python examples/ray/train.py`).
    """
    if ray.is_initialized():
        return
    here = Path.cwd()
    hides = (here / "bps_rdma" / "__init__.py").exists() and here.resolve() != Path(
        bps_rdma.__file__
    ).resolve().parents[1]
    if not hides:
        ray.init()
        return
    os.chdir(tempfile.gettempdir())
    try:
        ray.init()
    finally:
        os.chdir(here)
