# SPDX-License-Identifier: Apache-2.0
"""Starts jobs of real processes for tests; what tests and the bodies of their ranks use of it.

`harness.run(body, workers=3)` calls `body(bps_rdma, *args)` on three ranks, each a process of its own, and returns what
the three calls returned; `@harness.on_ranks(workers=3)` makes a test of such a body. `harness.start()` gives the
running job, for tests that end members or watch them. A body tells its test and the other ranks how far it has come by
`mark()`, and waits for them by `await_mark()`.
"""

from .environment import binary, clean_env, cut_at, lines_of, of_rank, of_roles, on_hosts, over, run_command
from .forkserver import PRELOAD, end_forkserver
from .job import Job, Outcome, on_ranks, run, scripts, start, succeeded
from .leftovers import shared_memory_files
from .members import JobFailedError, Members
from .ports import free_port, free_ports
from .process import Command, has_stopped, is_blocked
from .rank import await_mark, is_interrupted, is_marked, mark
from .threads import beside, in_threads
from .waiting import PATIENCE, WaitedInVainError, eventually

__all__ = [
    "PATIENCE", "PRELOAD", "Command", "Job", "JobFailedError", "Members", "Outcome", "WaitedInVainError",
    "await_mark", "beside", "binary", "clean_env", "cut_at", "end_forkserver", "eventually", "free_port", "free_ports",
    "has_stopped", "in_threads", "is_blocked", "is_interrupted", "is_marked", "lines_of", "mark", "of_rank", "of_roles",
    "on_hosts", "on_ranks", "over", "run", "run_command", "scripts", "shared_memory_files", "start", "succeeded",
]  # fmt: skip
