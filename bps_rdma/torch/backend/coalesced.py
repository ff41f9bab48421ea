# SPDX-License-Identifier: Apache-2.0
"""The calls that a script makes within torch's coalescing context: they start at once, and are one work in the end.

Where something is raised within the context, torch says so to nobody. It goes on to note calls of that group as parts
of the context that it would coalesce itself, and makes none of them. So the end of the context is watched: the context
is a generator, which ends with it.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from typing import Any

from torch.distributed import distributed_c10d

from bps_rdma.torch.backend.work import BpsWork


class CoalescedCalls:
    """Those of one group."""

    def __init__(self) -> None:
        self._works: list[BpsWork] | None = None  # what was started since begin()

    def begin(self, group: object) -> None:
        """A context begins; called by the method of the group that torch calls."""
        works = self._works = []
        context = _running_context()
        if context is not None:
            weakref.finalize(context, self._ended, weakref.ref(group), works).atexit = False

    def add(self, work: BpsWork) -> None:
        """A call has started, perhaps within a context."""
        if self._works is not None:
            self._works.append(work)

    def end(self) -> list[BpsWork]:
        """All that was started since begin()."""
        works, self._works = self._works or [], None
        return works

    def _ended(self, group: weakref.ref[Any], works: list[BpsWork]) -> None:
        if self._works is works:  # by an error
            self._works = None
            state: dict[Any, Any] = distributed_c10d._world.pg_coalesce_state
            state.pop(group(), None)


def _running_context() -> Any:
    """The generator of the context that calls the caller of begin(); None where it is not torch's."""
    entering = sys._getframe(3).f_back  # contextlib's, which runs the generator
    manager = None if entering is None else entering.f_locals.get("self")
    return manager.gen if isinstance(manager, contextlib._GeneratorContextManager) else None
