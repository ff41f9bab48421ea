# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: user-mode kernels, each with RDMA (rxe) on cards of its own, joined by a switch.

    with Lab(hosts=4) as lab:                     # inside `ci/lab/run`
        lab.shape(100)                            # Mbit/s, every cable
        process = lab.hosts[0].start("ib_write_bw", ...)
        lab.cut(lab.hosts[1])

Everything runs in the namespaces that ci/lab/run made, and ends with them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .host import Host
from .switch import BURST, Switch, is_own_namespace


class Lab:
    """Threading: of its own thread only. Errors: HostError and NetworkError."""

    def __init__(self, hosts: int, rails: int = 1) -> None:
        """Builds the network; the hosts boot at the beginning of the `with` block. Raises RuntimeError outside."""
        if "BPS_LAB_KERNEL" not in os.environ or not is_own_namespace():
            raise RuntimeError("start this by ci/lab/run, and only one lab at a time")
        scratch = Path(tempfile.mkdtemp(dir=os.environ["BPS_LAB_SCRATCH"]))
        self.hosts = [Host(index, rails, scratch) for index in range(hosts)]
        self.switch = Switch(self.hosts, rails)
        self._cut: set[tuple[int, int]] = set()

    def __enter__(self) -> Lab:
        self.boot()
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            if host.alive:
                host.kill()
        self.switch.remove()

    def boot(self) -> None:
        """Boots every host that does not run."""
        dead = [host for host in self.hosts if not host.alive]
        for host in dead:
            host.boot()
        for host in dead:
            host.await_ready()

    def reset(self) -> None:
        """As after the beginning: all hosts run, nothing is cut, shaped or disturbed."""
        for host in self.hosts:
            if host.alive and host.frozen:
                host.kill()  # its clock is late
        for index, rail in list(self._cut):
            self.heal(self.hosts[index], rail)
        self.boot()
        for host in self.hosts:
            self.switch.unshape(host)
        self.disturb()

    def shape(self, mbit: float, queue: str = "200ms") -> None:
        """Give every cable a rate, in each direction.

        The host's card waits; the switch's port drops what `queue` does not hold.
        """
        for host in self.hosts:
            self.switch.shape(host, mbit, queue)
        self._on_rails(f"tc qdisc replace dev DEVICE root tbf rate {mbit}mbit burst {BURST} latency 1000ms")

    def disturb(self, *netem: str) -> None:
        """Delay or lose what leaves any host, in the words of tc-netem(8); nothing: as new.

        For example "rate", "100mbit", "loss", "1%". This replaces shape().
        """
        command = "tc qdisc del dev DEVICE root 2> /dev/null; true"
        if netem:
            command += f"; tc qdisc add dev DEVICE root netem limit 100000 {' '.join(netem)}"
            for host in self.hosts:
                self.switch.unshape(host)
        self._on_rails(command)

    def cut(self, host: Host, rail: int = 0) -> None:
        """Pulls a cable: packets vanish and nobody is told."""
        self.switch.cut(host, rail)
        self._cut.add((host.index, rail))

    def heal(self, host: Host, rail: int = 0) -> None:
        """Puts the cable in again."""
        self.switch.heal(host, rail)
        self._cut.discard((host.index, rail))

    def forget_neighbours(self) -> None:
        """No host knows the hardware address of another one on the rails, as after the first boot."""
        self._on_rails("ip neigh flush dev DEVICE")

    def carried(self, rail: int = 0) -> list[tuple[int, int]]:
        """Bytes so far on a rail of each host: from it, to it."""
        return [self.switch.carried(host, rail) for host in self.hosts]

    def _on_rails(self, command: str) -> None:
        self._everywhere(
            lambda host: host.run("; ".join(command.replace("DEVICE", f"d{r}") for r in range(len(host.rails))))
        )

    def _everywhere(self, act: Callable[[Host], object]) -> None:
        with ThreadPoolExecutor(len(self.hosts)) as pool:
            list(pool.map(act, self.hosts))
