# SPDX-License-Identifier: Apache-2.0
"""Where `bps run -H` starts what, and by which addresses the hosts meet: without any host."""

import shlex
from pathlib import Path

import harness
import pytest

import bps_rdma
from bps_rdma.launch.remote import frames
from bps_rdma.launch.remote.cluster_job import ClusterJob, forwarded
from bps_rdma.launch.remote.connection import words_for
from bps_rdma.launch.remote.hostfile import Slots, parse_hosts, read_hostfile
from bps_rdma.launch.remote.plan import make_plan
from bps_rdma.launch.remote.routes import Address, Routes, choose


def test_lists_of_hosts():
    assert parse_hosts("a:8,b:4") == [Slots("a", 8), Slots("b", 4)]
    assert parse_hosts("a, me@b.example:2,a:3") == [Slots("a", 4), Slots("me@b.example", 2)]
    assert parse_hosts("[fe80::1]:2") == [Slots("fe80::1", 2)]


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:x", "a b", "-oProxyCommand=x:1", "a;b", "$(x)", "a:1:2", ",a"])
def test_what_is_no_list_of_hosts(text):
    with pytest.raises(bps_rdma.InvalidArgumentError, match="is not a host with its slots"):
        parse_hosts(text)


def test_hostfiles(tmp_path: Path):
    file = tmp_path / "hosts"
    file.write_text("# ours\n\nhost1 slots=8   # the first\nhost2 slots=4 max_slots=8\nhost3:2\nhost4\nhost1 slots=1\n")
    assert read_hostfile(file) == [Slots("host1", 9), Slots("host2", 4), Slots("host3", 2), Slots("host4", 1)]


@pytest.mark.parametrize("line", ["host1 slots=0", "host1 slot=8", "-x slots=1", "host1:2 slots=3", "a b c"])
def test_a_bad_line_of_a_hostfile_is_shown(tmp_path: Path, line: str):
    file = tmp_path / "hosts"
    file.write_text(f"good slots=1\n{line}\n")
    with pytest.raises(bps_rdma.InvalidArgumentError, match=r"line 2"):
        read_hostfile(file)


def test_a_hostfile_that_is_not_there(tmp_path: Path):
    with pytest.raises(bps_rdma.InvalidArgumentError, match="No such file"):
        read_hostfile(tmp_path / "none")


def plan(hosts: str, ranks: int | None = None, servers: str = "", count: int | None = None, goes_on: bool = False):
    return make_plan(parse_hosts(hosts), ranks, parse_hosts(servers) if servers else [], count, goes_on=goes_on)


def test_ranks_fill_one_host_after_the_other():
    made = plan("a:2,b:3")
    assert [made.places[f"rank {rank}"] for rank in range(5)] == ["a", "a", "b", "b", "b"]
    assert [made.local_ranks[f"rank {rank}"] for rank in range(5)] == [0, 1, 0, 1, 2]
    assert made.root == "a"
    assert "scheduler" not in made.places
    assert list(plan("a:2,b:3", 3).places.values()) == ["a", "a", "b"]


def test_servers_are_spread_over_their_hosts():
    made = plan("a:1,b:1", servers="c,d:2")
    assert [made.places[f"server {one}"] for one in range(3)] == ["c", "d", "d"]
    assert made.root == made.places["scheduler"] == "c"
    assert made.hosts == ["a", "b", "c", "d"]
    assert plan("a:1", servers="c,d", count=3).places["server 2"] == "c"


def test_too_many_ranks_and_servers_without_hosts_are_refused():
    with pytest.raises(bps_rdma.InvalidArgumentError, match="-np 4 is more than the 3 slots of a:1,b:2"):
        plan("a:1,b:2", 4)
    with pytest.raises(bps_rdma.InvalidArgumentError, match="--servers needs hosts"):
        plan("a:1", count=2)


def test_what_is_lost_with_its_host_moves_to_a_free_slot():
    made = plan("a:2,b:1,c:1", 3, goes_on=True)
    assert made.root == "localhost", "with the launcher"
    made.places["scheduler"] = "a"
    assert made.move("rank 0", set()), "it stays where it was"
    assert made.places["rank 0"] == "a"
    assert made.move("rank 0", {"a"})
    assert (made.places["rank 0"], made.local_ranks["rank 0"]) == ("c", 0)
    assert not made.move("rank 1", {"a"}), "no slot is left"
    assert not made.move("scheduler", {"a"}), "the others look for it where it was"


def test_each_rank_is_told_who_it_is():
    routes = Routes({"a": "10.0.0.1", "b": "10.0.0.2"})
    made = plan("a:1,b:2")
    job = ClusterJob(3, None, "tcp", scheduler_port=7, master_port=8, plan=made, routes=routes, name="n", secret="s")
    env = job.worker(2)
    assert env == {
        "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "8", "BPS_JOB_ID": "n", "BPS_ROOT_URI": "10.0.0.1", "BPS_ROOT_PORT": "7", "BPS_TRANSPORT": "tcp",
    }  # fmt: skip


