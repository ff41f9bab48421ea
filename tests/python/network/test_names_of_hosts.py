# SPDX-License-Identifier: Apache-2.0
"""Hosts that know their own name as 127.0.1.1, as Debian and Ubuntu set them up: two namespaces that networks join.

The other host finds rank 0, or the scheduler, by that name at an address of the network. What runs beside it must not
send the others to 127.0.0.1.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import harness
import pytest
from harness import network

HERE, THERE = network.PAIR
SECRET = {"BPS_SECRET": "of both, and long enough"}
SUM = """
import os, numpy as np, bps_rdma as bps
bps.init()
for n in (10, 1_000_000):
    total = bps.push_pull(np.full(n, bps.rank() + 1, np.float32), average=False, name=f"x{n}")
    assert (total == 3).all()
    os.write(1, b"sum is right\\n")
bps.shutdown()
"""


class Hosts(harness.Members):
    """Members on two hosts, the first of which is called `first`."""

    def __init__(self, networks: network.Network, folder: Path) -> None:
        super().__init__(folder)
        self._networks = networks
        self.script = folder / "sum.py"
        self.script.write_text(SUM)
        address = networks.address(HERE, "data")
        for host, own in ((HERE, "127.0.1.1"), (THERE, address)):
            (folder / f"hosts of {host}").write_text(f"127.0.0.1 localhost\n{own} first\n")

    def on(self, host: str, member: str, *words: str, **env: str) -> None:
        hosts = shlex.quote(str(self.folder / f"hosts of {host}"))
        mount = ["unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]
        inside = [*self._networks.inside(host), *mount]
        self.command(member, list(words), harness.clean_env(**SECRET | {"BPS_TRANSPORT": "tcp"} | env), inside=inside)

    def succeed_with_right_sums(self) -> None:
        self.succeed(90)
        for member in network.PAIR:
            assert self.log(member).splitlines().count("sum is right") == 2, self.report()


@pytest.fixture
def hosts(networks, tmp_path) -> Iterator[Hosts]:
    probe = subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True)
    if probe.returncode != 0:
        pytest.skip("needs a mount namespace of its own")
    with Hosts(networks, tmp_path) as found:
        yield found


def test_rank_0_is_known_by_its_name(hosts):
    for rank, host in enumerate(network.PAIR):
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        hosts.on(host, host, sys.executable, str(hosts.script), **env, MASTER_ADDR="first", MASTER_PORT="29500")
    hosts.succeed_with_right_sums()


def test_bps_run_on_two_hosts(hosts):
    for number, host in enumerate(network.PAIR):
        run = ["run", "-np", "1", "--nnodes", "2", "--node-rank", str(number), "--master-addr", "first"]
        hosts.on(host, host, harness.binary("bps"), *run, str(hosts.script))
    hosts.succeed_with_right_sums()


def test_servers_beside_the_scheduler(hosts):
    roles = harness.of_roles(2, 1, 9010, root="first")
    hosts.on(HERE, "scheduler", harness.binary("bps-scheduler"), **roles)
    hosts.on(HERE, "server 0", harness.binary("bps-server"), **roles)
    for number, host in enumerate(network.PAIR):
        env = roles | {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(number)}
        hosts.on(host, host, sys.executable, str(hosts.script), **env)
    hosts.succeed_with_right_sums()


OVER_A_FILE = """
import os, sys
import torch.distributed as dist
from bps_rdma.torch import membership
import numpy as np, bps_rdma as bps
rank = int(sys.argv[2])
membership.init_from_store(dist.FileStore(sys.argv[1], 2), rank, 2, {})
for n in (10, 1_000_000):
    total = bps.push_pull(np.full(n, rank + 1, np.float32), average=False, name=f"x{n}")
    assert (total == 3).all()
    os.write(1, b"sum is right\\n")
bps.shutdown()
"""


@pytest.mark.parametrize("told", [pytest.param({}, marks=pytest.mark.long), {"MASTER_ADDR": "localhost"}])
def test_ranks_that_meet_at_a_file(hosts, told, tmp_path):
    pytest.importorskip("torch")
    hosts.script.write_text(OVER_A_FILE)
    for rank, host in enumerate(network.PAIR):
        hosts.on(host, host, sys.executable, str(hosts.script), str(tmp_path / "store"), str(rank), **told)
    hosts.succeed_with_right_sums()


def test_a_server_that_only_its_own_host_can_reach_is_named(hosts):
    roles = harness.of_roles(2, 1, 9010, root="first")
    hosts.on(HERE, "scheduler", harness.binary("bps-scheduler"), **roles)
    hosts.on(HERE, "server 0", harness.binary("bps-server"), **roles | {"BPS_NODE_HOST": "127.0.0.1"})
    for number, host in enumerate(network.PAIR):
        env = roles | {"DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(number), "BPS_SHUTDOWN_TIMEOUT": "1"}
        hosts.on(host, host, sys.executable, str(hosts.script), **env)
    assert hosts.wait(THERE) != 0
    assert "127.0.0.1" in hosts.log(THERE)
    assert "BPS_NODE_HOST" in hosts.log(THERE)
