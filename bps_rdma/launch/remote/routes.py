# SPDX-License-Identifier: Apache-2.0
"""The addresses by which the hosts of a job meet: those that all of them have reached each other by.

Docker's bridges, a network for management, and addresses behind a router look like any other. So every host listens,
and calls every address of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bps_rdma.errors import UnreachableError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Address:
    """A numeric address of a host, its interface, and the speed of that in Mbit/s; 0: unknown."""

    address: str
    interface: str
    speed: int = 0


# By host that called, host that was called, and address that was called: the address of the caller.
Reached = Mapping[str, Mapping[str, Mapping[str, str]]]


@dataclass(frozen=True)
class Routes:
    """The address of each host that the others reach it by, on one network."""

    addresses: Mapping[str, str]


def choose(root: str, addresses: Mapping[str, Sequence[Address]], reached: Reached, only: Sequence[str] = ()) -> Routes:
    """The fastest network that joins all hosts.

    A process takes for its own address that of the route to the scheduler. So the address of the scheduler's host
    decides which addresses of the others are used, and the others must reach each other by those.

    Args:
        root: the host of the scheduler.
        addresses: of each host, the preferred ones first.
        reached: what the hosts have found.
        only: beginnings of the names of interfaces that may be used (BPS_INTERFACE); none: all.

    Raises:
        UnreachableError: no network joins all hosts; says which hosts do not meet.
    """
    if len(addresses) == 1:
        return Routes({root: LOOPBACK})
    best: tuple[int, Routes] | None = None
    for one in addresses[root]:
        if only and not one.interface.startswith(tuple(only)):
            continue
        found = _network(root, one.address, addresses, reached)
        if found is None:
            continue
        speed = min(_speed_of(found[host], addresses[host]) for host in found)
        if best is None or speed > best[0]:
            best = (speed, Routes(found))
    if best is None:
        raise UnreachableError(*_explanation(root, addresses, reached, only))
    return best[1]


def _network(
    root: str, address: str, addresses: Mapping[str, Sequence[Address]], reached: Reached
) -> dict[str, str] | None:
    found = {root: address}
    for host in addresses:
        if host != root:
            source = reached.get(host, {}).get(root, {}).get(address)
            if source is None:
                return None
            found[host] = source
    for caller in found:
        for called, at in found.items():
            if caller != called and at not in reached.get(caller, {}).get(called, {}):
                return None
    return found


def _speed_of(address: str, known: Sequence[Address]) -> int:
    return next((one.speed for one in known if one.address == address), 0)


def _explanation(
    root: str, addresses: Mapping[str, Sequence[Address]], reached: Reached, only: Sequence[str]
) -> tuple[str, str]:
    hint = "check the networks of these hosts and the firewalls between them; BPS_PORTS names the ports to let through"
    if only:
        return f"no interface {', '.join(only)} of {root} is reached by all hosts", "name others with BPS_INTERFACE"
    apart = [
        f"{caller} reaches {called} at none of {', '.join(one.address for one in addresses[called]) or '(no address)'}"
        for caller in addresses
        for called in addresses
        if caller != called and not reached.get(caller, {}).get(called)
    ]
    if not apart:
        return f"no network joins all of {', '.join(addresses)}", hint
    shown = "; ".join(apart[:4]) + (f"; and {len(apart) - 4} more" if len(apart) > 4 else "")
    return f"hosts do not reach each other: {shown}", hint
