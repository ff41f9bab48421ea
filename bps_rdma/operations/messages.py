# SPDX-License-Identifier: Apache-2.0
"""One message between two ranks, in one direction or in both, as a handle; see lanes.py for how it travels."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from bps_rdma import _core, arrays
from bps_rdma.blockers import AnyOf, Blocker
from bps_rdma.errors import BpsError, MismatchError
from bps_rdma.handle import PythonHandle, blocker_of
from bps_rdma.job import raised
from bps_rdma.kept_errors import keeping, runs_handlers
from bps_rdma.operations.begun import give_up, give_up_one
from bps_rdma.operations.lanes import ANYTHING, NOTHING, SMALL, Broadcast, Content, Lane, Part, Said, packed, unpacked
from bps_rdma.operations.stepwise import StepwiseHandle, new_lock

T = TypeVar("T")  # what wait() returns
_NO_PART = Part(NOTHING, None)  # type: ignore[arg-type]  # nothing is written there


class How(NamedTuple):
    """The way to send.

    Attributes:
        priority: messages with a higher one are sent first.
        timeout: seconds; None: BPS_TIMEOUT.
        awaited: the caller waits next; see completed().
        begun: gets what has begun, also if that raises then; None: nobody wants to know.
    """

    priority: int = 0
    timeout: float | None = None
    awaited: bool = False
    begun: list[Any] | None = None


def completed(start: Callable[[How], PythonHandle[T]], how: How) -> T:
    """Starts something and waits for it. Once it has raised anything, nothing touches the caller's memory any more."""
    begun: list[Any] = []
    try:
        return start(How(how.priority, how.timeout, True, begun)).wait()
    except BaseException:
        give_up(begun)
        raise


class _Heard:
    """In the place of an exchange of notices that is over."""

    taken = True

    def __init__(self) -> None:
        self._fd = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def done(self) -> bool:
        """It is."""
        return True

    def wait(self) -> None:
        """There is nothing to wait for."""

    def completion_fd(self) -> int:
        """A descriptor that is always readable."""
        return self._fd


@functools.cache
def _heard() -> Any:
    return _Heard()


