# SPDX-License-Identifier: Apache-2.0
"""Joining over a torch.distributed group: its store is not authenticated, and never sees the secret of the job."""

import json
import re
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest

import bps_rdma.torch as bps_torch
from bps_rdma.torch import membership, rendezvous

NO_SECRET = {"BPS_SECRET": "", "BPS_JOB_ID": ""}


def joins_over_a_store(bps: Any, store: str, backend: str) -> tuple[float, bytes]:
    import torch.distributed as dist

    if backend == "bps":
        import bps_rdma.torch.backend  # noqa: F401
    rank, world = int(bps.settings.config_with({}).text("BPS_RANK")), 2
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    if backend != "bps":
        bps_torch.init()
    total = bps.push_pull(np.ones(4, np.float32), average=False, name="x")[0]
    bps.barrier()
    seen = Path(store).read_bytes()
    bps.barrier()
    bps.shutdown()
    return float(total), seen


@pytest.mark.parametrize("backend", ["gloo", "bps"])
def test_no_secret_goes_through_the_store(backend, tmp_path):
    env = NO_SECRET | {"XDG_RUNTIME_DIR": str(tmp_path)}
    found = harness.run(joins_over_a_store, str(tmp_path / "store"), backend, workers=2, env=env, init=False)
    secret = (tmp_path / "bps_rdma" / "secret").read_bytes().strip()
    for total, seen in found:
        assert total == 2
        assert b"job_id" in seen, "this is what the ranks agree on"
        assert secret not in seen
        assert b"secret" not in seen
        assert not re.search(rb"[0-9a-f]{40}", seen)


def joins_from_two_hosts(bps: Any, store: str) -> str:
    import torch.distributed as dist

    rank = int(bps.settings.config_with({}).text("BPS_RANK"))
    membership.host_identity = lambda: f"host {rank}"
    membership._address_of_rank_0 = lambda _: "192.0.2.1"
    try:
        membership.init_from_store(dist.FileStore(store, 2), rank, 2, {"join_timeout": 5})
    except bps.BpsError as error:
        return f"{type(error).__name__}: {error}"
    bps.shutdown()
    return "joined"


def test_several_hosts_need_a_secret_besides_the_store(tmp_path):
    env = NO_SECRET | {"MASTER_ADDR": ""}
    store = str(tmp_path / "store")
    for told in harness.run(joins_from_two_hosts, store, workers=2, env=env, init=False):
        assert told.startswith("InvalidArgumentError"), told
        assert "no secret" in told


def is_told_lies(bps: Any, store: str) -> list[str]:
    """What a stranger puts into the store is an address and a job, and nothing else."""
    import torch.distributed as dist

    shared = dist.FileStore(store, 1)
    lie = {"job_id": "a", "root_uri": "192.0.2.1", "insecure": True, "secret": "known", "hosts": [0, 0]}
    rendezvous.secrets.token_hex = lambda _: "seen by the stranger"
    shared.set("bps_rdma/call", "x")
    shared.set("bps_rdma/x/job", json.dumps(lie | {"numbers": ["", "seen by the stranger"]}))
    return sorted(membership._agree(shared, 1, 2))


def test_a_store_cannot_switch_authentication_off(tmp_path):
    found = harness.run(is_told_lies, str(tmp_path / "store"), workers=1, init=False)
    assert found == [["job_id", "local_rank", "local_size", "root_uri"]]
