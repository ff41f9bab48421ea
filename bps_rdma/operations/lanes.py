# SPDX-License-Identifier: Apache-2.0
"""Lanes: what the messages of two ranks go through, in the order in which both ranks start them.

Two ranks have a group of their own, made by the first of them that needs it (kPairName in csrc/van/calls.h). For each
message both give a notice: what they send and what they expect. The notices are an all_gather, in which a small message
travels, too. A larger one is a broadcast in the group of the two, started together with its notice and named by its
size. So a message costs one push and one pull, nobody else takes part, and ranks that disagree find out by the notice.
A broadcast in which only one of them waits is then ended by the other one, which joins it with another reduction.
"""

from __future__ import annotations

import functools
import struct
import sys
import threading
from collections import deque
from itertools import starmap
from typing import Any, NamedTuple

from bps_rdma import _core, arrays
from bps_rdma.operations.progress import Progress
from bps_rdma.running_job import Job

PAIR_NAME = "~pair"  # kPairName
# The broadcasts that are sent and expected. Then what most notices have in common with those before them: elements and
# bytes that are sent, the same of what is expected, and the dtypes of both.
_ROUNDS = struct.Struct("<II")
_CONTENTS = struct.Struct("<qqqq16s16s")
_SAID_BYTES = _ROUNDS.size + _CONTENTS.size
_NO_ROUND = (1 << 32) - 1
NOTICE_BYTES = 1024  # of each rank
SMALL = NOTICE_BYTES - _SAID_BYTES  # bytes of a message that travels in its notice
_ROWS = 64  # notices that are made at a time
_UINT8, _SUM, _MAX = arrays.Dtype.uint8, _core.ReduceOp.sum, _core.ReduceOp.max
_BROADCAST = _core.Kind.broadcast
Broadcast = tuple[_core.Tensor, arrays.Memory, int]  # of a large message, from the rank at this position in the pair


class Content(NamedTuple):
    """What is sent, or expected.

    Attributes:
        elements: how many; NOTHING and ANYTHING have none.
        nbytes: of all of them.
        dtype: its name, of torch or numpy.
    """

    elements: int
    nbytes: int
    dtype: str

    @property
    def is_large(self) -> bool:
        """Whether it is a broadcast beside the notice."""
        return self.nbytes > SMALL

    def __str__(self) -> str:
        """In words."""
        if self.elements < 0:
            return "nothing" if self == NOTHING else "anything"
        return f"{self.elements} elements of {self.dtype}"


NOTHING = Content(-1, 0, "")
ANYTHING = Content(-2, 0, "")  # the receiver learns by the notice what comes


class Part(NamedTuple):
    """The memory of a message.

    Attributes:
        content: what it holds.
        memory: its bytes.
    """

    content: Content
    memory: arrays.Memory


