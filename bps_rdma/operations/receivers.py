# SPDX-License-Identifier: Apache-2.0
"""Receiving from several ranks: whichever sends first. Also from one rank, behind those who wait for any."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from typing import Any

from bps_rdma import _core
from bps_rdma.blockers import Blocker
from bps_rdma.errors import BpsError, DeadlineError, PeerLostError, UnknownHandleError
from bps_rdma.handle import PythonHandle
from bps_rdma.job import raised
from bps_rdma.kept_errors import keeping, runs_handlers
from bps_rdma.operations.lanes import ANYTHING, Lane, Part
from bps_rdma.operations.messages import How, Message, mismatch

_FOREVER = float("inf")


class ReceiveFromAny(PythonHandle[Any]):
    """Waits for the first message of several lanes.

    Each lane has a message that expects anything, without a deadline of its own: it stays when another lane's has come,
    and is the next one that somebody receives from that rank. Receivers get messages in the order in which they were
    made, whichever is looked at first. Any thread may make one go on, as it may have to let a later one come.

    A message that failed, as at its sender's deadline, is that of the receiver which would have got it: those after it
    get what is meant for them. Only of a rank that is lost nothing is expected any more.

    Args:
        lanes: those from which something may come.
        part: where it belongs.
        how: see How; the deadline begins now.
        result: what wait() returns; None: the rank that has sent.
    """

    def __init__(self, lanes: list[Lane], part: Part, how: How, result: Any = None) -> None:
        self._lanes = lanes
        self._part = part
        self._how = How(how.priority, how.timeout, how.awaited)  # without a list that holds this one
        self._result = result
        self._taken: Message | None = None  # until it is over
        self._src: int | None = None
        seconds = lanes[0].lanes.process.timeout_s if how.timeout is None else how.timeout
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._failed: dict[int, BaseException] = {}  # by rank
        self._waiting: select.epoll | None = None  # made when somebody waits: there may be thousands of receivers
        self._watched: deque[Blocker] = deque()  # kept, so that their descriptors are open
        self._bell: _Bell | None = None  # for those who wait for the descriptor: it is over, or at its deadline
        self._error: BaseException | None = None
        self._over = False
        self._turn = threading.RLock()
        self._watching = threading.RLock()  # of what is waited for, and the bell; for moments
        if how.begun is not None:
            how.begun.append(self)
        try:
            with keeping, self._turn:  # those behind this one may make it go on as soon as it has joined
                with lanes[0].lanes.joining:
                    for lane in lanes:
                        self._join(lane)
                self._find()
                self._claim()
        except BaseException as error:  # nobody gets a handle
            self._give_up(error)
            raise

    def __del__(self) -> None:
        bell: _Bell | None = getattr(self, "_bell", None)
        if bell is not None:
            bell.ring()  # its alarm is a thread

    def wait(self) -> Any:
        """Blocks until a message has come, and returns the rank that has sent it, or the given result."""
        with self._turn, keeping:
            while not self._over and not self._advance():
                left = self._end - time.monotonic()
                if left <= 0:
                    self._miss()
                else:
                    self._descriptors().poll(None if left == _FOREVER else left)
        if self._error is not None:
            raise raised(self._error)
        return self._result

    def done(self) -> bool:
        """Returns whether wait() would return or raise at once."""
        if self._over:
            return True
        if not self._turn.acquire(blocking=False):
            return False
        try:
            with keeping:
                if not self._over and not self._advance() and time.monotonic() >= self._end:
                    self._miss()
                return self._over
        finally:
            self._turn.release()

    def blocker(self) -> Blocker:
        """The receiver itself, as it does not know who will send."""
        return self

    def completion_fd(self) -> int:
        """A descriptor that is readable when done() may have changed."""
        with self._watching:  # not the lock of the thread that waits
            waiting = self._descriptors()
            if self._bell is None:
                bell = _Bell()
                waiting.register(bell.fd, select.EPOLLIN)
                if self._over:
                    bell.ring()
                else:
                    bell.ring_in(self._end - time.monotonic())
                self._bell = bell  # last: what a signal handler raises leaves none that is not rung
            return waiting.fileno()

    def _descriptors(self) -> select.epoll:
        with self._watching:
            if self._waiting is None:
                made = select.epoll()
                for blocker in self._watched:
                    with contextlib.suppress(FileExistsError):
                        made.register(blocker.completion_fd(), select.EPOLLIN)
                self._waiting = made
            return self._waiting

    def give_up(self) -> None:
        """Leaves the caller's memory alone from now on, and what comes to the next one who receives."""
        with self._turn:  # another receiver may have made this one go on
            if not self._over:
                self._give_up(UnknownHandleError("this receiver was given up", "receive once more"))

    @property
    def src(self) -> int | None:
        """The rank that has sent, once that is known."""
        return self._src

    def _join(self, lane: Lane) -> None:
        with lane.lock:
            lane.receivers.append(self)
            self._expect(lane)

    def _expect(self, lane: Lane) -> None:
        """Expects as many messages in a lane as there are receivers. Under its lock."""
        try:
            while len(lane.expected) < len(lane.receivers):
                self._expect_one(lane)
        except BpsError as error:
            self._failed[lane.peer] = error  # others may still send
            lane.receivers.remove(self)

    def _expect_one(self, lane: Lane) -> None:
        Message(lane, None, ANYTHING, How(self._how.priority, timeout=_FOREVER), among=lane.expected)

    def _find(self) -> None:
        """Looks for a message that has come. What a signal handler raises may leave this at any point, and _claim()."""
        if any(lane.peer not in self._failed and self._has_come(lane) for lane in self._lanes):
            return
        if len(self._failed) == len(self._lanes):
            self._fail(next(iter(self._failed.values())))

    def _has_come(self, lane: Lane) -> bool:
        """Whether a message of this lane has come, or failed, for this receiver, which then takes it."""
        is_next = self._is_next(lane)
        with lane.lock:
            expected = lane.expected[0]
            if not (is_next and expected.heard()):
                self._watch(expected)
            elif isinstance(expected.error, PeerLostError) and self._is_lost(lane):
                self._failed[lane.peer] = expected.error  # others may still send
                lane.receivers.remove(self)
                lane.expected.popleft()
            else:
                self._taken = expected
                return True
        return False

    def _is_lost(self, lane: Lane) -> bool:
        """Whether the other rank is, and has not just given a message up."""
        try:
            self._expect_one(lane)
        except BpsError:
            return True
        return False

    def _claim(self) -> None:
        """Makes what was found this receiver's own, and lets the next ones come."""
        if self._taken is None:
            return
        lane = self._taken.lane
        with lane.lock:
            if self._taken in lane.expected:
                lane.expected.remove(self._taken)
                if not (self._how.awaited or self._taken.done()):
                    lane.lanes.progress().add(_Delivery(self, self._taken))  # perhaps nobody holds this any more
        self._leave()

    def _is_next(self, lane: Lane) -> bool:
        """Whether no receiver is before this one. Those that can go on are made to, and then are there no more."""
        while (first := lane.receivers[0]) is not self:
            first.done()
            with lane.lock:
                if first is lane.receivers[0]:
                    if lane.peer not in first._failed:
                        return False
                    lane.receivers.popleft()  # it was interrupted while it left
        return True

    def _leave(self) -> None:
        for lane in self._lanes:
            with lane.lock, contextlib.suppress(ValueError):
                lane.receivers.remove(self)

    def _watch(self, message: Message) -> None:
        """Lets this receiver be looked at when the message may have gone on."""
        blocker = message.blocker()
        with self._watching:
            self._watched.append(blocker)  # before it is registered, so that no other one ever is
            if self._waiting is not None:
                with contextlib.suppress(FileExistsError):
                    self._waiting.register(blocker.completion_fd(), select.EPOLLIN)

    def _forget_watched(self) -> None:
        with self._watching:
            while self._watched:
                if self._waiting is not None:
                    with contextlib.suppress(FileNotFoundError):  # it is twice there, or was interrupted before
                        self._waiting.unregister(self._watched[0].completion_fd())
                self._watched.popleft()

    def _advance(self) -> bool:
        if self._error is not None:  # interrupted before it was over
            self._finish()
            return True
        self._forget_watched()
        if self._taken is None:
            self._find()
        self._claim()
        if self._over or self._taken is None:
            return self._over
        message = self._taken
        if not message.done():
            self._watch(message)
            return False
        try:
            message.wait()
            self._deliver(message)
        except Exception as error:  # as long as the receiver is not over, the message gives it again
            if not isinstance(error, BpsError) and runs_handlers():
                raise
            self._fail(error)
        self._finish()
        return True

    def _deliver(self, message: Message) -> None:
        lane, content = message.lane, self._part.content
        if message.content != content:
            raise mismatch(lane.name, lane.peer, message.content, lane.own, content)
        if content.nbytes > 0:
            _core.copy_bytes(self._part.memory.address, message.received.ctypes.data, content.nbytes)
        self._src = lane.peer
        if self._result is None:
            self._result = lane.peer

    def _miss(self) -> None:
        ranks = ", ".join(str(lane.peer) for lane in self._lanes)
        self._give_up(
            DeadlineError(
                f"{self._lanes[0].name}: nothing came within {self._seconds:g} s from any of the ranks {ranks}",
                "check that one of them sends with the same name, tag and group, or set a longer timeout",
            )
        )

    def _give_up(self, error: BaseException) -> None:
        if self._taken is not None:  # the next one who receives from that rank gets what comes
            lane = self._taken.lane
            with lane.lock:
                if self._taken not in lane.expected:
                    lane.expected.appendleft(self._taken)
                for receiver in lane.receivers:
                    if receiver is not self:
                        receiver._watch(self._taken)  # it waits for the message after this one
                        break
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self._leave()
        with self._watching:
            if self._bell is not None:
                self._bell.ring()
            else:
                self._waiting = None  # nobody but this receiver knows its descriptor
            self._watched.clear()
            self._over = True
        self._taken = None


class _Delivery:
    """What remains to be done once a receiver has taken a message of which the notice alone has come.

    Args:
        receiver: that of the message.
        message: the same.
    """

    def __init__(self, receiver: ReceiveFromAny, message: Message) -> None:
        self._receiver = receiver
        self._message = message

    def done(self) -> bool:
        """Whether the receiver is over."""
        return self._receiver.done()

    def blocker(self) -> Blocker:
        """That of the message."""
        return self._message.blocker()


class _Bell:
    """A descriptor that becomes readable, and stays so."""

    def __init__(self) -> None:
        self._alarm: threading.Timer | None = None
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __del__(self) -> None:
        if hasattr(self, "fd"):  # a signal handler may have raised something
            os.close(self.fd)

    def ring(self) -> None:
        """Rings now."""
        os.eventfd_write(self.fd, 1)
        alarm, self._alarm = self._alarm, None
        if alarm is not None:
            alarm.cancel()

    def ring_in(self, seconds: float) -> None:
        """Rings then, if nobody has before."""
        if seconds < threading.TIMEOUT_MAX:
            self._alarm = threading.Timer(max(seconds, 0.0), self.ring)
            self._alarm.daemon = True
            self._alarm.start()
