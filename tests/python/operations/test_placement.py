# SPDX-License-Identifier: Apache-2.0
"""Servers inside the workers and servers of their own share the sums (BPS_PLACEMENT).

The hosts of these jobs are one machine, told apart by BPS_HOST_ID. Their links are as fast as BPS_LINK_GBPS says.
"""

import math
from typing import Any

import harness
import numpy as np
import pytest
from bodies.collectives import broadcasts, mixed_kinds, pushes_and_pulls, scatter_and_gather

PIECES = 240
ELEMENTS = 1024  # of a piece
CUT = harness.cut_at(4 * ELEMENTS)


def shares(bps: Any, pieces: int = PIECES, tensors: int = 1) -> list[float]:
    """Each server's part of the bytes; the sums must be right, too."""
    for number in range(tensors):
        mine = np.arange(pieces * ELEMENTS, dtype=np.float32) % 1000 + bps.rank() + number
        summed = bps.push_pull(mine, False, f"t{number}")
        others = sum(rank - bps.rank() for rank in range(bps.size()))
        np.testing.assert_array_equal(summed, mine * bps.size() + others)
    return parts(bps)


def parts(bps: Any) -> list[float]:
    """The part of all pieces that each server sums."""
    from bps_rdma import job

    process = job.current().process
    servers = [server for tensor in job.current().tensors.values() for server in process.servers_of(tensor)]
    return [servers.count(server) / len(servers) for server in range(process.servers)]


def run(
    layout: str,
    servers: int | None,
    body: Any = shares,
    *args: Any,
    links: list[float] | None = None,
    sums: list[float] | None = None,
    env: dict[str, str] | None = None,
) -> list[Any]:
    options = harness.on_hosts(layout)
    for own, link in zip(options["rank_env"], links or [], strict=False):
        own["BPS_LINK_GBPS"] = str(link)
    for own, rate in zip(options["rank_env"], sums or [], strict=False):
        own["BPS_SUM_GBPS"] = str(rate)
    return harness.run(body, *args, servers=servers, env=CUT | (env or {}), **options)


def same_on_all(found: list[Any]) -> Any:
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_one_spare_host_takes_what_is_best_for_the_links(workers):
    found = same_on_all(run("abcd"[:workers], 1))
    spare = 2 * (workers - 1) / (workers**2 + workers - 2)
    assert found == pytest.approx([spare] + [(1 - spare) / workers] * workers, abs=1.5 / PIECES)


def test_workers_serve_no_more_where_the_others_suffice():
    """Then there are no servers inside the workers."""
    fast = {"BPS_LINK_GBPS": "2"}  # of the host of the dedicated ones
    assert same_on_all(run("ab", 2, links=[1, 1], env=fast)) == pytest.approx([1 / 2] * 2)
    assert same_on_all(harness.run(shares, workers=2, servers=1)) == [1]  # on one host nothing crosses a link


def test_a_slow_link_gets_less():
    found = same_on_all(run("abcd", None, links=[1, 1, 1, 0.5]))
    assert found == pytest.approx([1 / 3] * 3 + [0], abs=1.5 / PIECES)


def test_a_slow_server_sums_less():
    """Where it adds less than its link carries: 4 * 0.1 / 0.25 is as long as 1 + 2 * 0.3 on the links of the others."""
    placement = same_on_all(run("abcd", None, why, links=[1] * 4, sums=[8, 8, 8, 0.25]))
    assert [one["limit"] for one in placement["hosts"]] == ["link"] * 3 + ["sums"]
    assert placement["hosts"][3]["sum_gbps"] == 0.25
    assert placement["hosts"][3]["sum_s_per_gb"] == pytest.approx(1.6 * 8, abs=1e-3)
    found = same_on_all(run("abcd", None, links=[1] * 4, sums=[8, 8, 8, 0.25]))
    assert found == pytest.approx([0.3] * 3 + [0.1], abs=1.5 / PIECES)
    # Beside three hosts a spare one would sum 0.4 of the bytes, in pushes of 1.2.
    found = same_on_all(run("abc", 1, sums=[8] * 3, env={"BPS_LINK_GBPS": "1", "BPS_SUM_GBPS": "0.5"}))
    assert found == pytest.approx([0.2105] + [0.2632] * 3, abs=1.5 / PIECES)


@pytest.mark.parametrize(
    ("layout", "sums"), [("abcd", [1, 1.01, 5, 800]), ("abcd", None), ("aabbccdd", [0.5, 0.6] * 4)]
)
def test_servers_that_are_faster_than_their_links_may_differ(layout, sums):
    found = same_on_all(run(layout, None, links=[1] * len(layout), sums=sums))
    assert found == pytest.approx([1 / len(layout)] * len(layout), abs=1.5 / PIECES)


def adds(bps: Any) -> list[float]:
    return [member["sum_gbps"] for member in bps.dump()["members"]]


