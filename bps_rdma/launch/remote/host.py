# SPDX-License-Identifier: Apache-2.0
"""What an agent finds out about its host: whether the job can run there, its addresses, and which others it reaches."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bps_rdma.errors import BpsError, PortTakenError
from bps_rdma.launch.environment import find_binary, free_port
from bps_rdma.launch.remote.routes import Address

_SIOCGIFADDR = 0x8915
_CALL_S = 2.0  # for one address: networks of a cluster answer within a millisecond
_CALLERS = 64  # threads
_FREE = 2  # for the scheduler, and for MASTER_PORT
_BACKLOG = 1024  # the whole job may call at the same moment


def problems(folder: str, command: Sequence[str], path: str, binaries: Sequence[str]) -> list[str]:
    """Go to the folder of the job, and say what is not there as it is on the launcher's host.

    Args:
        folder: where the ranks run.
        command: what they run; empty: no rank runs here.
        path: the PATH of the ranks.
        binaries: plain binaries that are needed.
    """
    found = []
    try:
        os.chdir(folder)
    except OSError as error:
        if command:
            found.append(f"no directory {folder}" if isinstance(error, FileNotFoundError) else str(error))
    if command and not found:
        if shutil.which(command[0], path=path) is None:
            found.append(f"no command {command[0]}")
        script = next((word for word in command[1:] if not word.startswith("-")), "")
        of_python = Path(command[0]).name.startswith("python") and not {"-m", "-c"} & set(command[1:])
        if of_python and script.endswith(".py") and not Path(script).is_file():
            found.append(f"no file {script} in {folder}")
    for name in binaries:
        try:
            find_binary(name)
        except BpsError:
            found.append(f"no {name}")
    return found


def addresses() -> list[Address]:
    """The addresses of this host that others may reach, IPv4 first."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no address of this kind
                raw = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                found.append(Address(socket.inet_ntoa(raw[20:24]), name, _speed_of(name)))
    with contextlib.suppress(OSError):  # no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            raw6, _, _, scope, _, name = line.split()
            if scope == "00":  # global
                found.append(Address(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(raw6)), name, _speed_of(name)))
    return [one for one in found if not one.address.startswith("127.")]


def _speed_of(interface: str) -> int:
    try:
        return max(int(Path(f"/sys/class/net/{interface}/speed").read_text()), 0)
    except (OSError, ValueError):
        return 0


def is_here(name: str) -> bool:
    """Returns whether this name or address is one of this host."""
    try:
        known = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in known:
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.bind(address)
            return True
    return False


def port_range(text: str) -> range | None:
    """What BPS_PORTS says; None: any. The launcher has checked it."""
    first, dash, last = text.partition("-")
    return range(int(first), int(last) + 1) if dash else None


def free_ports(needed: int, ports: range | None) -> list[int]:
    """Two ports that nobody listens on at any address: of a range the last ones, because data takes the first ones.

    Args:
        needed: how many of a range must be free, these two included.
        ports: the range; None: any port.

    Raises:
        PortTakenError: there are fewer.
    """
    found: list[int] = []
    if ports is None:
        while len(found) < _FREE:
            found = list({*found, free_port("")})
        return found
    for port in reversed(ports):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            probe.listen()
            found.append(port)
        if len(found) == needed:
            return found[:_FREE]
    what = f"only {len(found)} of the {needed} ports free that the job needs of BPS_PORTS={ports[0]}-{ports[-1]}"
    raise PortTakenError(what, "name a larger range (ss -ltnp shows who listens)")


class Answering:
    """Answers every caller with a token, so that a caller knows that it has reached this host and no other.

    It has a thread of its own, which ends with close().
    """

    def __init__(self, token: str, ports: range | None) -> None:
        """Listen. Raises PortTakenError when every port is taken."""
        self._token = token.encode()
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        for port in ports or [0]:
            with contextlib.suppress(OSError):
                self._socket.bind(("", port))
                self._socket.listen(_BACKLOG)
                break
        else:
            self._socket.close()
            raise PortTakenError("no port free", "name a larger range with BPS_PORTS")
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:  # closed
                return
            with caller, contextlib.suppress(OSError):
                caller.settimeout(_CALL_S)
                caller.sendall(self._token)

    def close(self) -> None:
        """Stop; the thread has ended afterwards."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def reach(targets: Sequence[Mapping[str, str]]) -> list[str | None]:
    """Call each target; the address of this host on the way there, or None where nobody, or somebody else, answers.

    Args:
        targets: each an `address`, a `port` and the `token` that is expected.
    """
    with ThreadPoolExecutor(min(len(targets), _CALLERS) or 1) as pool:
        return list(pool.map(_call, targets))


def _call(target: Mapping[str, str]) -> str | None:
    wanted = target["token"].encode()
    try:
        with socket.create_connection((target["address"], int(target["port"])), _CALL_S) as connection:
            said = b""
            while len(said) < len(wanted) and (more := connection.recv(len(wanted) - len(said))):
                said += more
            return str(connection.getsockname()[0]) if said == wanted else None
    except OSError:
        return None