def part_of(array: Any, writable: bool) -> Part:
    """The memory of an array, as bytes. A torch tensor may have any dtype of torch.

    Raises:
        InvalidTensorError: as arrays.describe().
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        memory = arrays.describe_bytes(array)
        return Part(Content(array.numel(), memory.nbytes, arrays.name_of(array.dtype)), memory)
    memory = arrays.describe(array, writable)
    content = Content(memory.elements, memory.nbytes, memory.dtype.name)
    if content.is_large and memory.dtype != _UINT8:
        memory = arrays.describe(arrays.bytes_of(array), writable)
    return Part(content, memory)


class Said(NamedTuple):
    """One direction of a message, as a rank says it.

    Attributes:
        content: of the message.
        round: of the broadcast of a large one, among those of its size and direction; None: it is not known yet.
    """

    content: Content
    round: int | None = None


class Notice:
    """Memory of one notice: the half of the rank with the smaller number, then that of the other one."""

    def __init__(self, row: Any) -> None:
        self.whole = arrays.describe(row, True)
        self.halves = [arrays.describe(row[begin : begin + NOTICE_BYTES], False) for begin in (0, NOTICE_BYTES)]
        self._bytes = memoryview(row)

    def write(self, position: int, said: bytes) -> None:
        """Writes what the rank at this position says, as packed() makes it."""
        begin = position * NOTICE_BYTES
        self._bytes[begin : begin + _SAID_BYTES] = said

    def read(self, position: int) -> bytes:
        """What the rank at this position says, for unpacked()."""
        begin = position * NOTICE_BYTES
        return self._bytes[begin : begin + _SAID_BYTES].tobytes()

    def content_address(self, position: int) -> int:
        """Where the small message of the rank at this position lies."""
        return self.halves[position].address + _SAID_BYTES


def packed(sent: Said, expected: Said) -> tuple[bytes, bytes]:
    """What a rank says, and what the other one says if that fits."""
    said, fitting = _packed(sent.content, expected.content)
    if sent.round is None and expected.round is None:
        return said, fitting
    numbers = [_NO_ROUND if one.round is None else one.round for one in (sent, expected)]
    at = _ROUNDS.size
    return _ROUNDS.pack(*numbers) + said[at:], _ROUNDS.pack(*reversed(numbers)) + fitting[at:]


def unpacked(said: bytes) -> tuple[Said, Said]:
    """What a rank sends, and what it expects."""
    rounds = [None if number == _NO_ROUND else number for number in _ROUNDS.unpack_from(said)]
    *numbers, sent, expected = _CONTENTS.unpack_from(said, _ROUNDS.size)
    return (
        Said(Content(numbers[0], numbers[1], sent.rstrip(b"\0").decode()), rounds[0]),
        Said(Content(numbers[2], numbers[3], expected.rstrip(b"\0").decode()), rounds[1]),
    )


# Most messages are of the same size and dtype as those before them. Those that are small do not even number a round.
@functools.lru_cache
def _packed(out: Content, into: Content) -> tuple[bytes, bytes]:
    unnumbered = _ROUNDS.pack(_NO_ROUND, _NO_ROUND)
    sent, expected = (one.dtype.encode() for one in (out, into))
    return (
        unnumbered + _CONTENTS.pack(out.elements, out.nbytes, into.elements, into.nbytes, sent, expected),
        unnumbered + _CONTENTS.pack(into.elements, into.nbytes, out.elements, out.nbytes, expected, sent),
    )


class Lane:
    """The messages of two ranks that have one name. Its lock keeps notices and broadcasts in one order.

    Broadcasts of one size and direction have rounds, which both ranks say in their notices. They differ when a message
    before has failed; then what one rank waits for is ended by the other one, unless that has begun the round itself.

    Args:
        lanes: those of this view.
        group: the number of the pair.
        name: the same on both ranks.
        own: rank of this process.
        peer: rank of the other one.
    """

    def __init__(self, lanes: Lanes, group: int, name: str, own: int, peer: int) -> None:
        self.lanes = lanes
        self.name = name
        self.own, self.peer = own, peer
        self.position = int(own > peer)  # in the pair
        self.lock = threading.RLock()
        self.unheard: deque[Any] = deque()  # Messages in their order, from the first whose other notice is not read on
        self.deferred = 0  # how many of them come, and may begin to only then
        self.receivers: deque[Any] = deque()  # ReceiveFromAny in their order, also those that nobody holds any more
        self.expected: deque[Any] = deque()  # Messages, one or more for each of them: some got theirs from other ranks
        self.is_attended = False  # the thread of Progress goes on with what is unheard
        self._group = group
        self._notices = self._declare(f"{name}, notice", 2 * NOTICE_BYTES)
        self._large: dict[tuple[int, bool], _core.Tensor] = {}

    def _declare(self, name: str, nbytes: int) -> _core.Tensor:
        return self.lanes.process.declare([(self._group, name, _UINT8, nbytes, f"({nbytes},)", "")])[0]

    def large(self, nbytes: int, outward: bool) -> _core.Tensor:
        """The tensor of broadcasts of this size, to the other rank or from it."""
        found = self._large.get((nbytes, outward))
        if found is None:
            sender = self.own if outward else self.peer
            found = self._declare(f"{self.name}, {nbytes} bytes of rank {sender}", nbytes)
            self._large[nbytes, outward] = found
        return found

    def start(
        self,
        notice: Notice,
        contents: tuple[Broadcast, ...],
        priority: int,
        is_first: bool,
        awaited: bool,
        timeout: float | None,
        kept: list[_core.Handle[None]],
    ) -> None:
        """Starts a message, and appends the handles of its exchange of notices, and of its broadcasts.

        Signal handlers run between steps of Python, and this is one step: what they raise leaves no handle behind.

        Args:
            notice: its memory.
            contents: what is broadcast.
            is_first: no other message has to be waited for before.
            priority, awaited, timeout: see How.
            kept: gets the handles.
        """
        half = notice.halves[self.position]
        _core.start_message(
            self.lanes.process, self._notices, half, notice.whole, contents, priority, is_first, awaited, timeout, kept
        )

    def start_late(
        self,
        nbytes: int,
        memory: arrays.Memory,
        priority: int,
        awaited: bool,
        timeout: float | None,
        kept: list[_core.Handle[None]],
    ) -> None:
        """Starts the broadcast from the other rank that belongs to a notice which has come, and appends its handle."""
        tensor, root = self.large(nbytes, False), 1 - self.position
        self._start(kept, tensor, _SUM, memory, root, priority, awaited, timeout)

    def first_unheard(self) -> Any:
        """The first Message whose notice has to be read; None: there is none."""
        if not (self.unheard or self.deferred):
            return None  # which was so at some moment
        with self.lock:
            while self.unheard and (self.unheard[0].is_heard or not self.unheard[0].has_begun):
                self.deferred -= self.unheard.popleft().is_deferred
            if self.unheard:
                return self.unheard[0]
            self.deferred = 0  # also where a signal handler has raised an exception between two steps
            return None

    def catch_up(self, nbytes: int, outward: bool, round_: int) -> bool:
        """Makes this round the next one, under the lock. False: it has begun, with another message; nothing changes.

        A rank is behind where it has not begun a broadcast because its message had failed before.
        """
        tensor = self.large(nbytes, outward)
        if tensor.next_round > round_:
            return False
        tensor.next_round = max(tensor.next_round, round_)
        return True

    def end(self, nbytes: int, outward: bool, round_: int, timeout: float | None) -> _core.Handle[None] | None:
        """Ends a broadcast in which the other rank waits, and this one does not: nothing is sent, and both fail.

        None: this rank has begun that round with another message.
        """
        if not self.catch_up(nbytes, outward, round_):
            return None
        memory, root = arrays.describe(arrays.empty_bytes(nbytes), True), 1 - self.position
        ending: list[_core.Handle[None]] = []
        self._start(ending, self.large(nbytes, outward), _MAX, memory, root, 0, False, timeout)
        return ending[0]

    def _start(
        self,
        kept: list[_core.Handle[None]],
        tensor: _core.Tensor,
        op: _core.ReduceOp,
        memory: arrays.Memory,
        root: int,
        priority: int,
        awaited: bool,
        timeout: float | None,
    ) -> None:
        """Starts a broadcast. It has no result, and does not survive the loss of a server."""
        what = self.lanes.process, tensor, _BROADCAST, op, memory, memory, None, True, True, root
        kept.extend(starmap(_core.start_operation, ((*what, priority, awaited, timeout, False),)))  # one step


class Lanes:
    """All lanes of this process in one view."""

    def __init__(self, job: Job) -> None:
        self.process = job.process
        self._job = job
        self._lanes: dict[tuple[int, str], Lane] = {}
        self.of_subject: dict[tuple[Any, ...], Lane] = {}  # the same ones, by what callers say
        self._pairs: dict[int, int] = {}  # numbers of groups, by peer
        self._free: deque[Notice] = deque()
        self._making = threading.RLock()
        self.joining = threading.RLock()  # of receivers: who is before whom is the same in all lanes

    def lane(self, peer: int, name: str) -> Lane:
        """The lane of this name with another rank; made on its first use, which does not wait for that rank."""
        found = self._lanes.get((peer, name))
        if found is not None:
            return found
        with self._making:
            found = self._lanes.get((peer, name))
            if found is None:
                own = self.process.rank
                if peer not in self._pairs:
                    self._pairs[peer] = self.process.new_group(sorted((own, peer)), PAIR_NAME, self.process.timeout_s)
                found = self._lanes[peer, name] = Lane(self, self._pairs[peer], name, own, peer)
        return found

    def progress(self) -> Progress:
        """What goes on with messages of several steps."""
        return self._job.part(Progress)

    def take_notice(self) -> Notice:
        """Memory for a notice."""
        try:
            return self._free.popleft()
        except IndexError:
            self._free.extend(Notice(row) for row in arrays.zeros((_ROWS, 2 * NOTICE_BYTES), "uint8"))
            return self._free.popleft()

    def give_back(self, notice: Notice) -> None:
        """Gives a notice back that no operation uses any more."""
        self._free.append(notice)


class _LanesOfJob:
    """The lanes of the view that the job is in."""

    def __init__(self) -> None:
        self.now: Lanes | None = None
        self.making = threading.RLock()


def lanes_of(job: Job) -> Lanes:
    """The lanes of a job in its present view."""
    kept = job.part(_LanesOfJob)
    found = kept.now
    if found is not None and found.process is job.process:
        return found
    with kept.making:  # two threads with lanes of their own would not know of each other's messages
        found = kept.now
        if found is None or found.process is not job.process:
            found = kept.now = Lanes(job)
        return found