class Message(StepwiseHandle):
    """A message in progress: what this rank sends to the other one of the lane, and what it gets from it.

    Args:
        lane: where it goes.
        out: what is sent; None: nothing.
        into: where what comes belongs; None: nothing comes; ANYTHING: in new memory, see `content` and `received`.
        how: see How.
        result: what wait() returns.
        among: gets this message, unless nothing has begun when this raises.
    """

    def __init__(
        self,
        lane: Lane,
        out: Part | None,
        into: Part | Content | None,
        how: How,
        result: Any = None,
        among: deque[Message] | None = None,
    ) -> None:
        super().__init__(result)
        self.lane = lane
        self.is_heard = False  # the other rank's notice has been read, or will never come
        self.content = NOTHING  # of what has come, as the other rank says
        self.received: Any = None  # its bytes, where any could come
        self._takes_anything = into == ANYTHING
        self._out = out or _NO_PART
        self._into = into if isinstance(into, Part) else _NO_PART
        self._priority, self._timeout, self._awaited, begun = how  # but not the list, which will hold this message
        self._begun: list[_core.Handle[None]] = []  # the exchange of notices, then the broadcasts started with it
        self._late: list[_core.Handle[None]] = []  # the broadcast of one that is deferred
        self._ending: list[_core.Handle[None]] = []  # broadcasts of the other rank, which will fail
        self._hearing = new_lock()  # of who waits for the exchange, or reads the notice; before the lane's lock
        self._notice = lane.lanes.take_notice()
        if begun is not None:
            begun.append(self)
        try:
            self._start(into is not None, among)
        except BaseException:
            self.give_up()  # nobody gets a handle
            if not self.has_begun:
                lane.lanes.give_back(self._notice)
                if among is not None:
                    with lane.lock, contextlib.suppress(ValueError):
                        among.remove(self)
            raise

    @property
    def has_begun(self) -> bool:
        """False where something was raised before anything was sent: it is no message then."""
        return bool(self._begun)

    def _start(self, takes: bool, among: deque[Message] | None) -> None:
        lane, notice, (out, source), (into, target) = self.lane, self._notice, self._out, self._into
        if self._takes_anything:
            into = ANYTHING
        while (first := lane.first_unheard()) is not None and first.heard():
            pass  # perhaps nobody holds it any more
        # These are declared before anything is sent.
        outward = lane.large(out.nbytes, True) if out.nbytes > SMALL else None
        inward = lane.large(into.nbytes, False) if into.nbytes > SMALL else None
        if 0 < out.nbytes <= SMALL:
            _core.copy_bytes(notice.content_address(lane.position), source.address, out.nbytes)
        with lane.lock:
            # A message of unknown size has to begin before what comes behind it can.
            self.is_deferred = takes and (self._takes_anything or bool(lane.deferred))
            self._sends = Said(out, None if outward is None else outward.next_round)
            if self.is_deferred:
                inward = None
            self._expects = Said(into, None if inward is None else inward.next_round)
            said, self._fitting = packed(self._sends, self._expects)
            notice.write(lane.position, said)
            contents: tuple[Broadcast, ...] = ()
            if outward is not None:
                contents += ((outward, source, lane.position),)
            if inward is not None:
                contents += ((inward, target, 1 - lane.position),)
            # Behind another message, this thread first waits for that one, and works for no loop.
            is_first = lane.first_unheard() is None
            lane.deferred += self.is_deferred
            lane.unheard.append(self)
            if among is not None:
                among.append(self)
            how = self._priority, is_first, self._awaited, self._timeout
            self._begin(lane.start, notice, contents, *how, self._begun)
        if self.is_deferred:
            attend(lane)

    def _begin(self, start: Callable[..., None], *what: Any) -> None:
        try:
            with keeping:
                start(*what)
        except Exception as error:
            if not self.has_begun:
                raised(error)
                raise
            if not isinstance(error, BpsError) and runs_handlers():
                raise
            self._error = error  # the notice is on its way: the message fails when that is over

    def give_up(self) -> None:
        """Leaves the caller's memory alone from now on: a small message is discarded, and a large one fails."""
        with self._hearing:
            content = self._into.content
            self._out = self._into = _NO_PART
            if content.nbytes > 0 and not self._over:
                self._into = Part(content, arrays.describe(arrays.empty_bytes(content.nbytes), True))
            for handle in self._going_on():
                _core.give_up(handle)

    def _going_on(self) -> Sequence[_core.Handle[None]]:
        return (*self._begun[1:], *self._late)

    def heard(self) -> bool:
        """Returns whether the other rank's notice has come, or the message has failed."""
        with keeping:
            return self._hear(waits=False)

    def blocker(self) -> Blocker:
        """What has to end before done() can change."""
        if self.is_heard:
            for handle in (*self._going_on(), *self._ending):
                if not (handle.taken or handle.done()):
                    return handle
            return self._exchange
        first = self._first()
        return self._exchange if first is self else self._behind(first)

    def _first(self) -> Message:
        """The message that has to be heard next: one before this one, or this one."""
        first: Message | None = self.lane.first_unheard()
        return self if first is None or self.is_heard else first  # another thread may have heard it meanwhile

    def _behind(self, first: Message) -> AnyOf:
        """What has to end before this message, which is behind the first one, can go on."""
        # The other rank may have to be told that the first one does not fit, and the own one may fail before.
        return AnyOf(first._exchange) if self._exchange.done() else AnyOf(first._exchange, self._exchange)

    @property
    def _exchange(self) -> _core.Handle[None]:
        return self._begun[0]

    @property
    def error(self) -> BaseException | None:
        """What wait() raises, as far as it is known."""
        return self._error

    # ---- Steps; under the lock. Each returns whether it is over.

    def _advance(self, *, waits: bool) -> bool:
        if not self._hear(waits=waits):
            return False
        if len(self._begun) > 1 or self._late or self._ending:
            for handles, counts in ((self._going_on(), True), (self._ending, False)):
                for handle in handles:
                    if not self._end(handle, waits=waits, counts=counts):
                        return False
        self._over = True
        self._out = self._into = _NO_PART
        self.lane.first_unheard()  # lets go of this one, and of the caller's memory, if no message ever follows
        return True

    def _end(self, handle: _core.Handle[None], *, waits: bool, counts: bool) -> bool:
        if handle.taken:
            return True
        if not waits and not handle.done():
            return False
        try:
            handle.wait()
        except BpsError as error:
            if counts:
                self._error = self._error or error
        except Exception as error:
            if runs_handlers():
                raise
            if counts:
                self._error = self._error or error
        return True

    def _hear(self, *, waits: bool) -> bool:
        # In their order: of a message that does not fit, the rounds are ended before those of the next one.
        while not self.is_heard:
            first = self._first()
            if first is self or first._exchange.done():
                if not first._read(waits=waits, is_next=True):
                    return False
            elif self._exchange.done() and not self._exchange.taken:
                if not (self._read(waits=waits, is_next=False) or waits):  # it may have failed before the first one
                    return False
            elif waits:
                self._behind(first).wait()
            else:
                return False
        return True

    def _read(self, *, waits: bool, is_next: bool) -> bool:
        """Ends the exchange, and reads the notice if it is the next one. Returns whether the message is heard.

        What a signal handler raises may leave this at any point. Then it is done once more, where it has stopped.
        """
        if not self._hearing.acquire(blocking=waits):
            return False  # another thread is at it
        try:
            if self.is_heard:
                return True
            if not (waits or self._exchange.done()):
                return False
            try:
                if not self._exchange.taken:
                    self._exchange.wait()
                if not is_next and self.lane.first_unheard() is not self:
                    return False
                self._take(self._notice.read(1 - self.lane.position))
            except BpsError as error:
                self._error = self._error or error
            except Exception as error:
                if runs_handlers():
                    raise
                self._error = self._error or error
            self.is_heard = True
            self.lane.lanes.give_back(self._notice)
            self._begun[0] = _heard()  # lets go of its descriptor
            return True
        finally:
            self._hearing.release()

    def _take(self, said: bytes) -> None:
        """Compares what both ranks have said, and takes what has come, or ends what can never be complete."""
        if said == self._fitting:
            self.content = self._into.content
            self._copy_small()
            return
        theirs, wanted = unpacked(said)  # what the other rank sends, and what it expects
        lane, sent = self.lane, theirs.content
        self.content = sent
        if wanted.content != ANYTHING and not _agree(self._sends, wanted):
            self._disagree(self._sends, wanted, outward=True)
        if self._expects.content == ANYTHING:
            self.received = arrays.empty_bytes(max(sent.nbytes, 0))
            self._into = Part(sent, arrays.describe(self.received, True))
            self._expects = Said(sent)
        if not _agree(theirs, self._expects):
            self._disagree(theirs, self._expects, outward=False)
            return
        if self.is_deferred and sent.is_large and not self._late:
            with lane.lock:
                if lane.catch_up(sent.nbytes, False, theirs.round or 0):
                    how = self._priority, self._awaited, self._timeout
                    self._begin(lane.start_late, sent.nbytes, self._into.memory, *how, self._late)
                else:
                    self._disagree(theirs, self._expects, outward=False)
        self._copy_small()

    def _copy_small(self) -> None:
        if 0 < self.content.nbytes <= SMALL:
            address = self._notice.content_address(1 - self.lane.position)
            _core.copy_bytes(self._into.memory.address, address, self.content.nbytes)

    def _disagree(self, sent: Said, expected: Said, *, outward: bool) -> None:
        lane = self.lane
        sender, receiver = (lane.own, lane.peer) if outward else (lane.peer, lane.own)
        self._error = self._error or mismatch(lane.name, sender, sent.content, receiver, expected.content)
        theirs = expected if outward else sent
        if theirs.round is not None:  # the other rank waits for a broadcast
            with lane.lock:
                ending = lane.end(theirs.content.nbytes, outward, theirs.round, self._timeout)
            if ending is not None:
                self._ending.append(ending)
        # The other rank may wait for one of those behind, to which this rank must reply, before it replies to this one.
        attend(lane)


