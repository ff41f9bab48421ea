# SPDX-License-Identifier: Apache-2.0
"""How a thread waits for many handles at once: by the descriptors of what has to end first, their blockers."""

from __future__ import annotations

import select
from typing import Generic, Protocol, TypeVar

Waiter = TypeVar("Waiter")


class Blocker(Protocol):
    """It owns a descriptor that is readable once it is over, until somebody drops it, or starts it again."""

    def completion_fd(self) -> int:
        """Returns that descriptor."""


class AnyOf:
    """What is over once one of some blockers is."""

    def __init__(self, *blockers: Blocker) -> None:
        self._blockers = blockers  # kept, so that their descriptors are open
        self._epoll = select.epoll()
        for blocker in blockers:
            self._epoll.register(blocker.completion_fd(), select.EPOLLIN)

    def completion_fd(self) -> int:
        """Returns a descriptor that is readable once one of them is over."""
        return self._epoll.fileno()

    def wait(self) -> None:
        """Blocks until then."""
        self._epoll.poll()


class Blockers(Generic[Waiter]):
    """Blockers, each with those that wait for it. One thread uses it.

    Other threads may take a result and drop the blocker meanwhile. It is kept here as long as it is waited for: a
    descriptor that was closed wakes nobody, and its number may be that of another one.

    Args:
        wake: a descriptor by which wait() can be ended.
    """

    def __init__(self, wake: int) -> None:
        self._epoll = select.epoll()
        self._epoll.register(wake, select.EPOLLIN)
        self._wake = wake
        self._waiting: dict[int, tuple[Blocker, list[Waiter]]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, blocker: Blocker, waiter: Waiter) -> None:
        """Lets wait() return this one when its blocker is over."""
        fd = blocker.completion_fd()
        if fd not in self._waiting:
            self._epoll.register(fd, select.EPOLLIN)
            self._waiting[fd] = blocker, []
        self._waiting[fd][1].append(waiter)

    def wait(self) -> list[Waiter]:
        """Blocks until blockers are over, or it is woken; returns those that waited for them."""
        found = []
        for fd, _ in self._epoll.poll():
            if fd != self._wake:
                self._epoll.unregister(fd)
                found += self._waiting.pop(fd)[1]
        return found

    def close(self) -> None:
        """Drops all blockers."""
        self._epoll.close()
        self._waiting.clear()
