# SPDX-License-Identifier: Apache-2.0
"""What the tests know about the RDMA device that BPS_TEST_HCA names, from sysfs and the `rdma` tool.

In the VM (ci/vm) the kernel is ours: tests there may add links, lose packets and remove devices. On a machine with
a card they may not.
"""

import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HCA = os.environ.get("BPS_TEST_HCA", "")
IN_VM = os.environ.get("BPS_VM") == "1"
# The distribution's, because python3-pyverbs is not on PyPI; the tests' own Python may be another one.
SYSTEM_PYTHON = "/usr/bin/python3"


def command(*args: str) -> str:
    """Runs a tool that must succeed; returns what it printed."""
    done = subprocess.run(args, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' '.join(args)}: {done.stderr or done.stdout}"
    return done.stdout


def rdma(*args: str) -> list[dict[str, Any]]:
    """`rdma ARGS`, parsed."""
    return list(json.loads(command("rdma", "-j", *args) or "[]"))


def resources(hca: str = HCA) -> dict[str, int]:
    """How many objects of each kind the whole machine has open on the device: qp, cq, mr, pd, cm_id, ctx, srq."""
    found = next(line for line in rdma("resource", "show") if line["ifname"] == hca)
    return {name: count for name, count in found.items() if name not in ("ifindex", "ifname")}


def queue_pairs(pids: Iterable[int], hca: str = HCA) -> list[dict[str, Any]]:
    """The connected queue pairs of these processes: `pid`, `lqpn`, `rqpn`, `state`, `sq-psn` and more.

    The kernel names the thread that made a queue pair; here `pid` is its process.
    """
    process_of = {int(task.name): pid for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()}
    found = [qp for qp in rdma("resource", "show", "qp", "link", hca) if qp.get("pid") in process_of]
    return [qp | {"pid": process_of[qp["pid"]]} for qp in found if qp["type"] == "RC"]


def is_rxe(hca: str = HCA) -> bool:
    """Whether it is rxe, whose queue pairs show their packet sequence numbers as they go."""
    return (Path("/sys/class/infiniband") / hca / "parent").exists()


def hardware_counters(hca: str = HCA) -> dict[str, int]:
    """sent_pkts, rcvd_pkts, retry_exceeded_err, ... as far as the device counts them; nothing when it is removed."""
    folder = Path("/sys/class/infiniband") / hca / "ports/1/hw_counters"
    try:
        return {path.name: int(path.read_text()) for path in folder.iterdir() if path.name != "lifespan"}
    except OSError:  # perhaps just now
        return {}


def netdev(hca: str = HCA) -> str:
    """The network interface that the device sits on."""
    return (Path("/sys/class/infiniband") / hca / "ports/1/gid_attrs/ndevs/0").read_text().strip()


def addresses(family: int = 4, hca: str = HCA) -> list[str]:
    """Addresses of that interface, without link-local ones."""
    found = json.loads(command("ip", "-j", f"-{family}", "addr", "show", "dev", netdev(hca)))
    return [info["local"] for info in found[0].get("addr_info", []) if info["scope"] == "global"]


# ---- In the VM only


@dataclass(frozen=True)
class Device:
    """An rxe device of a test's own."""

    hca: str
    netdev: str
    address: str


