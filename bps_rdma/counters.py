# SPDX-License-Identifier: Apache-2.0
"""Counters and reports: they say what the job of this process has done, and what it is doing."""

from __future__ import annotations

import json
import time
from typing import Any

from bps_rdma.job import asked, current


def metrics() -> dict[str, Any]:
    """Counters of this process since init(): {"total": {name: count}, "transports": [transport to each server]}.

    Data-plane and control-plane traffic, copies, stalls and rounds; csrc/core/metrics.h explains each one. "slot_bytes"
    and "open_rounds" are of this moment, and lack the loops that do not reply within two seconds ("silent_loops"). On a
    worker "dealt_bytes" are those of the tensors that it has declared, and "misdealt_bytes" those of them that servers
    sum beyond what their weights say.
    """
    return asked(lambda process: {"total": dict(process.metrics()), "transports": list(process.transports)})


def dump() -> dict[str, Any]:
    """Reports what this process is doing and what it waits for. `bps dump` collects the reports of a whole job.

    Returns:
        A dictionary. "members" has an entry for each member of the job; that of a server says which part of the bytes
        of all ranks it should sum ("share"), and on a worker how many bytes of its tensors it sums and would sum by the
        weights ("dealt_bytes", "due_bytes"). "operations" has an entry for each partition that is not finished on this
        rank: the "operation" with its name and round, "server", "waits_for" ("answer"; "credit" where it was not sent
        yet; "gpu" where a GPU has still to copy what is sent, or the result), "since_ms", and "left_ms" until its
        deadline. "rounds" has one for each round that a server of this process has open: "group", "tensor" (the id that
        operations have, too), "partition", "round", "waits_for", and "missing": the ranks that have not pushed. "calls"
        are those that wait for the scheduler, such as barriers. "loops" lists the loops; one that does not reply within
        half a second has "answered" false. Each lists 256 partitions and rounds at most. "recent" are the last
        operations, oldest first: "kind", "name", "bytes", "round", "state" ("open", "done" or "failed"), "age_ms" since
        it began, and "duration_us", which is -1 while it is open. "counters" are those of metrics(). Any thread may
        ask.
    """
    found: dict[str, Any] = json.loads(asked(lambda process: process.dump()))
    return found


def get_pushpull_speed() -> tuple[int, float]:
    """Returns (milliseconds since the epoch, MB/s of tensors finished since the last call or since init())."""
    job = current()
    now = time.monotonic()
    done = asked(lambda process: dict(process.metrics()))["operation_bytes"]
    elapsed = max(now - job.window_start, 1e-9)
    speed = (done - job.window_bytes) / elapsed / 1e6
    job.window_start, job.window_bytes = now, done
    return int(time.time() * 1000), speed
