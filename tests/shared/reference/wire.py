# SPDX-License-Identifier: Apache-2.0
"""What members say to each other after the handshake, made a second time from its description in csrc.

For members that tests make up: they know the secret, and say what no member would. A job whose workers and servers have
two loops each leaves them a seat at each server loop, since loop 1 of a worker never meets loop 0 of a server.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path

from harness import PATIENCE

from .handshake import CONTROL, DATA, VERSION, Credentials, Session, shake_hands

TWO_LOOPS = {"BYTEPS_PUSH_THREAD": "2", "BYTEPS_SERVER_ENGINE_THREAD": "2"}
TCP_MAGIC = 0x53504231
ATTACH, CREDITS, PUSH_FAILED, CANCEL, CANCELLED, PING, ECHO = range(7)  # of csrc/tensor/control_messages.h
HAS_PAYLOAD, IS_PUSH, IS_PULL, WANTS_DATA = 1, 2, 4, 8  # of csrc/tensor/push_header.h
VAN_DECLARE, VAN_ASK, VAN_ASKED = 9, 23, 24  # of csrc/van/messages.h


def local_names(pid: int) -> list[str]:
    """The local sockets at which this process listens for others of its host."""
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if f"@bps-{pid}-" in line]
    return ["\0" + name[1:] for name in names]


def listening_port(pid: int) -> int:
    """The TCP port on which this process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            return int(fields[1].split(":")[1], 16)
    raise AssertionError(f"process {pid} does not listen")


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def is_closed(connection: socket.socket, timeout: float = 30) -> bool:
    """Whether the other side ends the connection."""
    connection.settimeout(timeout * PATIENCE)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionResetError:
        pass
    return True


@dataclass
class Messages:
    """A stream of messages: of a client, with their codes unless it is of one host."""

    session: Session
    signs: bool
    _sent: int = 0
    _unread: bytes = b""

    def frame(self, message: bytes) -> bytes:
        """As it travels, with the next number."""
        framed = struct.pack("<I", len(message)) + message
        if self.signs:
            key = hmac.digest(self.session.key, b"to server", "sha256")
            # What is long is signed by its digest.
            signed = framed if len(framed) <= 256 else b"digest" + hashlib.sha256(framed).digest()
            framed += hmac.digest(key, struct.pack("<Q", self._sent) + signed, "sha256")[:16]
            self._sent += 1
        return framed

    def say(self, *messages: bytes) -> None:
        self.session.socket.sendall(b"".join(self.frame(message) for message in messages))

    def hear(self) -> bytes:
        """The next message of the other side; raises ConnectionError at the end of the connection."""
        (size,) = struct.unpack("<I", self._read(4))
        message = self._read(size)
        if self.signs:
            self._read(16)
        return message

    def _read(self, size: int) -> bytes:
        while len(self._unread) < size:
            more = self.session.socket.recv(1 << 16)
            if not more:
                raise ConnectionError("the connection has ended")
            self._unread += more
        taken, self._unread = self._unread[:size], self._unread[size:]
        return taken


@dataclass(frozen=True)
class Seat:
    """What a member of the job may connect to at loop 0 of a server: as the loop 1 of the worker `node`."""

    pid: int  # of the server
    credentials: Credentials  # within the view
    node: int
    epoch: int = 1

    @staticmethod
    def at(job_name: str, scheduler_port: int, pid: int, node: int) -> Seat:
        base = Credentials.of(job_name, job_name)
        view = shake_hands(connect(scheduler_port), base).view
        return Seat(pid, base.within(view), node, struct.unpack("<QI", view)[1])

    def control(self, *, local: bool) -> Messages:
        return Messages(self._connect(CONTROL, local), signs=not local)

    def data(self, *, local: bool) -> Session:
        return self._connect(DATA, local)

    def _connect(self, plane: int, local: bool) -> Session:
        if local:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(30)
            connection.connect(local_names(self.pid)[0])
        else:
            connection = connect(listening_port(self.pid))
        return shake_hands(connection, self.credentials, plane, node=self.node, client_loop=1, server_loop=0)

    # ---- Control messages

    def message(self, kind: int, fields: bytes) -> bytes:
        return struct.pack("<IB", self.epoch, kind) + fields

    def attach(self, largest: int = 1 << 16, needs_slots: bool = True) -> bytes:
        return self.message(ATTACH, struct.pack("<Q?B?", largest, needs_slots, 1, False))

    def cancel(self, tensor: int, partitions: list[tuple[int, int]], round_number: int = 0, group: int = 0) -> bytes:
        """`partitions`: immediate and number of each."""
        parts = b"".join(struct.pack("<III", immediate, partition, 0) for immediate, partition in partitions)
        head = struct.pack("<III?B", group, tensor, round_number, False, 9)
        return self.message(CANCEL, head + struct.pack("<III", 0, 0, len(partitions)) + parts)

    def ping(self, number: int) -> bytes:
        return self.message(PING, struct.pack("<I", number))

    def credits(self, message: bytes) -> list[Slot]:
        """The slots of a message, which names no other rails; none of another message."""
        if message[4] != CREDITS:
            return []
        (count,) = struct.unpack_from("<I", message, 5)
        return [Slot(*struct.unpack_from("<IQQQ", message, 9 + 28 * i)) for i in range(count)]


@dataclass(frozen=True)
class Slot:
    number: int
    key: int
    address: int
    capacity: int


@dataclass(frozen=True)
class Push:
    """A push header: of float32, summed, unless it says otherwise."""

    tensor: int
    length: int
    member: int
    immediate: int = 0
    flags: int = HAS_PAYLOAD | IS_PUSH | IS_PULL | WANTS_DATA
    partition: int = 0
    round: int = 0
    group: int = 0
    epoch: int = 1
    answer_key: int = 0
    answer_address: int = 0
    version: int = field(default=VERSION)

    def encode(self) -> bytes:
        names = (self.group, self.tensor, self.partition, self.round, self.immediate, self.epoch)
        answer = (self.answer_key, self.answer_address, 0, 0)
        return struct.pack("<HBBBBHIIIIII", self.version, 0, 0, self.flags, 0, self.member, *names) + struct.pack(
            "<IIQQiI",
            self.length,
            0,
            *answer,  # the root of a broadcast is 0
        )


def tcp_frame(slot: Slot, payload: bytes, length: int | None = None) -> bytes:
    """A write into a slot. `length`: what the frame says of it."""
    size = len(payload) if length is None else length
    return struct.pack("<IIQQQ", TCP_MAGIC, slot.number, slot.key, slot.address, size) + payload


def tensor_id(name: str, group: int = 0) -> int:
    """Of the first tensor of a job that has it: of no other whose hash is the same."""
    value = 0xCBF29CE484222325
    for byte in struct.pack("<I", group) + name.encode():
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return (value ^ value >> 30) % (1 << 30)


def loop_of(name: str, loops: int, partition: int = 0) -> int:
    """The loop of its server that sums a partition."""
    key = (tensor_id(name) << 16) + partition
    return (key * 0x9E3779B97F4A7C15 % (1 << 64) >> 32) % loops
