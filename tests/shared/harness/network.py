# SPDX-License-Identifier: Apache-2.0
"""A network namespace for each member of a job, joined by two switches: control (the scheduler) and data.

Cutting a connection means that packets vanish, as they do when a switch fails: nobody is told. It is done by giving the
sender a wrong hardware address of the receiver, so each direction can be cut alone.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable

PAIR = ["rank 0", "rank 1"]  # members of the fixture `networks`
PLANES = {"control": "10.201.0", "data": "10.202.0"}
_NOBODY = "02:00:00:00:00:01"


class CannotCutError(RuntimeError):
    """This machine does not let us make networks."""


def why_not() -> str:
    """Why this machine cannot cut networks; empty: it can."""
    if os.geteuid() != 0:
        return "not root"
    try:
        with Network(["a", "b"]):
            return ""
    except (CannotCutError, FileNotFoundError) as error:
        return str(error).strip()


class Network:
    """Namespaces that live as long as this object: a process holds each, and ends when our end of a pipe closes."""

    def __init__(self, members: Iterable[str]) -> None:
        self.members = list(members)
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        for name in ["switch", *self.members]:
            self._holders[name] = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo; exec cat > /dev/null"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        for name, holder in self._holders.items():
            assert holder.stdout is not None
            if holder.stdout.readline() != b"\n":
                raise CannotCutError(f"cannot make a network namespace for {name}")
        switch = [f"link add {plane} type bridge forward_delay 0\nlink set {plane} up" for plane in PLANES]
        for index, name in enumerate(self.members):
            for plane in PLANES:
                ours = f"{plane[0]}{index}"
                switch.append(
                    f"link add {ours} type veth peer name {plane} netns {self._holders[name].pid}\n"
                    f"link set {ours} master {plane} up"
                )
        self._ip("switch", switch)
        for name in self.members:
            lines = ["link set lo up"]
            lines += [f"addr add {self.address(name, plane)}/24 dev {plane}\nlink set {plane} up" for plane in PLANES]
            self._ip(name, lines)

    def address(self, member: str, plane: str) -> str:
        return f"{PLANES[plane]}.{self.members.index(member) + 1}"

    def namespace(self, member: str) -> str:
        """The file that stands for the member's namespace."""
        return f"/proc/{self._holders[member].pid}/ns/net"

    def inside(self, member: str) -> list[str]:
        """What comes before the command of a member."""
        return ["nsenter", f"--net={self.namespace(member)}"]

    def cut(self, victim: str, plane: str, direction: str) -> None:
        """From now on nothing comes out of the victim, or in, or both."""
        others = [name for name in self.members if name != victim]
        for one in PLANES if plane == "all" else [plane]:
            if direction in ("both", "out"):
                self._ip(victim, [self._lost(name, one) for name in others])
            if direction in ("both", "in"):
                for name in others:
                    self._ip(name, [self._lost(victim, one)])

    def part(self, one: str, other: str, plane: str) -> None:
        """From now on these two do not reach each other there."""
        self._ip(one, [self._lost(other, plane)])
        self._ip(other, [self._lost(one, plane)])

    def mend(self, plane: str) -> None:
        """Ends what cut() has done there."""
        for name in self.members:
            self._ip(name, [f"neigh flush dev {plane} nud permanent"])

    def set_link(self, victim: str, plane: str, state: str) -> None:
        """Takes an interface of the victim "down", or "up" again."""
        self._ip(victim, [f"link set {plane} {state}"])

    def _lost(self, receiver: str, plane: str) -> str:
        return f"neigh replace {self.address(receiver, plane)} lladdr {_NOBODY} dev {plane} nud permanent"

    def _ip(self, where: str, lines: list[str]) -> None:
        done = subprocess.run(
            [*self.inside(where), "ip", "-batch", "-"],
            input="\n".join(lines), capture_output=True, text=True, check=False, timeout=20,
        )  # fmt: skip
        if done.returncode != 0:
            raise CannotCutError(done.stderr)

    def close(self) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.communicate()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
