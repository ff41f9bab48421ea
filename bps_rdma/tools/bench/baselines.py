# SPDX-License-Identifier: Apache-2.0
"""The implementations that are measured: bps_rdma, here; gloo and MPI in peers/; the upper bound in bound.py.

Each implementation allocates its arrays once per case. A round consists of prepare (not timed), a barrier, run (timed)
and check (not timed). Implementations that share the ranks' processes take turns.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

import bps_rdma
from bps_rdma.tools.bench.pattern import Array, Pattern, itemsize, numpy_dtype
from bps_rdma.tools.bench.plan import Case


class Implementation(Protocol):
    """One implementation of a case, on one rank: bps_rdma, or a baseline."""

    name: str

    def supports(self, case: Case) -> bool:
        """Returns whether it can run `case`; the same answer on every rank."""

    def start(self, case: Case, memory: str) -> None:
        """Allocate for `case`; collective."""

    def prepare(self, round_: int) -> None:
        """Fill the inputs of `round_`."""

    def barrier(self) -> None:
        """Wait for the other ranks."""

    def run(self) -> None:
        """The round itself."""

    def check(self, round_: int) -> int:
        """Check all results of `round_`; returns the number of tensors. Raises WrongResultError."""


def fall_in_step() -> None:
    """A barrier that no rank leaves long before the others: sums of one element.

    From bps_rdma.barrier() the scheduler lets the ranks go one after the other, and the first of them would count the
    time that it waits for the last.
    """
    for _ in range(3):  # before the last one all ranks are awake
        bps_rdma.push_pull_inplace(np.zeros(1, np.float32), average=False, name="bench.step")


class PushPull:
    """bps_rdma."""

    name = "bps_rdma"

    def __init__(self, *, prepared: bool = False) -> None:
        self._rank = bps_rdma.rank()
        self._world = bps_rdma.size()
        self._prepares = prepared
        self._bps: Any = bps_rdma  # the module whose operations it measures

    def supports(self, case: Case) -> bool:
        """Every case."""
        return True

    def start(self, case: Case, memory: str) -> None:
        """Allocate the tensors, plain or mapped by the servers of this host."""
        self._case = case
        self._pattern = Pattern(case.dtype, self._world)
        self._wholes = [allocate(case.elements, case.dtype, memory) for _ in range(case.arrays)]
        self._begin, self._end = bps_rdma.shard_bounds(case.elements, self._world, self._rank)
        self._arrays = [as_operand(whole, case.dtype) for whole in self._wholes]
        self._parts: list[Array] = []
        if case.op == "reduce_scatter":
            self._parts = [allocate(self._end - self._begin, case.dtype, memory) for _ in self._wholes]
        elif case.op == "all_gather":
            self._parts = [whole[self._begin : self._end] for whole in self._wholes]
        self._operands = [as_operand(part, case.dtype) for part in self._parts]
        self._place(case)
        self._names = [case.name(index) for index in range(case.arrays)]
        self._prepared = [self._prepare(index) for index in range(case.arrays)] if self._prepares else []

    def _place(self, case: Case) -> None:
        """Replaces the operands by those in other memory."""

    def _prepare(self, index: int) -> Any:
        op, array, name = self._case.op, self._arrays[index], self._names[index]
        if op == "push_pull":
            return self._bps.prepare("push_pull", array, average=False, name=name)
        if op == "reduce_scatter":
            return self._bps.prepare("reduce_scatter", array, average=False, name=name, out=self._operands[index])
        if op == "all_gather":
            return self._bps.prepare("all_gather", self._operands[index], name=name, out=array)
        return self._bps.prepare("broadcast", array, name=name)

    def prepare(self, round_: int) -> None:
        """Fill in this rank's values; for an all_gather only its own part, so that a missing part is noticed."""
        for index, whole in enumerate(self._wholes):
            if self._case.op == "all_gather":
                whole.fill(0)
                self._pattern.fill(self._parts[index], self._rank, round_, self._begin)
            else:
                self._pattern.fill(whole, self._rank, round_)

    def barrier(self) -> None:
        """Lets the ranks go at one time."""
        fall_in_step()

    def run(self) -> None:
        """Run all calls. Several push_pull tensors of one call are started together, asynchronously."""
        op, group = self._case.op, self._case.tensors
        if self._prepares:
            self._run_prepared(group)
            return
        if op == "push_pull" and group > 1:
            start = self._bps.push_pull_async_inplace
            pairs = list(zip(self._arrays, self._names, strict=True))
            for call in range(self._case.calls):
                these = pairs[call * group : (call + 1) * group]
                self._bps.wait([start(array, average=False, name=name) for array, name in these])
            return
        for index, (array, name) in enumerate(zip(self._arrays, self._names, strict=True)):
            if op == "push_pull":
                self._bps.push_pull_inplace(array, average=False, name=name)
            elif op == "reduce_scatter":
                self._bps.reduce_scatter(array, average=False, name=name, out=self._operands[index])
            elif op == "all_gather":
                self._bps.all_gather(self._operands[index], name=name, out=array)
            else:
                self._bps.broadcast(array, root=0, name=name)

    def _run_prepared(self, group: int) -> None:
        if group == 1:
            for operation in self._prepared:
                operation()
            return
        for call in range(self._case.calls):
            self._bps.wait([operation.start() for operation in self._prepared[call * group : (call + 1) * group]])

    def check(self, round_: int) -> int:
        """Check every element of every result."""
        for index, whole in enumerate(self._wholes):
            if self._case.op == "push_pull":
                self._pattern.check_sum(whole, round_)
            elif self._case.op == "reduce_scatter":
                self._pattern.check_sum(self._parts[index], round_, self._begin)
            elif self._case.op == "broadcast":
                self._pattern.check_copy(whole, 0, round_)
            else:
                for rank in range(self._world):
                    begin, end = bps_rdma.shard_bounds(whole.size, self._world, rank)
                    self._pattern.check_copy(whole[begin:end], rank, round_, begin)
        return len(self._wholes)


class SumInPlace:
    """The base of other libraries, which are baselines for push_pull_inplace(average=False) of plain arrays."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    def supports(self, case: Case) -> bool:
        """Only sums: training uses all_reduce."""
        return case.op == "push_pull"

    def start(self, case: Case, memory: str) -> None:
        """Allocate plain arrays; `memory` makes no difference to them."""
        self._group = case.tensors
        self._pattern = Pattern(case.dtype, self._world)
        self._arrays = [allocate(case.elements, case.dtype, "plain") for _ in range(case.arrays)]

    def prepare(self, round_: int) -> None:
        """Fill in this rank's values."""
        for array in self._arrays:
            self._pattern.fill(array, self._rank, round_)

    def check(self, round_: int) -> int:
        """Check every element of every result."""
        for array in self._arrays:
            self._pattern.check_sum(array, round_)
        return len(self._arrays)


def allocate(elements: int, dtype: str, memory: str) -> Array:
    """A flat array; `memory` is "shared" for bps_rdma.empty, else "plain"."""
    if memory == "shared":
        return bps_rdma.empty(elements * itemsize(dtype), "uint8").view(numpy_dtype(dtype))
    return np.empty(elements, numpy_dtype(dtype))


def as_operand(array: Array, dtype: str) -> Any:
    """`array` in the form that operations accept: bfloat16 becomes a torch tensor over the same memory."""
    if dtype != "bfloat16":
        return array
    import torch

    return torch.from_numpy(array).view(torch.bfloat16)
