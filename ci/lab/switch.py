# SPDX-License-Identifier: Apache-2.0
"""The network between the hosts: a bridge for management and one for each rail, in this process's own namespace."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .host import MTU, Host

BURST = "64kb"  # of a token bucket: one segment as large as the stack makes them


class NetworkError(RuntimeError):
    """A command that sets up the network failed."""


def run(command: str) -> str:
    """What a command wrote; raises NetworkError when it fails."""
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetworkError(f"{command}: {done.stderr or done.stdout}")
    return done.stdout


def is_own_namespace() -> bool:
    """Whether this network is ours to change: ci/lab/run starts with one that has no interface but lo."""
    return {path.name for path in Path("/proc/sys/net/ipv4/conf").iterdir()} <= {"all", "default", "lo"}


class Switch:
    """Joins hosts. The end of a host's cable is a tap: h<index>m, h<index>r<rail>."""

    def __init__(self, hosts: Sequence[Host], rails: int) -> None:
        run("ip link set lo up")
        bridges = ["management", *(f"rail{rail}" for rail in range(rails))]
        self._links = [*bridges, *(port for host in hosts for port in host.ports())]
        for bridge in bridges:
            run(f"ip link add {bridge} mtu {MTU} type bridge forward_delay 0 mcast_snooping 0")
            run(f"ip link set {bridge} up")
        run("ip addr add 10.96.0.254/24 dev management")
        for host in hosts:
            for port, bridge in zip(host.ports(), bridges, strict=True):
                run(f"ip tuntap add dev {port} mode tap")
                run(f"ip link set {port} mtu {MTU} master {bridge} up")

    def remove(self) -> None:
        """For the next lab. No host may run any more."""
        for link in self._links:
            run(f"ip link del {link}")

    def shape(self, host: Host, mbit: float, queue: str) -> None:
        """What the switch sends to a host: at most so much, and what does not fit the port's queue is dropped."""
        for port in host.ports()[1:]:
            run(f"tc qdisc replace dev {port} root tbf rate {mbit}mbit burst {BURST} latency {queue}")

    def unshape(self, host: Host) -> None:
        """As fast as it goes again."""
        for port in host.ports()[1:]:
            if "tbf" in run(f"tc qdisc show dev {port}"):
                run(f"tc qdisc del dev {port} root")

    def cut(self, host: Host, rail: int) -> None:
        """Packets vanish from now on."""
        # With the tap set down the card in the guest would stay dead for ever.
        run(f"ip link set {host.ports()[1 + rail]} nomaster")

    def heal(self, host: Host, rail: int) -> None:
        """The cable works again."""
        run(f"ip link set {host.ports()[1 + rail]} master rail{rail}")

    def carried(self, host: Host, rail: int) -> tuple[int, int]:
        """Bytes so far over a cable: from the host, to the host."""
        [shown] = json.loads(run(f"ip -j -s link show dev {host.ports()[1 + rail]}"))
        return shown["stats64"]["rx"]["bytes"], shown["stats64"]["tx"]["bytes"]

    def dropped(self, host: Host, rail: int) -> int:
        """Packets that did not fit the queue of a shaped port."""
        return sum(q["drops"] for q in json.loads(run(f"tc -j -s qdisc show dev {host.ports()[1 + rail]}")))
