# SPDX-License-Identifier: Apache-2.0
"""Errors that the library keeps for a later call. Until one is raised, the caller knows nothing of the end of its view.

What a caller knows decides in which view its next call belongs. So code that catches an error of an operation and gives
it to the caller later does so within `keeping`, and threads of the library always do.
"""

from __future__ import annotations

import threading

from bps_rdma.errors import BpsError


class _Keeping(threading.local):
    """`with keeping:` the errors of this thread are kept. It may be nested."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1

    def __bool__(self) -> bool:
        return self.depth > 0

    def for_this_thread(self) -> None:
        """Says that this is a thread of the library."""
        self.depth += 1


keeping = _Keeping()


def is_outcome(error: BaseException) -> bool:
    """Whether what a wait has raised is what became of the operation, which is over then.

    Everything else is what a signal handler has raised, which may be of any class; the main thread runs it. It is for
    the caller, at once, and the operation goes on.
    """
    return isinstance(error, BpsError) or threading.current_thread() is not threading.main_thread()
