# SPDX-License-Identifier: Apache-2.0
"""Predicts a push_pull on a cluster of a given size: time, bytes per link, memory of servers, control messages.

This is a fluid model. A worker has a flow to each loop of each server, and those that meet at a link share it in
proportion to what they carry, because the pace holds back those that are ahead. Pieces of the tensor are modelled where
the protocol depends on them: a server answers a piece when the last worker has pushed it, a worker has at most a window
of pieces in flight to a loop of a server, and it keeps the servers in step (csrc/worker/pace.h). How many pieces each
server sums is what the core computes: the function is the same. Hosts of one kind behave alike, so the model keeps one
state per kind of hosts, and 4,096 workers take no longer to simulate than 4.

The model has no congestion inside the network, no unfairness among the flows of a link, and no processors except for
the rate at which a server sums. bench/link_lab.py measures small clusters; bench/scale_model.py compares and plots.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise

from bps_rdma import _core
from bps_rdma.errors import InvalidArgumentError

HEADER_BYTES = 64  # the header of a push; kMaxHeader in csrc/transport/transport.h
SMALL_SLOT = 8192  # bytes; the numbers below are per worker loop and server loop, see csrc/server
MOST_SMALL_SLOTS, FEWEST_SMALL_SLOTS = 128, 8
_EPSILON = 1e-6  # bytes


@dataclass(frozen=True)
class Hosts:
    """Hosts of one kind.

    Attributes:
        count: number of hosts.
        gbit_per_s: speed of each host's link, in each direction at the same time.
        worker, server: what runs on each host; both means servers inside the workers, a server alone a spare host.
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
        partition_bytes: BPS_PARTITION_BYTES, the most that a piece has.
        min_partition_bytes: BPS_MIN_PARTITION_BYTES; where a tensor is small for its servers, it is cut finer.
        window: BPS_SERVER_WINDOW, the pieces that a worker may have in flight to one loop of a server.
        server_loops: BPS_SERVER_ENGINE_THREAD of spare hosts; a server inside a worker has one loop.
        server_memory: BPS_SERVER_MEMORY, bytes for landing slots; windows shrink to fit with many workers.
        latency_s: time from a write to its arrival on an idle network.
        sum_bytes_per_s: speed at which a loop of a server sums, in bytes of all workers' pieces.
        piece_s: additional time of a loop for each piece.
        wire: bytes on the wire per byte of payload (1.0074 for TCP/IP in frames of 9000 bytes).
    """

    partition_bytes: int = 512 << 10
    min_partition_bytes: int = 64 << 10
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
class _Loops:
    """Loops of servers that sum equally many pieces, on hosts of one kind."""

    host: int  # index of the kind of hosts
    hosts: int
    on_each: int
    pieces: int  # of each loop
    pushed: int = 0  # pieces that have arrived from all workers
    summed: int = 0  # pieces that are ready to be answered
    busy_until: float = 0.0


@dataclass
class _Flow:
    """All flows from a kind of workers to a kind of loops (or back); all of them are equally fast."""

    loops: _Loops
    push: bool
    links: tuple[tuple[int, bool, int], ...]  # used: kind of hosts, direction is up, flows on the link of one host
    worker: int  # kind of hosts
    peers: int  # such loops that a worker reaches by its link
    slots: int = 0  # pieces for which the loops have given slots so far
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


def partition_for(hosts: Sequence[Hosts]) -> int:
    """BPS_PARTITION_BYTES as init() chooses it for such links: the slowest one counts."""
    return _core.partition_for_link(min(_bytes_per_s(host) for host in hosts))


def best_seconds(hosts: Sequence[Hosts], nbytes: int) -> float:
    """The lower limit for every placement of sums: how long the links carry the bytes, each as full as can be."""
    sites = _sites(hosts)
    return nbytes * _core.seconds_per_byte(sites, _core.link_shares(sites))


def spare_share(hosts: Sequence[Hosts]) -> float:
    """The part of the bytes that the spare hosts sum together."""
    sites = _sites(hosts)
    shares = _core.link_shares(sites)
    return sum(share for share, (_, _, contributions) in zip(shares, sites, strict=True) if contributions == 0)


def _bytes_per_s(host: Hosts) -> float:
    return host.gbit_per_s * 1e9 / 8


def _sites(hosts: Sequence[Hosts]) -> list[tuple[float, float, int]]:
    """Each host as the core sees it: speed of its link, of its sums, and contributions."""
    return [
        (_bytes_per_s(host), math.inf if host.server else 0.0, int(host.worker))
        for host in hosts
        for _ in range(host.count)
    ]


def _check(hosts: Sequence[Hosts], nbytes: int, protocol: Protocol) -> None:
    positive = [nbytes, protocol.partition_bytes, protocol.window, *(n for h in hosts for n in (h.count, h.ranks))]
    rates = [protocol.sum_bytes_per_s, *(h.gbit_per_s for h in hosts)]
    if min(positive) < 1 or min(rates) <= 0:
        raise InvalidArgumentError("sizes, counts and rates must be positive", "correct the hosts or the protocol")
    if not any(h.worker for h in hosts) or not any(h.server for h in hosts):
        raise InvalidArgumentError("a cluster needs workers and servers", "mark some hosts as each")
    if not all(h.worker or h.server for h in hosts):
        raise InvalidArgumentError("a host is neither worker nor server", "set worker or server, or remove it")


def _evenly(pieces: int, count: int) -> list[tuple[int, int]]:
    """(how many, pieces of each), so that they differ by one at most."""
    each, more = divmod(pieces, count)
    return [(n, one) for n, one in ((more, each + 1), (count - more, each)) if n > 0]


class _Round:
    def __init__(self, hosts: Sequence[Hosts], nbytes: int, protocol: Protocol) -> None:
        self.protocol = protocol
        self.nbytes = nbytes
        loops = sum(h.count * self._loops_of(h) for h in hosts if h.server)
        least = min(protocol.min_partition_bytes, protocol.partition_bytes)
        self.pieces = math.ceil(nbytes / _core.partition_size(nbytes, protocol.partition_bytes, loops, least))
        self.piece_bytes = nbytes / self.pieces
        self.wire_bytes = (self.piece_bytes + HEADER_BYTES) * protocol.wire  # per push; an answer has no header
        self.given = hosts
        self.workers = sum(h.count for h in hosts if h.worker)
        self.loops_of_a_server = max(1 if h.worker else protocol.server_loops for h in hosts if h.server)
        share = protocol.server_memory // self.loops_of_a_server // self.workers or sys.maxsize
        self.small_slots = min(max(share // 8 // SMALL_SLOT, FEWEST_SMALL_SLOTS), MOST_SMALL_SLOTS)
        self.window = min(max(share // 8 * 7 // (protocol.partition_bytes + HEADER_BYTES), 1), protocol.window)
        self.hosts: list[Hosts] = []  # kinds of hosts, split so that all servers of a kind have equally many pieces
        self.origin: list[int] = []  # index in `given`
        self.loops: list[_Loops] = []
        self._deal_pieces(hosts)
        self.flows = [flow for one in self.loops for flow in self._flows_of(one)]
        self.pushes = [flow for flow in self.flows if flow.push]
        self.parts: dict[int, int] = {}  # by kind of workers: pieces of the tensor that one pushes over its link
        self.ahead: dict[int, float] = {}  # and how many of them may be under way
        self._begin_pace()
        self.arrivals: list[tuple[float, int, _Loops, bool]] = []  # (when, order, loops, is the sum)
        self.order = 0
        self.now = 0.0

    def _deal_pieces(self, hosts: Sequence[Hosts]) -> None:
        """Deal pieces as the core does, so that all links are full; the first of a kind may have one more."""
        for origin, (host, dealt) in enumerate(zip(hosts, self._shares(hosts), strict=True)):
            for count, pieces in _evenly(dealt, host.count):
                for loops, each in _evenly(pieces, self._loops_of(host)):
                    if each > 0:
                        self.loops.append(_Loops(len(self.hosts), count, loops, each))
                self.hosts.append(replace(host, count=count))
                self.origin.append(origin)

    def _loops_of(self, host: Hosts) -> int:
        """On a host with a server. Each rank of a worker's host is one."""
        return host.ranks if host.worker else self.protocol.server_loops

    def _shares(self, hosts: Sequence[Hosts]) -> list[int]:
        """The pieces that all hosts of each kind sum together."""
        shares = iter(_core.link_shares(_sites(hosts)))
        ends = accumulate(sum(islice(shares, host.count)) for host in hosts)
        return [after - before for before, after in pairwise([0, *(round(end * self.pieces) for end in ends)])]

    def _flows_of(self, loops: _Loops) -> list[_Flow]:
        flows = []
        for kind, host in enumerate(self.hosts):
            if not host.worker:
                continue
            own = 1 if kind == loops.host else 0  # a worker reaches the servers of its host without the link
            per_worker, per_server = (loops.hosts - own) * loops.on_each, (host.count - own) * loops.on_each
            if per_worker == 0 or per_server == 0:
                continue
            for push in (True, False):
                links = ((kind, push, per_worker), (loops.host, not push, per_server))
                flows.append(_Flow(loops, push, links, kind, per_worker))
        return flows

    def _begin_pace(self) -> None:
        each = _core.pace_of(self.protocol.partition_bytes)
        for kind in {flow.worker for flow in self.pushes}:
            own = [flow for flow in self.pushes if flow.worker == kind]
            peers = sum(flow.peers for flow in own)
            self.parts[kind] = sum(flow.peers * flow.loops.pieces for flow in own)
            self.ahead[kind] = each * peers if peers > 1 else math.inf

    def run(self) -> Prediction:
        self._open()
        self._keep_pace()
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
        for flow in self.pushes:
            flow.slots = min(flow.loops.pieces, self.window)
        for loops in self.loops:
            if not any(flow.loops is loops for flow in self.flows):  # its only worker is on the same host
                self._summed_later(loops, loops.pieces)

    def _keep_pace(self) -> None:
        """Let each push go on to the end of its slots, or of its part of what may be under way (csrc/worker/pace.h)."""
        answered = dict.fromkeys(self.parts, 0.0)
        for flow in self.flows:
            if not flow.push:  # the loops answer one after the other, and not all a piece at the same time
                answered[flow.worker] += flow.peers * flow.sent / self._bytes_of(flow)
        for flow in self.pushes:
            due = (answered[flow.worker] + self.ahead[flow.worker]) / self.parts[flow.worker]
            pieces = math.ceil(due * flow.loops.pieces - _EPSILON) if due < 1 else flow.loops.pieces
            flow.limit = min(pieces, flow.slots) * self.wire_bytes

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
        for loops in self.loops:
            self._note_pushes(loops)
        while self.arrivals and self.arrivals[0][0] <= self.now + 1e-12:
            _, _, loops, is_sum = heapq.heappop(self.arrivals)
            if is_sum:
                self._note_sum(loops)
            else:
                self._summed_later(loops, 1)
        self._keep_pace()

    def _note_pushes(self, loops: _Loops) -> None:
        pushes = [flow for flow in self.pushes if flow.loops is loops]
        if not pushes:
            return
        complete = min(math.floor(flow.sent / self.wire_bytes + _EPSILON) for flow in pushes)
        while loops.pushed < complete:
            loops.pushed += 1
            self._schedule(self.now + self.protocol.latency_s, loops, is_sum=False)

    def _summed_later(self, loops: _Loops, pieces: int) -> None:
        begin = max(self.now, loops.busy_until)
        work = self.workers * self.piece_bytes / self.protocol.sum_bytes_per_s + self.protocol.piece_s
        for _ in range(pieces):
            begin += work
            self._schedule(begin, loops, is_sum=True)
        loops.busy_until = begin

    def _note_sum(self, loops: _Loops) -> None:
        loops.summed += 1
        for flow in self.flows:
            if flow.loops is not loops:
                continue
            if flow.push:
                flow.slots = min(loops.pieces, loops.summed + self.window)
            else:
                flow.limit = loops.summed * self._bytes_of(flow)

    def _schedule(self, when: float, loops: _Loops, *, is_sum: bool) -> None:
        self.order += 1
        heapq.heappush(self.arrivals, (when, self.order, loops, is_sum))

    # ---- Sharing

    def _share(self) -> None:
        """Share links: the rates of all flows grow together until a flow meets a full link.

        They grow in proportion to what flows carry: the pace holds back those that are ahead.
        """
        growing = [flow for flow in self.flows if self._active(flow)]
        room: dict[tuple[int, bool], float] = {}
        for flow in growing:
            flow.rate = 0.0
            for kind, up, _ in flow.links:
                room[kind, up] = _bytes_per_s(self.hosts[kind])
        while growing:
            load: dict[tuple[int, bool], int] = {}
            for flow in growing:
                for kind, up, count in flow.links:
                    load[kind, up] = load.get((kind, up), 0) + count * flow.loops.pieces
            step = min(room[link] / pieces for link, pieces in load.items())
            for link, pieces in load.items():
                room[link] -= step * pieces
            for flow in growing:
                flow.rate += step * flow.loops.pieces
            full = {link for link in load if room[link] < 1e-3}
            growing = [flow for flow in growing if not any((kind, up) in full for kind, up, _ in flow.links)]

    # ---- Results

    def _link(self, host: Hosts, origin: int) -> Link:
        carried = {(kind, up): 0.0 for kind, given in enumerate(self.origin) if given == origin for up in (True, False)}
        for flow in self.flows:
            for kind, up, count in flow.links:
                if (kind, up) in carried:
                    carried[kind, up] += flow.loops.pieces * self._bytes_of(flow) * count
        most = {way: max(amount for (_, up), amount in carried.items() if up == way) for way in (True, False)}
        return Link(host, most[True], most[False])

    def _memory(self) -> int:
        # A worker on the server's own host needs no slots; every other worker loop has slots on every server loop.
        remote = max(self.workers - (1 if self.hosts[one.host].worker else 0) for one in self.loops)
        slot = self.protocol.partition_bytes + HEADER_BYTES
        return remote * self.loops_of_a_server * (self.window * slot + self.small_slots * SMALL_SLOT)
