"""Awaiting handles. The handle itself is the core's; asyncio is imported only where somebody awaits."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from bps_rdma._core import Handle

__all__ = ["Handle", "awaiting"]


def awaiting(handle: Handle) -> Generator[Any, None, Any]:
    """What `await handle` does: waits in the running event loop, then takes the result."""
    if not handle.done():
        import asyncio  # whoever awaits has it; for the others it would be most of this package's import

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