@dataclass(frozen=True)
class Cable:
    """Two devices and what is between them."""

    ends: tuple[Device, Device]

    def rank_env(self) -> list[dict[str, str]]:
        """For a job of two ranks: rank 0 at one end, rank 1 at the other."""
        return [
            {"BPS_RDMA_HCA": f"={end.hca}", "BPS_NODE_HOST": end.address, "BPS_INTERFACE": end.netdev}
            for end in self.ends
        ]

    def disturb(self, *netem: str, at: tuple[int, ...] = (0, 1)) -> None:
        """Loses or delays what leaves these ends, in the words of tc-netem(8); nothing: as new."""
        for end in [self.ends[number] for number in at]:
            with suppress(AssertionError):  # there may be none
                command("tc", "qdisc", "del", "dev", end.netdev, "root")
            if netem:
                command("tc", "qdisc", "add", "dev", end.netdev, "root", "netem", "limit", "100000", *netem)

    def set_link(self, state: str, at: int = 0) -> None:
        """Sets the interface of an end "down" or "up". The other end sees that its carrier is gone, or back."""
        command("ip", "link", "set", self.ends[at].netdev, state)
        if state == "up":
            route_to(self.ends[at], self.ends[1 - at])  # the kernel has dropped it

    def packets(self) -> tuple[int, int]:
        """Sent so far by either end."""
        first, second = (int(self._statistic(end, "tx_packets")) for end in self.ends)
        return first, second

    def dropped(self) -> int:
        """Packets that netem has lost since disturb()."""
        found = [json.loads(command("tc", "-j", "-s", "qdisc", "show", "dev", end.netdev)) for end in self.ends]
        return sum(int(qdiscs[0]["drops"]) for qdiscs in found)

    @staticmethod
    def _statistic(end: Device, name: str) -> str:
        return (Path("/sys/class/net") / end.netdev / "statistics" / name).read_text()


@contextmanager
def cables(count: int) -> Iterator[list[Cable]]:
    """Cables whose ends are all in this kernel: first ends c0, u0, ... and second ends c1, u1, ...

    Left to itself the kernel delivers what goes to an address of its own at once. So the table of own addresses is
    asked last, and before it come rules: what starts here (iif lo) at one end and goes to the other takes the wire.
    """
    made = [_ends(number) for number in range(count)]
    rules = 0
    command("ip", "rule", "add", "pref", "200", "lookup", "local")
    command("ip", "rule", "del", "pref", "0")
    try:
        for ends in made:
            command("ip", "link", "add", ends[0].netdev, "type", "veth", "peer", "name", ends[1].netdev)
            for end in ends:
                command("ip", "addr", "add", f"{end.address}/32", "dev", end.netdev)
                command("ip", "link", "set", end.netdev, "mtu", "9000", "up")
            for near, far in (ends, ends[::-1]):
                route_to(near, far)
                way = ["from", near.address, "to", far.address, "iif", "lo"]
                command("ip", "rule", "add", "pref", "100", *way, "lookup", "main")
                rules += 1
                command("rdma", "link", "add", near.hca, "type", "rxe", "netdev", near.netdev)
        yield [Cable(ends) for ends in made]
    finally:
        for ends in made:
            with suppress(AssertionError):
                command("ip", "link", "del", ends[0].netdev)  # and with it the other end and both devices
        command("ip", "rule", "add", "pref", "0", "lookup", "local")
        for pref in ["100"] * rules + ["200"]:
            command("ip", "rule", "del", "pref", pref)


def _ends(number: int) -> tuple[Device, Device]:
    name, network = "cuvw"[number], f"10.99.{2 * number}"
    return Device(f"rxe_{name}0", f"{name}0", f"{network}.1"), Device(f"rxe_{name}1", f"{name}1", f"{network}.2")


def route_to(near: Device, far: Device) -> None:
    """The way from one end of a cable to the other."""
    command("ip", "route", "replace", far.address, "dev", near.netdev, "src", near.address)


@contextmanager
def spare_device() -> Iterator[Device]:
    """A device that a test may remove."""
    device = Device("rxe_s", "s0", "10.99.1.1")
    command("ip", "link", "add", device.netdev, "type", "dummy")
    try:
        command("ip", "link", "set", device.netdev, "mtu", "9000", "up")
        command("ip", "addr", "add", f"{device.address}/24", "dev", device.netdev)
        command("rdma", "link", "add", device.hca, "type", "rxe", "netdev", device.netdev)
        yield device
    finally:
        command("ip", "link", "del", device.netdev)