def test_only_settings_and_what_is_asked_for_are_forwarded():
    env = {
        "BPS_TIMEOUT": "1", "BYTEPS_PARTITION_BYTES": "2", "NCCL_IB_HCA": "x", "HOME": "/me", "TOKEN": "t",
        "BPS_SECRET": "s", "BPS_SECRET_FILE": "f", "BPS_RSH": "ssh", "BPS_NODE_HOST": "h", "RANK": "1",
        "DMLC_ROLE": "r",
    }  # fmt: skip
    settings = {"BPS_TIMEOUT": "1", "BYTEPS_PARTITION_BYTES": "2", "NCCL_IB_HCA": "x"}
    assert forwarded(env, []) == settings
    assert forwarded(env, ["TOKEN", "A=b=c", "EMPTY="]) == settings | {"TOKEN": "t", "A": "b=c", "EMPTY": ""}
    for word in ("NONE", "=x"):
        with pytest.raises(bps_rdma.InvalidArgumentError, match="no such variable"):
            forwarded(env, [word])


def reaches(*of: tuple[str, str, str, str]) -> dict[str, dict[str, dict[str, str]]]:
    found: dict[str, dict[str, dict[str, str]]] = {}
    for caller, called, at, source in of:
        found.setdefault(caller, {}).setdefault(called, {})[at] = source
    return found


ADDRESSES = {
    "a": [Address("172.17.0.1", "docker0"), Address("10.1.0.1", "mgmt", 1000), Address("10.2.0.1", "data", 100000)],
    "b": [Address("172.17.0.1", "docker0"), Address("10.1.0.2", "mgmt", 1000), Address("10.2.0.2", "data", 100000)],
}
MGMT = [("b", "a", "10.1.0.1", "10.1.0.2"), ("a", "b", "10.1.0.2", "10.1.0.1")]
DATA = [("b", "a", "10.2.0.1", "10.2.0.2"), ("a", "b", "10.2.0.2", "10.2.0.1")]


def test_the_fastest_network_that_joins_all_is_taken():
    assert choose("a", ADDRESSES, reaches(*MGMT, *DATA)).addresses == {"a": "10.2.0.1", "b": "10.2.0.2"}
    assert choose("a", ADDRESSES, reaches(*MGMT)).addresses == {"a": "10.1.0.1", "b": "10.1.0.2"}
    assert choose("a", ADDRESSES, reaches(*MGMT, DATA[0])).addresses["a"] == "10.1.0.1", "one direction is not enough"
    assert choose("a", ADDRESSES, reaches(*MGMT, *DATA), ["mg"]).addresses["b"] == "10.1.0.2"


def test_a_host_alone_needs_no_network():
    assert choose("a", {"a": []}, {}).addresses == {"a": "127.0.0.1"}


def test_hosts_that_do_not_reach_each_other_are_named():
    with pytest.raises(
        bps_rdma.UnreachableError, match=r"a reaches b at none of 172.17.0.1, 10.1.0.2, 10.2.0.2"
    ) as said:
        choose("a", ADDRESSES, reaches(MGMT[0]))
    assert "b reaches a" not in str(said.value)
    with pytest.raises(bps_rdma.UnreachableError, match="no network joins all"):
        choose("a", ADDRESSES, reaches(MGMT[0], DATA[1]))
    with pytest.raises(bps_rdma.UnreachableError, match="no interface eth of a"):
        choose("a", ADDRESSES, reaches(*MGMT), ["eth"])


def test_the_words_of_an_agent_come_in_any_pieces():
    said = (
        b"motd\n"
        + frames.MARK
        + b'{"version": "1"}\n'
        + frames.event({"a": 1})
        + frames.frame(frames.Kind.OUTPUT, b"x\n")
    )
    for size in (1, 7, len(said)):
        reader = frames.Frames()
        found = [one for begin in range(0, len(said), size) for one in reader.feed(said[begin : begin + size])]
        assert found == [(frames.Kind.EVENT, b'{"a": 1}'), (frames.Kind.OUTPUT, b"x\n")]
        assert (reader.first, reader.before) == ({"version": "1"}, b"motd\n")
    with pytest.raises(ValueError, match="frame"):
        reader.feed(b"O\xff\xff\xff\xff")


def test_the_folder_of_the_caller_is_not_taken_for_the_package(tmp_path: Path):
    (tmp_path / "bps_rdma").mkdir()
    (tmp_path / "bps_rdma" / "__init__.py").write_text("raise ImportError('a checkout')")
    done = harness.run_command([harness.binary("bps"), "run", "-H", "localhost", "echo", "runs"], cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "runs\n"), done.stderr


def test_nothing_of_the_job_is_in_the_command_that_leads_to_a_host():
    words = words_for(["ssh", "-p", "22"], "me@host1", "/a b/python")
    assert words[:3] == ["ssh", "-p", "22"]
    assert words[-2] == "me@host1"
    assert shlex.split(words[-1])[:3] == ["exec", "/a b/python", "-c"]
    assert "bps_rdma.launch.remote.agent" in words[-1]
    assert words_for(["/usr/bin/lsf-rsh"], "h", "/p")[:2] == ["/usr/bin/lsf-rsh", "h"], "no options of ssh"