def test_what_a_server_adds_is_measured_where_the_speed_of_its_link_is_known():
    assert same_on_all(run("ab", 1, adds, sums=[3.5])) == [3.5, 0, 0]
    for rate in same_on_all(run("ab", 1, adds, env={"BPS_LINK_GBPS": "1"})):
        steps = 2 * math.log2(rate * 1e9 / 8)
        assert steps == pytest.approx(round(steps), abs=1e-5)


@pytest.mark.parametrize(("placement", "expected"), [("dedicated", [1]), ("embedded", [0, 1 / 3, 1 / 3, 1 / 3])])
def test_placements_by_name(placement, expected):
    found = same_on_all(run("abc", 1, env={"BPS_PLACEMENT": placement}))
    assert found == pytest.approx(expected, abs=1.5 / PIECES)


def test_several_ranks_of_a_host_share_what_the_host_sums():
    """Hosts of two ranks and of one rank contribute once each, so each sums a third."""
    found = same_on_all(run("aabbc", None))
    assert found == pytest.approx([1 / 6] * 4 + [1 / 3], abs=1.5 / PIECES)


@pytest.mark.parametrize("hash_", ["raw", "djb2", "balanced"])
def test_small_tensors_are_shared_as_well(hash_):
    found = same_on_all(run("abc", 1, shares, 16, 60, env={"BYTEPS_KEY_HASH_FN": hash_}))
    assert found == pytest.approx([0.4] + [0.2] * 3, abs=0.02 if hash_ == "balanced" else 0.05)


def told(bps: Any) -> list[tuple[float, float | None]]:
    return [(member["link_gbps"], member.get("share")) for member in bps.dump()["members"]]


def test_a_dump_says_who_sums_how_much():
    found = same_on_all(run("ab", 1, told, links=[4, 2], env={"BPS_LINK_GBPS": "1"}))
    assert [link for link, _ in found] == [4, 2, 1]
    # Two hosts contribute, the slower one in 1/2 of a unit of time. The spare one sums half as much as that takes.
    assert [share for _, share in found] == pytest.approx([0.375, 0.375, 0.25], abs=1e-4)
    elastic = run("ab", 1, told, env={"BPS_MIN_WORKERS": "1"})
    assert elastic[0][-1][1] is None


def why(bps: Any) -> dict[str, Any]:
    placement: dict[str, Any] = bps.dump()["placement"]
    return placement


def test_a_dump_says_why():
    """The slower host's own bytes are the limit: each crosses its link of 2 Gbit/s once, which takes 4 s per GB."""
    found = same_on_all(run("ab", 1, why, links=[4, 2], env={"BPS_LINK_GBPS": "1"}))
    assert (found["setting"], found["in_turn"]) == ("auto", False)
    hosts = found["hosts"]
    assert [one["contributions"] for one in hosts] == [1, 1, 0]
    assert [one["link_gbps"] for one in hosts] == [4, 2, 1]
    assert [one["share"] for one in hosts] == pytest.approx([0.375, 0.375, 0.25], abs=1e-4)
    assert [one["crossings"] for one in hosts] == pytest.approx([1, 1, 0.5], abs=1e-4)
    assert [one["link_s_per_gb"] for one in hosts] == pytest.approx([2, 4, 4], abs=1e-3)
    assert [one["limit"] for one in hosts] == ["", "link", "link"]
    assert all(one["host"] for one in hosts)


def test_a_dump_says_why_of_equal_links():
    """Nobody knows how fast they are: the busiest ones are the limit all the same. Two ranks contribute once."""
    found = same_on_all(run("aabc", None, why))
    assert [one["contributions"] for one in found["hosts"]] == [1, 1, 1]
    assert [one["crossings"] for one in found["hosts"]] == pytest.approx([4 / 3] * 3, abs=1e-4)
    assert [one["limit"] for one in found["hosts"]] == ["link"] * 3
    assert not any("link_gbps" in one for one in found["hosts"])
    elastic = same_on_all(run("ab", 1, why, env={"BPS_MIN_WORKERS": "1"}))
    assert elastic == {"setting": "auto", "in_turn": True}
    assert same_on_all(run("ab", 1, why, env={"BPS_PLACEMENT": "embedded"}))["setting"] == "embedded"


def deal(bps: Any, pieces: int, tensors: int) -> dict[str, Any]:
    """The bytes on each server and what its weight says, as a dump, metrics and Prometheus show them."""
    from bps_rdma import job

    served = parts_of_all(bps, pieces, tensors)
    members = sorted(bps.dump()["members"], key=lambda member: member["server_rank"])
    servers = [member for member in members if member["server_rank"] >= 0]
    families = {name: samples for name, _, _, samples in job.current().process.metric_families()}
    total = bps.metrics()["total"]
    found = {
        "bytes": [member["dealt_bytes"] for member in servers],
        "due": [member["due_bytes"] for member in servers],
        "shares": [member["share"] for member in servers],
        "beyond": total["misdealt_bytes"],
    }
    assert found["bytes"] == [count * 4 * ELEMENTS for count in served]
    assert total["dealt_bytes"] == sum(found["bytes"])
    assert [sample[2] for sample in families["bps_dealt_bytes"]] == found["bytes"]
    assert [sample[2] for sample in families["bps_due_bytes"]] == pytest.approx(found["due"], abs=1)
    return found


