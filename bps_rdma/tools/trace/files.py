# SPDX-License-Identifier: Apache-2.0
"""The trace of one process, as csrc/core/trace_json.cc writes it. Times are microseconds of that process's clock.

A process makes that file at its end. One that was killed, or still runs, has left its events instead.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bps_rdma import _core
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.files import read_text

_EVENTS = ".events"

Key = tuple[int, int, int, int]  # group, tensor, round, partition


@dataclass
class Span:
    """An operation, a partition on a worker, a round on a server, or what a program did; with its stages in order."""

    name: str
    args: dict[str, Any]
    begin: float
    end: float = 0
    stages: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """The key that the same partition has in the trace of another process."""
        return (self.args["group"], self.args["tensor"], self.args["round"], self.args.get("partition", 0))

    @property
    def under_way(self) -> tuple[float, float]:
        """When it was communication. What a GPU computes before it is none."""
        computed = self.stages.get("waits for GPU", (0.0, 0.0))[1]
        copied = self.stages.get("copy from GPU", (0.0, 0.0))[0]  # those behind the first one wait in the queue
        return max(self.begin, computed, copied), self.end

    @property
    def tensor(self) -> str:
        """The name of the tensor."""
        return self.name.rpartition(" [")[0] if "partition" in self.args else self.name


@dataclass
class Trace:
    """One file."""

    path: Path
    events: list[dict[str, Any]]
    about: dict[str, Any]  # process, host, worker_rank, server_rank, clock, dropped
    operations: list[Span] = field(default_factory=list)
    partitions: list[Span] = field(default_factory=list)
    rounds: list[Span] = field(default_factory=list)
    program: list[Span] = field(default_factory=list)


def paths(folder: Path) -> list[Path]:
    """The files of a folder that BPS_TRACE has named."""
    both = [sorted(folder.glob(f"*/comm*{suffix}")) for suffix in (_EVENTS, ".json")]
    return sorted({path.with_suffix(""): path for found in both for path in found}.values())


def find(folder: Path, tell: Callable[[Path, int], None] = lambda path, done: None) -> list[Trace]:
    """The traces of all processes in a folder.

    Args:
        folder: that BPS_TRACE has named.
        tell: called before each file, with the bytes of those before it.

    Raises:
        InvalidArgumentError: there is none, or a file is not one.
    """
    found = paths(folder)
    if not found:
        raise InvalidArgumentError(f"{folder} has no traces", "name the folder that BPS_TRACE named")
    traces, done = [], 0
    for path in found:
        tell(path, done)
        traces.append(read(path))
        done += path.stat().st_size
    return traces


def read(path: Path) -> Trace:
    """The trace in one file. Raises InvalidArgumentError for any other file."""
    if path.suffix == _EVENTS and not path.exists():  # its process has just ended
        path = path.with_suffix(".json")
    try:
        content = json.loads(_text(path))
        trace = Trace(path, content["traceEvents"], content["otherData"])
        lists = {"operation": trace.operations, "partition": trace.partitions, "round": trace.rounds}
        lists["program"] = trace.program
        for category, span in _spans(trace.events):
            lists[category].append(span)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(f"{path} is no trace of bps_rdma: {error}", "leave it out") from error
    return trace


def _text(path: Path) -> str:
    """The text of the file, or the text that is made from its events."""
    if path.suffix != _EVENTS:
        return read_text(path)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "comm.json"
        _core.format_trace(str(path), str(made))
        return made.read_text()


def _spans(events: list[dict[str, Any]]) -> Iterator[tuple[str, Span]]:
    open_: dict[str, Span] = {}
    for event in events:
        if event["ph"] not in ("b", "e"):
            continue
        identity = event["id2"]["local"]
        span = open_.get(identity)
        if span is None:
            open_[identity] = Span(event["name"], event["args"], event["ts"])
        elif event["name"] != span.name:
            begin, _ = span.stages.get(event["name"], (event["ts"], 0))
            span.stages[event["name"]] = (begin, event["ts"])
        else:
            span.end = event["ts"]
            yield event["cat"], open_.pop(identity)
