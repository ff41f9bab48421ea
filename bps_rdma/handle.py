# SPDX-License-Identifier: Apache-2.0
"""Handles of operations in progress, and awaiting them. asyncio is imported only where a handle is awaited."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any

from bps_rdma._core import Handle, PreparedOperation

__all__ = ["Handle", "PreparedOperation", "PythonHandle", "awaiting"]


class PythonHandle(ABC):
    """A handle of an operation that consists of several of the core's; it is used like the core's own Handle."""

    taken = False  # unlike that one, it can be waited for again

    @abstractmethod
    def wait(self) -> Any:
        """Blocks until the operation is over, and returns its array."""

    @abstractmethod
    def done(self) -> bool:
        """Whether wait() would return, or raise, at once."""

    @abstractmethod
    def completion_fd(self) -> int:
        """A file descriptor that becomes readable once wait() would not block."""

    def __await__(self) -> Generator[Any, None, Any]:
        """Waits in the running event loop."""
        return awaiting(self)


def awaiting(handle: Handle | PreparedOperation | PythonHandle) -> Generator[Any, None, Any]:
    """Implements `await handle`: waits in the running event loop, then takes the result."""
    if not handle.done():
        import asyncio  # an awaiting caller has it; for all others it would be most of this package's import time

        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        fd = handle.completion_fd()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        loop.add_reader(fd, wake)
        try:
            yield from woken.__await__()
        finally:
            loop.remove_reader(fd)
    return handle.wait()
