# SPDX-License-Identifier: Apache-2.0
"""Predicts a push_pull on a cluster of a given size: time, bytes per link, memory of servers, control messages.

This is a fluid model. Flows share links max-min fairly, as TCP and InfiniBand do on average. Pieces of the tensor are
modelled where the protocol depends on them: a server answers a piece when the last worker has pushed it, and a worker
has at most a window of pieces in flight to a server. Hosts of one kind behave alike, so the model keeps one state per
kind of hosts, and 4,096 workers take no longer to simulate than 4.

The model has no congestion inside the network, no unfairness among the flows of a link, and no processors except for
the rate at which a server sums. bench/link_lab.py measures small clusters; bench/scale_model.py compares and plots.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bps_rdma.errors import InvalidArgumentError

HEADER_BYTES = 64  # the header of a push; kMaxHeader in csrc/transport/transport.h
SMALL_SLOT = 8192  # bytes; the numbers below are per worker loop and server loop, see csrc/server
MOST_SMALL_SLOTS, FEWEST_SMALL_SLOTS = 128, 8
CREDIT_MESSAGE_BYTES = 33.0
_EPSILON = 1e-6  # bytes


@dataclass(frozen=True)
class Hosts:
    """Hosts of one kind.

    Attributes:
        count: number of hosts.
        gbit_per_s: speed of each host's link, in each direction at the same time.
        worker, server: what runs on each host; both means servers inside the workers.
        ranks: worker processes on each host. They sum in memory first, and send one contribution (BPS_HOST_SUM).
    """

    count: int
    gbit_per_s: float
    worker: bool = False
    server: bool = False
    ranks: int = 1


@dataclass(frozen=True)
class Protocol:
    """Settings of bps_rdma, and properties of the network.

    Attributes:
        partition_bytes: BYTEPS_PARTITION_BYTES.
        window: BPS_SERVER_WINDOW, the pieces that a worker may have in flight to one loop of a server.
        server_loops: BYTEPS_SERVER_ENGINE_THREAD.
        server_memory: BPS_SERVER_MEMORY, bytes for landing slots; windows shrink to fit with many workers.
        latency_s: time from a write to its arrival on an idle network.
        sum_bytes_per_s: speed at which a server sums, in bytes of all workers' pieces.
        piece_s: additional time of a server for each piece.
        wire: bytes on the wire per byte of payload (1.0074 for TCP/IP in frames of 9000 bytes).
    """

    partition_bytes: int = 512 << 10
    window: int = 4
    server_loops: int = 1
    server_memory: int = 4 << 30
    latency_s: float = 50e-6
    sum_bytes_per_s: float = 10e9
    piece_s: float = 5e-6
    wire: float = 1 + 66 / 8948


@dataclass(frozen=True)
class Link:
    """Bytes that one host's link carries in a round."""

    hosts: Hosts
    up: float
    down: float


@dataclass(frozen=True)
class Prediction:
    """One push_pull of one tensor on all workers.

    Attributes:
        seconds: time until the last worker has its result.
        goodput: bytes of the tensor per second.
        links: the busiest link of each kind of hosts.
        server_memory: bytes of landing slots on the server with the most.
        data_writes: writes on data endpoints, of all hosts.
        control_messages: upper limit for all hosts: one credit per piece; several credits may share a message.
    """

    seconds: float
    goodput: float
    links: tuple[Link, ...]
    server_memory: int
    data_writes: int
    control_messages: int


@dataclass
class _Servers:
    """Servers with equally many pieces, on hosts of one kind."""

    host: int  # index of the kind of hosts
    count: int
    pieces: int
    pushed: int = 0  # pieces that have arrived from all workers
    summed: int = 0  # pieces that are ready to be answered
    busy_until: float = 0.0


@dataclass
class _Flow:
    """All flows from a kind of workers to a kind of servers (or back); all of them are equally fast."""

    servers: _Servers
    push: bool
    links: tuple[tuple[int, bool, int], ...]  # used: kind of hosts, direction is up, flows on the link of one host
    window: int  # pieces
    limit: float = 0.0  # bytes that may be sent so far
    sent: float = 0.0
    rate: float = 0.0


def simulate(hosts: Sequence[Hosts], nbytes: int, protocol: Protocol | None = None) -> Prediction:
    """Simulate one round of a tensor of `nbytes` on every worker.

    Raises:
        InvalidArgumentError: there are no workers or no servers, a host is neither, or a size is not positive.
    """
    protocol = protocol or Protocol()
    _check(hosts, nbytes, protocol)
    return _Round(hosts, nbytes, protocol).run()