def parts_of_all(bps: Any, pieces: int, tensors: int) -> list[int]:
    """The pieces of all tensors that each server sums."""
    from bps_rdma import job

    for number in range(tensors):
        bps.push_pull(np.zeros(pieces * ELEMENTS, np.float32), name=f"t{number}")
    process = job.current().process
    servers = [server for tensor in job.current().tensors.values() for server in process.servers_of(tensor)]
    return [servers.count(server) for server in range(process.servers)]


@pytest.mark.parametrize(("pieces", "tensors"), [(250, 1), (17, 1), (250, 3)])
@pytest.mark.parametrize(("hash_", "most"), [("raw", 1), ("balanced", 1), ("djb2", 3)])
def test_the_error_of_dealing_is_counted(hash_, most, pieces, tensors):
    """Of each tensor every server has its share but for a piece; djb2 jumps where a piece's number gets a digit."""
    links, env = [1, 1, 1, 0.5], {"BYTEPS_KEY_HASH_FN": hash_, "BPS_LINK_GBPS": "1"}
    found = same_on_all(run("abcd", 2, deal, pieces, tensors, links=links, env=env))
    size = pieces * tensors * 4 * ELEMENTS
    assert sum(found["bytes"]) == size
    assert found["due"] == pytest.approx([share * size for share in found["shares"]], rel=1e-3)
    errors = [dealt - due for dealt, due in zip(found["bytes"], found["due"], strict=True)]
    assert max(map(abs, errors)) <= most * tensors * 4 * ELEMENTS
    assert found["beyond"] == pytest.approx(sum(max(error, 0) for error in errors), abs=len(errors))
    assert found["beyond"] > 0  # the shares are no whole numbers of pieces


def test_servers_that_take_turns_have_equal_parts():
    env = {"BPS_MIN_WORKERS": "1"}
    found = run("ab", 3, in_turn, env=env)
    assert found == [[100 * 4 * ELEMENTS] * 3 + [0, [100 * 4 * ELEMENTS] * 3]] * 2


def in_turn(bps: Any) -> list[Any]:
    bps.push_pull(np.zeros(300 * ELEMENTS, np.float32), name="t")
    servers = [member for member in bps.dump()["members"] if member["server_rank"] >= 0]
    due = [member["due_bytes"] for member in servers]
    return [*(member["dealt_bytes"] for member in servers), bps.metrics()["total"]["misdealt_bytes"], due]


def of_a_pair(bps: Any) -> list[float]:
    if bps.rank() not in (1, 2):
        bps.barrier()
        return []
    mine = np.full(PIECES * ELEMENTS, bps.rank(), np.float32)
    assert (bps.push_pull(mine, False, "pair", group=bps.new_group([1, 2])) == 3).all()
    bps.barrier()
    return parts(bps)


def test_groups_have_weights_of_their_own():
    """Two of four hosts contribute, so that the other two are spare hosts as the one with the dedicated server."""
    empty, found, other, _ = run("abcd", 1, of_a_pair)
    assert not empty
    assert found == other
    dedicated, *workers = found
    spare = [dedicated, workers[0], workers[3]]
    assert spare == pytest.approx([1 / 3] * 3, abs=1.5 / PIECES)


def everything(bps: Any) -> int:
    for body in (pushes_and_pulls, broadcasts, mixed_kinds):
        body(bps)
    scatter_and_gather(bps, "plain")
    return bps.size()


@pytest.mark.parametrize(("layout", "servers"), [("abc", 1), ("aabb", 1), ("abcd", 2)])
def test_every_operation(layout, servers):
    run(layout, servers, everything)


def test_servers_may_run_different_numbers_of_loops():
    env = {"BPS_SERVER_ENGINE_THREAD": "3", "BYTEPS_PUSH_THREAD": "1"}
    found = same_on_all(run("abc", 1, env=env))
    assert found == pytest.approx([0.4] + [0.2] * 3, abs=1.5 / PIECES)


def in_other_orders(bps: Any) -> None:
    """Each rank starts with another tensor, and all have more pieces than may be under way."""
    tensors = [np.full(PIECES * ELEMENTS, bps.rank() + number, np.float32) for number in range(bps.size())]
    turn = bps.rank()
    for _ in range(3):
        handles = {i: bps.push_pull_async(tensors[i], False, f"t{i}") for i in np.roll(range(bps.size()), turn)}
        for number, handle in handles.items():
            ranks = bps.size()
            assert (bps.synchronize(handle) == ranks * (ranks - 1) / 2 + ranks * number).all()
    assert bps.metrics()["total"]["pace_stalls"] > 0


@pytest.mark.parametrize("servers", [None, 1])
def test_ranks_that_start_in_different_orders(servers):
    """No server waits for others that wait for it: servers of an operation are kept in step only while they answer."""
    run("abcd", servers, in_other_orders)
