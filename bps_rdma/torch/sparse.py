# SPDX-License-Identifier: Apache-2.0
"""Averages the gradient of a layer that is made with sparse=True: all ranks gather the rows that any of them has.

The rows are added up in the order of the ranks, so that all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

import bps_rdma
from bps_rdma import job
from bps_rdma._core import Dtype
from bps_rdma.agreement import group_of
from bps_rdma.arrays import core_dtype
from bps_rdma.errors import InvalidTensorError, MismatchError
from bps_rdma.operations.options import EXACT
from bps_rdma.torch.collectives import all_gather
from bps_rdma.torch.holders import held_gradient
from bps_rdma.torch.transfer import members_of
from bps_rdma.torch.units import IndexedParameter, Sent
from bps_rdma.uncompressed import Reason

_NONE = -1  # the number of rows of a rank without a gradient
_REFUSED = -2  # that of a rank that refuses this pass


def names_of_sparse(module: torch.nn.Module, named: Iterable[tuple[str, torch.nn.Parameter]]) -> frozenset[str]:
    """The names of the parameters whose gradients are sparse: the weights of embeddings with sparse=True."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    weights = {id(each.weight) for each in module.modules() if isinstance(each, kinds) and each.sparse}
    return frozenset(name for name, parameter in named if id(parameter) in weights)


class Rows:
    """A unit (units.py) of one parameter whose gradient is sparse.

    While backward runs, the ranks tell each other how many rows they have. They exchange the rows after it.
    """

    def __init__(self, entry: IndexedParameter, sent: Sent) -> None:
        self.entries = [entry]
        self.name = f"{sent.prefix}.{entry.name}.rows"
        self.priority = -entry.index
        self._group = sent.group
        self._remark(entry, sent.method)
        self._own = np.zeros(2, np.int64)  # the number of rows, and whether the gradient was dense
        self._counts: Any = None  # the handle of their exchange
        self._gradient: torch.Tensor | None = None
        self._mean: torch.Tensor | None = None
        self._used = False

    def _remark(self, entry: IndexedParameter, wanted: str | None) -> None:
        """Says that a compression of the model leaves these gradients out."""
        running, parameter = job.current(), entry.parameter
        method = running.compression(Dtype.float32, 1 << 60, wanted)
        if method not in ("", EXACT):
            number, dtype = group_of(running, self._group).id, core_dtype(parameter.dtype)
            running.note_uncompressed(Reason.sparse, number, entry.name, method, dtype, parameter.numel())

    @property
    def places(self) -> dict[IndexedParameter, tuple[int, int]]:
        """Nothing: rows travel as they are."""
        return {}

    def declaration(self) -> tuple[str, torch.Tensor, str | None]:
        """(name, a tensor like the counts of all ranks, no compression)."""
        return f"{self.name}.kind", torch.zeros(2, dtype=torch.int64, device="cpu"), None

    def begin(self, arrives: IndexedParameter | None) -> None:
        """A pass begins."""

    def take(self, entry: IndexedParameter) -> None:
        """Takes the gradient of a parameter, which is complete."""

    def start(self) -> None:
        """Tells the other ranks how many rows there are here."""
        parameter = self.entries[0].parameter
        gradient = parameter.grad
        dense = gradient is not None and gradient.layout is torch.strided
        if gradient is None:
            rows = torch.sparse_coo_tensor(
                torch.zeros((1, 0), dtype=torch.int64, device=parameter.device),
                torch.zeros((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device),
                parameter.shape,
                is_coalesced=True,
                check_invariants=False,
            )
        else:
            own = gradient.detach()
            rows = (own.to_sparse(1) if dense else own).coalesce()
        if rows.sparse_dim() != 1:
            raise InvalidTensorError(
                f"the gradient of {self.entries[0].name!r} is not sparse by rows", "make its layer with sparse=False"
            )
        self._gradient = rows
        self._own[:] = _NONE if gradient is None else rows._nnz(), dense
        self._counts = bps_rdma.all_gather_async(self._own, name=self.name, group=self._group, priority=self.priority)

    def refuse(self) -> None:
        """Tells the other ranks that this one sends no rows: none of them gets a mean."""
        self._own[:] = _REFUSED, False
        self._counts = bps_rdma.all_gather_async(self._own, name=self.name, group=self._group, priority=self.priority)

    def wait(self) -> None:
        """Exchanges the rows. All ranks do so in the same order of their units."""
        counts, gradient = self._counts, self._gradient
        assert counts is not None
        of_ranks = np.asarray(counts.wait()).reshape(-1, 2)
        if (of_ranks[:, 0] == _REFUSED).any():
            raise MismatchError(
                f"not all ranks send rows of {self.entries[0].name!r}", "zero the gradients, and repeat the step"
            )
        assert gradient is not None
        self._used = bool((of_ranks[:, 0] != _NONE).any())
        if not (of_ranks[:, 0] > 0).any():
            self._mean = gradient
        else:
            values = gradient.values().contiguous()
            is_complex = values.is_complex()
            if is_complex:
                values = torch.view_as_real(values)
            places = self._gather(gradient.indices()[0].contiguous(), "places")
            values = self._gather(values, "values")
            if is_complex:
                values = torch.view_as_complex(values)
            rows = torch.sparse_coo_tensor(places[None], values, gradient.shape, check_invariants=True).coalesce()
            mean = rows.values() / members_of(self._group).size
            self._mean = torch.sparse_coo_tensor(
                rows.indices(), mean, gradient.shape, is_coalesced=True, check_invariants=False
            )
        if of_ranks[:, 1].any():  # a layer that shares the weight has made it dense
            self._mean = self._mean.to_dense()

    def _gather(self, part: torch.Tensor, what: str) -> torch.Tensor:
        return all_gather(part, f"{self.name}.{what}", uneven=True, group=self._group)

    def deliver(self, *, restores: bool = False) -> None:
        """Makes the mean the parameter's .grad."""
        parameter, mean = self.entries[0].parameter, self.release()
        theirs = held_gradient(parameter)
        if theirs is None or mean is None:
            parameter.grad = mean
        else:
            with torch.no_grad():  # detach() of a sparse tensor would get the mean alone
                theirs.copy_(mean)

    def release(self) -> torch.Tensor | None:
        """The mean, which this object then no longer holds."""
        mean, self._mean, self._gradient = self._mean, None, None
        return mean

    def unused_everywhere(self) -> list[IndexedParameter]:
        """The parameter, if no rank had a gradient in the last pass."""
        return [] if self._used else self.entries

    def close(self) -> None:
        """Does nothing: nothing is kept from pass to pass."""