def ring_seconds(workers: int, gbit_per_s: float, nbytes: int, protocol: Protocol | None = None) -> float:
    """The lower limit for a ring all-reduce: 2(n-1)/n of the tensor over each link, in 2(n-1) steps."""
    protocol = protocol or Protocol()
    steps = 2 * (workers - 1)
    return steps * (nbytes / max(workers, 1) * protocol.wire / (gbit_per_s * 1e9 / 8) + protocol.latency_s)


def _check(hosts: Sequence[Hosts], nbytes: int, protocol: Protocol) -> None:
    positive = [nbytes, protocol.partition_bytes, protocol.window, *(n for h in hosts for n in (h.count, h.ranks))]
    rates = [protocol.sum_bytes_per_s, *(h.gbit_per_s for h in hosts)]
    if min(positive) < 1 or min(rates) <= 0:
        raise InvalidArgumentError("sizes, counts and rates must be positive", "correct the hosts or the protocol")
    if not any(h.worker for h in hosts) or not any(h.server for h in hosts):
        raise InvalidArgumentError("a cluster needs workers and servers", "mark some hosts as each")
    if not all(h.worker or h.server for h in hosts):
        raise InvalidArgumentError("a host is neither worker nor server", "set worker or server, or remove it")


class _Round:
    def __init__(self, hosts: Sequence[Hosts], nbytes: int, protocol: Protocol) -> None:
        self.protocol = protocol
        self.nbytes = nbytes
        self.pieces = math.ceil(nbytes / protocol.partition_bytes)
        self.piece_bytes = nbytes / self.pieces
        self.wire_bytes = (self.piece_bytes + HEADER_BYTES) * protocol.wire  # per push; an answer has no header
        self.given = hosts
        self.workers = sum(h.count for h in hosts if h.worker)
        share = protocol.server_memory // protocol.server_loops // self.workers or sys.maxsize
        self.small_slots = min(max(share // 8 // SMALL_SLOT, FEWEST_SMALL_SLOTS), MOST_SMALL_SLOTS)
        self.window = min(max(share // 8 * 7 // (protocol.partition_bytes + HEADER_BYTES), 1), protocol.window)
        self.hosts: list[Hosts] = []  # kinds of hosts, split so that all servers of a kind have equally many pieces
        self.origin: list[int] = []  # index in `given`
        self.servers: list[_Servers] = []
        self._deal_pieces(hosts)
        self.flows = [flow for one in self.servers for flow in self._flows_of(one)]
        self.arrivals: list[tuple[float, int, _Servers, bool]] = []  # (when, order, servers, is the sum)
        self.order = 0
        self.now = 0.0

    def _deal_pieces(self, hosts: Sequence[Hosts]) -> None:
        """Distribute pieces round robin, as raw keys do: the first servers may have one piece more."""
        each, more = divmod(self.pieces, sum(h.count for h in hosts if h.server))
        for origin, host in enumerate(hosts):
            heavy = min(more, host.count) if host.server else 0
            more -= heavy
            for count, pieces in ((heavy, each + 1), (host.count - heavy, each)):
                if count == 0:
                    continue
                if host.server and pieces > 0:
                    self.servers.append(_Servers(len(self.hosts), count, pieces))
                self.hosts.append(replace(host, count=count))
                self.origin.append(origin)

    def _flows_of(self, servers: _Servers) -> list[_Flow]:
        flows = []
        for kind, host in enumerate(self.hosts):
            if not host.worker:
                continue
            own = 1 if kind == servers.host else 0  # a worker reaches its own server without the link
            per_worker, per_server = servers.count - own, host.count - own
            if per_worker == 0 or per_server == 0:
                continue
            for push in (True, False):
                links = ((kind, push, per_worker), (servers.host, not push, per_server))
                # Each rank of the server's host is a server, and each has a window for every other host.
                window = self.window * (self.hosts[servers.host].ranks if self.hosts[servers.host].worker else 1)
                flows.append(_Flow(servers, push, links, window))
        return flows

    def run(self) -> Prediction:
        self._open()
        while self.arrivals or any(self._active(flow) for flow in self.flows):
            self._share()
            soonest = self.arrivals[0][0] - self.now if self.arrivals else math.inf
            for flow in self.flows:
                if self._active(flow) and flow.rate > 0:
                    soonest = min(soonest, (self._next_stop(flow) - flow.sent) / flow.rate)
            self._advance(max(soonest, 0.0))
        seconds = self.now + self.protocol.latency_s + 2 * self._host_s()
        return Prediction(
            seconds=seconds,
            goodput=self.nbytes / seconds,
            links=tuple(self._link(host, origin) for origin, host in enumerate(self.given)),
            server_memory=self._memory(),
            data_writes=2 * self.workers * self.pieces,
            control_messages=self.workers * self.pieces,
        )

    # ---- Time

    def _host_s(self) -> float:
        """The seconds that the ranks of a host add: they sum a piece before they send it, and deliver their last."""
        ranks = max(host.ranks for host in self.given if host.worker)
        if ranks == 1:
            return 0.0
        return ranks * self.piece_bytes / self.protocol.sum_bytes_per_s + self.protocol.piece_s

    def _open(self) -> None:
        for flow in self.flows:
            if flow.push:
                flow.limit = min(flow.servers.pieces, flow.window) * self.wire_bytes
        for servers in self.servers:
            if not any(flow.servers is servers for flow in self.flows):  # its only worker is on the same host
                self._summed_later(servers, servers.pieces)

    def _active(self, flow: _Flow) -> bool:
        return flow.sent < flow.limit - _EPSILON

    def _bytes_of(self, flow: _Flow) -> float:
        return self.wire_bytes if flow.push else self.piece_bytes * self.protocol.wire

    def _next_stop(self, flow: _Flow) -> float:
        """The next event of a flow: the end of its current piece, or of what it may send."""
        size = self._bytes_of(flow)
        end_of_piece = (math.floor(flow.sent / size + _EPSILON) + 1) * size
        return min(end_of_piece, flow.limit)

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        for flow in self.flows:
            if self._active(flow):
                flow.sent = min(flow.sent + flow.rate * seconds, flow.limit)
        for servers in self.servers:
            self._note_pushes(servers)
        while self.arrivals and self.arrivals[0][0] <= self.now + 1e-12:
            _, _, servers, is_sum = heapq.heappop(self.arrivals)
            if is_sum:
                self._note_sum(servers)
            else:
                self._summed_later(servers, 1)

    def _note_pushes(self, servers: _Servers) -> None:
        pushes = [flow for flow in self.flows if flow.servers is servers and flow.push]
        if not pushes:
            return
        complete = min(math.floor(flow.sent / self.wire_bytes + _EPSILON) for flow in pushes)
        while servers.pushed < complete:
            servers.pushed += 1
            self._schedule(self.now + self.protocol.latency_s, servers, is_sum=False)

    def _summed_later(self, servers: _Servers, pieces: int) -> None:
        begin = max(self.now, servers.busy_until)
        work = self.workers * self.piece_bytes / self.protocol.sum_bytes_per_s + self.protocol.piece_s
        for _ in range(pieces):
            begin += work
            self._schedule(begin, servers, is_sum=True)
        servers.busy_until = begin

    def _note_sum(self, servers: _Servers) -> None:
        servers.summed += 1
        for flow in self.flows:
            if flow.servers is not servers:
                continue
            pieces = min(servers.pieces, servers.summed + flow.window) if flow.push else servers.summed
            flow.limit = pieces * self._bytes_of(flow)

    def _schedule(self, when: float, servers: _Servers, *, is_sum: bool) -> None:
        self.order += 1
        heapq.heappush(self.arrivals, (when, self.order, servers, is_sum))

    # ---- Sharing

    def _share(self) -> None:
        """Share links max-min fairly: all rates grow together until a flow meets a full link."""
        growing = [flow for flow in self.flows if self._active(flow)]
        room: dict[tuple[int, bool], float] = {}
        for flow in growing:
            flow.rate = 0.0
            for kind, up, _ in flow.links:
                room[kind, up] = self.hosts[kind].gbit_per_s * 1e9 / 8
        while growing:
            load: dict[tuple[int, bool], int] = {}
            for flow in growing:
                for kind, up, count in flow.links:
                    load[kind, up] = load.get((kind, up), 0) + count
            step = min(room[link] / count for link, count in load.items())
            for link, count in load.items():
                room[link] -= step * count
            for flow in growing:
                flow.rate += step
            full = {link for link in load if room[link] < 1e-3}
            growing = [flow for flow in growing if not any((kind, up) in full for kind, up, _ in flow.links)]

    # ---- Results

    def _link(self, host: Hosts, origin: int) -> Link:
        carried = {(kind, up): 0.0 for kind, given in enumerate(self.origin) if given == origin for up in (True, False)}
        for flow in self.flows:
            for kind, up, count in flow.links:
                if (kind, up) in carried:
                    carried[kind, up] += flow.servers.pieces * self._bytes_of(flow) * count
        most = {way: max(amount for (_, up), amount in carried.items() if up == way) for way in (True, False)}
        return Link(host, most[True], most[False])

    def _memory(self) -> int:
        # A worker on the server's own host needs no slots; every other worker loop has slots on every server loop.
        remote = max(self.workers - (1 if self.hosts[one.host].worker else 0) for one in self.servers)
        slot = self.protocol.partition_bytes + HEADER_BYTES
        return remote * self.protocol.server_loops * (self.window * slot + self.small_slots * SMALL_SLOT)
