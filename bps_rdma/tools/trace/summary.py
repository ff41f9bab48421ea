# SPDX-License-Identifier: Apache-2.0
"""Says where the time of a traced job went: by stage, by step, and by the rank that the others waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bps_rdma.tools.trace.files import Span, Trace
from bps_rdma.tools.trace.merge import named, tensor_names
from bps_rdma.tools.trace.steps import covered, hidden_percent, steps_of

_STAGES = {
    "queued": "in the send queue, behind others",
    "waits for GPU": "until the GPU has done what comes before: kernels, and other copies",
    "copy from GPU": "by the GPU, into memory of the host",
    "copied": "in that memory, behind others",
    "credit wait": "held up by a lack of credits",
    "sent": "from the send call to the answer, the server's part included",
    "copy to GPU": "by the GPU, of the answer",
    "waits for ranks": "on the server, from the first contribution to the last",
    "sum": "on the server",
    "answer": "on the server, until the answers are on their way",
}
_OF_GPUS = ("waits for GPU", "copy from GPU", "copied", "copy to GPU")  # left out where there are none


def summarize(traces: Sequence[Trace], longest: int = 10) -> dict[str, Any]:
    """A summary that can be printed as JSON. Times are in milliseconds.

    Args:
        traces: of all processes.
        longest: how many waits to list.
    """
    names = tensor_names(traces)
    spans = [span for trace in traces for span in (*trace.partitions, *trace.rounds)]
    waits = [(_length(span.stages["waits for ranks"]), span) for trace in traces for span in trace.rounds]
    waits.sort(key=lambda wait: -wait[0])
    stages = [_stage(name, text, spans) for name, text in _STAGES.items()]
    return {
        "processes": [trace.about["process"] for trace in traces],
        "dropped": sum(trace.about["dropped"] for trace in traces),
        "stages": [row for row in stages if row["count"] or row["stage"] not in _OF_GPUS],
        "steps": steps_of(traces) or _rounds(traces),
        "hidden_percent": hidden_percent(traces),
        "last_ranks": _last_ranks(waits),
        "longest_waits": [
            {
                "tensor": named(span.tensor, names),
                "round": span.args["round"],
                "partition": span.args["partition"],
                "waited_ms": length,
                "for_rank": span.args["last_rank"],
            }
            for length, span in waits[:longest]
        ],
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of sorted values; 0 of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _length(stage: tuple[float, float]) -> float:
    return round((stage[1] - stage[0]) / 1e3, 6)


def _stage(name: str, text: str, spans: Iterable[Span]) -> dict[str, Any]:
    lengths = sorted(_length(span.stages[name]) for span in spans if name in span.stages)
    return {
        "stage": name,
        "meaning": text,
        "count": len(lengths),
        "median_ms": percentile(lengths, 0.5),
        "p90_ms": percentile(lengths, 0.9),
        "p99_ms": percentile(lengths, 0.99),
        "max_ms": lengths[-1] if lengths else 0.0,
        "total_ms": round(sum(lengths), 6),
    }


def _rounds(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """The time of each round on the slowest worker, and how much of it some partition was under way."""
    workers: Mapping[int, list[tuple[float, float]]] = defaultdict(list)
    for trace in traces:
        by_round: Mapping[int, list[Span]] = defaultdict(list)
        for span in trace.partitions:
            by_round[span.args["round"]].append(span)
        for number, spans in by_round.items():
            took = max(span.end for span in spans) - min(span.begin for span in spans)
            workers[number].append((took / 1e3, covered(span.under_way for span in spans) / 1e3))
    return [
        {"step": number, "took_ms": round(max(times)[0], 6), "under_way_ms": round(max(times)[1], 6)}
        for number, times in sorted(workers.items())
    ]


def _last_ranks(waits: Sequence[tuple[float, Span]]) -> list[dict[str, Any]]:
    """The rounds, by rank, in which its contribution was the last, and how long the first one had waited by then."""
    by_rank: Mapping[int, list[float]] = defaultdict(list)
    for length, span in waits:
        if span.args["first_rank"] != span.args["last_rank"]:
            by_rank[span.args["last_rank"]].append(length)
    rows = [
        {"rank": rank, "rounds": len(lengths), "waited_ms": round(sum(lengths), 6)} for rank, lengths in by_rank.items()
    ]
    return sorted(rows, key=lambda row: -row["waited_ms"])
