# SPDX-License-Identifier: Apache-2.0
"""Errors that the library keeps for a later call. Until one is raised, the caller knows nothing of the end of its view.

What a caller knows decides in which view its next call belongs. So code that catches an error of an operation and gives
it to the caller later does so within `keeping`, and threads of the library always do.
"""

from __future__ import annotations

import threading


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


def runs_handlers() -> bool:
    """Whether signal handlers run in this thread, and so may have raised what is no BpsError, of any class.

    That is no outcome of an operation, which goes on. It is for the caller, at once. Who catches errors to keep them
    catches BpsError apart: no handler may run between an outcome, which comes once, and the note of it.
    """
    return threading.current_thread() is threading.main_thread()
