# SPDX-License-Identifier: Apache-2.0
"""The plan of a measurement: operations, dtypes, sizes and numbers of rounds, sent to the ranks as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bps_rdma.errors import InvalidArgumentError

OPS = ("push_pull", "reduce_scatter", "all_gather", "broadcast")
# Bytes per element. bool is left out: its sum is "any", which does not show who contributed.
DTYPES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int32": 4, "int64": 8,
}  # fmt: skip
BASELINES = ("gloo", "openmpi", "mpich")
MPI_BASELINES = ("openmpi", "mpich")  # each runs in its own processes, started by its own mpiexec
MIN_ROUNDS, MAX_ROUNDS = 5, 500  # of a case: the former for quartiles; the latter leaves time for large tensors
MEMORY_KINDS = ("plain", "shared")
DEVICES = ("cpu", "cuda")
DEFAULT_SIZES = "4K,16K,64K,256K,1M,4M,16M,64M"

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Case:
    """One row of the table: `op` on `tensors` tensors of `nbytes` bytes each, started together.

    For reduce_scatter and all_gather, `nbytes` is the size of the whole tensor; each rank gets or gives its part of it.
    A round consists of `calls` such calls one after the other, each on its own tensors, because a single small
    call would mainly measure how precisely the ranks start at the same time.
    """

    op: str
    dtype: str
    nbytes: int
    tensors: int = 1
    calls: int = 1

    @property
    def elements(self) -> int:
        """Elements of one tensor."""
        return self.nbytes // DTYPES[self.dtype]

    @property
    def arrays(self) -> int:
        """Tensors of one rank in a round."""
        return self.tensors * self.calls

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors of one call on one rank."""
        return self.nbytes * self.tensors

    @property
    def round_bytes(self) -> int:
        """Bytes of all tensors of a round on one rank."""
        return self.nbytes * self.arrays

    def name(self, index: int) -> str:
        """Name of tensor `index`; no other case uses it."""
        return f"bench/{self.op}/{self.dtype}/{self.nbytes}/{self.arrays}/{index}"


@dataclass(frozen=True)
class Plan:
    """All cases of a run, and the options for all of them.

    Attributes:
        cases: in the order in which they are measured.
        iterations: measured rounds per case; None: as many as fit, with all cases together taking `seconds`.
        warmup: rounds before these, checked but not measured.
        seconds: see `iterations`.
        memory: "plain" (numpy.empty), "shared" (bps_rdma.empty), or "cuda": that of a GPU.
        compare: baselines.
        bound: also measure the upper bound of the machine.
        load: number of processes that keep cores busy meanwhile.
        prepared: whether bps_rdma starts prepared operations (bps_rdma.prepare).
    """

    cases: tuple[Case, ...]
    iterations: int | None = None
    warmup: int = 3
    seconds: float = 16.0
    memory: str = "plain"
    compare: tuple[str, ...] = ()
    bound: bool = True
    load: int = 0
    prepared: bool = False

    def to_json(self) -> str:
        """Returns the plan as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        """The inverse of to_json."""
        values: dict[str, Any] = json.loads(text)
        values["cases"] = tuple(Case(**case) for case in values["cases"])
        values["compare"] = tuple(values["compare"])
        return Plan(**values)


def make_cases(
    sizes: str, dtypes: str, ops: str, tensors: int, calls: int | None = None, *, loaded: bool = False
) -> tuple[Case, ...]:
    """Cases for comma-separated lists; sizes are rounded down to whole elements. Raises InvalidArgumentError.

    `calls` is the number of calls per round; None: as many as fill 4 MiB, at most 64. On a `loaded` machine, where
    processes wait milliseconds for a core, as many as fill 64 MiB, at most 256: shorter rounds would only show whether
    they were interrupted.
    """

    def fitting(nbytes: int) -> int:
        most, room = (256, 64 << 20) if loaded else (64, 4 << 20)
        return max(1, min(most, room // nbytes))

    return tuple(
        Case(op, dtype, size - size % DTYPES[dtype], tensors, calls or fitting(size * tensors))
        for op in parse_choices(ops, OPS, "operation")
        for dtype in parse_choices(dtypes, tuple(DTYPES), "dtype")
        for size in map(parse_size, _words(sizes, "size"))
    )


def parse_memory(memory: str, device: str, compare: Sequence[str]) -> str:
    """Where tensors lie: Plan.memory, of the options --memory and --device. Raises InvalidArgumentError."""
    if parse_choices(device, DEVICES, "device")[0] == "cpu":
        return parse_choices(memory, MEMORY_KINDS, "kind of memory")[0]
    if compare:
        raise InvalidArgumentError(
            "--device cuda measures bps_rdma alone", "leave out other libraries; ddp_bench --device cuda compares steps"
        )
    return "cuda"


def parse_size(text: str) -> int:
    """Bytes of "4096", "4K", "1.5M", "64MiB" or "1G"; the units are powers of 1024. Raises InvalidArgumentError."""
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    try:
        size = int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        size = 0
    if size < DTYPES["float64"]:  # the largest element
        raise InvalidArgumentError(f"{text!r} is not a size", "write it as 4096, 64K, 1.5M or 1G; at least 8 bytes")
    return size


def parse_choices(text: str, allowed: Sequence[str], what: str) -> tuple[str, ...]:
    """A comma-separated list of words that must all be in `allowed`. Raises InvalidArgumentError."""
    words = _words(text, what)
    for word in words:
        if word not in allowed:
            raise InvalidArgumentError(f"unknown {what} {word!r}", f"use one or more of {','.join(allowed)}")
    return words


def format_size(nbytes: int) -> str:
    """`4 KiB`, `1.5 MiB`, `100 B`."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def _words(text: str, what: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise InvalidArgumentError(f"the list {text!r} is empty", f"give at least one {what}")
    return words
