# SPDX-License-Identifier: Apache-2.0
"""All-reduces of tensors that come again: prepared at the second call, so that further ones are one call into C++.

A tensor is known by its Python object, which is not kept alive, and by where and how large its memory is.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from bps_rdma._core import PreparedOperation
from bps_rdma.errors import DeadlineError, InvalidArgumentError
from bps_rdma.operations import OperationOptions, ReduceOp
from bps_rdma.operations.prepare import prepare_unowned
from bps_rdma.torch.backend.pending import Pace
from bps_rdma.torch.backend.work import of_the_group
from bps_rdma.torch.transfer.dense import DTYPES

_MOST = 4096  # tensors; further ones are reduced in the ordinary way


class _Known(NamedTuple):
    address: int
    nbytes: int
    dtype: torch.dtype
    op: ReduceOp
    seconds: float
    operation: PreparedOperation[None] | None  # None: this is its first call
    alive: weakref.ref[torch.Tensor]


class Recurring:
    """The prepared all-reduces of one group, of this pace."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._known: dict[int, _Known] = {}  # by id(tensor); an entry goes with its tensor

    def run(self, tensor: torch.Tensor, op: ReduceOp, seconds: float) -> bool:
        """Reduces the tensor in place, if its operation has been prepared; raises what became of it."""
        known = self._known.get(id(tensor))
        if known is None or known.operation is None or not _same(known, tensor, op, seconds):
            return False
        operation = known.operation
        if not operation.taken:  # another thread uses it
            return False
        try:
            operation()
        except InvalidArgumentError:  # its memory is another block now; nothing has been sent
            del self._known[id(tensor)]
            return False
        except DeadlineError as error:
            operation.keep(tensor)
            self._pace.lose()
            raise of_the_group(error) from None
        except BaseException:
            operation.keep(tensor)
            raise
        return True

    def note(self, tensor: torch.Tensor, options: OperationOptions) -> None:
        """Remembers a tensor that may_recur(), reduced with these options; prepares its operation the second time."""
        seconds = options.timeout or 0.0
        known = self._known.get(id(tensor))
        if known is None and len(self._known) >= _MOST:
            return
        again = known is not None and _same(known, tensor, options.op, seconds)
        operation = prepare_unowned(tensor, options) if again else None

        def lose(_: object, key: int = id(tensor), entries: dict[int, _Known] = self._known) -> None:
            entries.pop(key, None)

        self._known[id(tensor)] = _Known(
            tensor.data_ptr(), tensor.nbytes, tensor.dtype, options.op, seconds, operation, weakref.ref(tensor, lose)
        )


def may_recur(tensor: torch.Tensor) -> bool:
    """Returns whether all-reduces of this tensor are worth remembering, and are those of a tensor of its dtype."""
    return tensor.is_cpu and tensor.is_contiguous() and tensor.dtype in DTYPES and tensor.numel() > 0


def _same(known: _Known, tensor: torch.Tensor, op: ReduceOp, seconds: float) -> bool:
    return (
        known.address == tensor.data_ptr()
        and known.nbytes == tensor.nbytes
        and known.op is op
        and known.seconds == seconds
        and known.dtype is tensor.dtype
        and tensor.is_contiguous()
    )