class _Attention:
    """What the thread of Progress does for a lane: it reads the notices of all messages, in their order.

    One for each lane, as there may be thousands of messages in it.

    Args:
        lane: where messages are under way.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._first: Message | None = None  # that has to be heard next

    def done(self) -> bool:
        """Returns whether no message is left; the next one has to ask for attention again."""
        while True:
            with self._lane.lock:
                self._first = self._lane.first_unheard()
                if self._first is None:
                    self._lane.is_attended = False
                    return True
            if not self._first.heard():
                return False

    def blocker(self) -> Blocker:
        """The exchange of notices of the first message."""
        assert self._first is not None
        return self._first._exchange


def attend(lane: Lane) -> None:
    """Lets the thread of Progress go on with the messages of a lane."""
    with lane.lock:
        if not lane.is_attended:
            lane.lanes.progress().add(_Attention(lane))
            lane.is_attended = True


def _agree(sent: Said, expected: Said) -> bool:
    return sent.content == expected.content and (
        sent.round == expected.round or sent.round is None or expected.round is None
    )


def mismatch(name: str, sender: int, sent: Content, receiver: int, expected: Content) -> MismatchError:
    """The error of a message that the receiver has no place for."""
    text = f"{name}: rank {sender} sends {sent}, and rank {receiver} expects {expected}"
    if sent == expected:
        text = f"{name}: a message before this one did not fit, or was given up, and this one was under way already"
    return MismatchError(text, "pass arrays of the same size and dtype on both ranks, in the same order")


class Together(StepwiseHandle):
    """Several messages as one handle.

    Args:
        parts: what is in progress.
        finish: returns the result, once all of them are complete.
    """

    def __init__(self, parts: Sequence[Any], finish: Callable[[], Any]) -> None:
        super().__init__()
        self._parts = parts
        self._finish = finish

    def _advance(self, *, waits: bool) -> bool:  # done() does not call it
        for part in self._parts:
            try:
                if not part.taken:  # a signal handler may have raised something after it was waited for
                    part.wait()
            except BpsError as error:  # the first is raised, once all are over
                self._error = self._error or error
            except Exception as error:
                if runs_handlers():
                    raise
                self._error = self._error or error
        if self._error is None:
            self._result = self._finish()
        self._over = True
        return True

    def give_up(self) -> None:
        """Leaves the caller's memory alone from now on."""
        for part in self._parts:
            give_up_one(part)

    def done(self) -> bool:
        """Returns whether wait() would return or raise at once."""
        return self._over or sum(not part.done() for part in self._parts) == 0  # each of them goes on

    def blocker(self) -> Blocker:
        """What has to end before done() can change."""
        for part in self._parts:
            if not part.done():
                return blocker_of(part)
        return blocker_of(self._parts[-1])
