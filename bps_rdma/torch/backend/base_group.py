# SPDX-License-Identifier: Apache-2.0
"""What all operations of a process group of the backend rest on: names, timeouts, and who takes a tensor."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from bps_rdma import job
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError
from bps_rdma.operations import ReduceOp
from bps_rdma.torch.backend.call_order import order
from bps_rdma.torch.backend.coalesced import CoalescedCalls
from bps_rdma.torch.backend.collectives import Collectives
from bps_rdma.torch.backend.cuda_tensors import NCCL, OWN, meet_on_host, taker_of
from bps_rdma.torch.backend.folded import Fold
from bps_rdma.torch.backend.pending import Call, Pace, Pending, together
from bps_rdma.torch.backend.recurring import Recurring
from bps_rdma.torch.backend.reductions import operation
from bps_rdma.torch.backend.work import BpsWork, done, kept, profiling, settle, work_of

Tensor = torch.Tensor
c10d_core: Any = torch._C._distributed_c10d
c10d: Any = distributed_c10d  # torch's stubs lack its newer names, and say nothing of subclasses
_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")
_UNSET = timedelta(0)  # options say -1 ms for "the group's"
_BackendType = c10d.ProcessGroup.BackendType
_WAIT = [getattr(inspect.unwrap(one), "__code__", None) for one in (torch.distributed.send, torch.distributed.recv)]


class BaseGroup(c10d.ProcessGroup):  # type: ignore[misc]
    """A process group without its operations; see BpsProcessGroup."""

    def __init__(self, options: Any, collectives: Collectives, *, leaves: bool, cuda: str | None = None) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._group_name = self._group_desc = ""
        self._collectives = collectives
        self._pace = Pace()
        self._recurring = Recurring(self._pace)
        self._leaves = leaves
        self._cuda = cuda
        self._nccl: Any = None
        self._making_nccl = threading.Lock()
        self._coalesced = CoalescedCalls()
        # These two belong to the view in which the group is made; a group without members has no view.
        self._meet = job.is_initialized() and meet_on_host()
        self._first = job.current().identities[collectives.ranks[0]] if job.is_initialized() else 0
        self._seconds = options.timeout.total_seconds()
        self._store = options.store  # rank 0 may host it, and others still need it

    # ---- Who takes the tensors of a device

    @property
    def cuda_backend(self) -> str:
        """The name of the backend that takes CUDA tensors: "bps", unless another one was chosen; "" for none."""
        if self._cuda is None:
            tells = self._collectives.ranks[self.rank()] == 0
            self._cuda = taker_of(self, tells=tells, meet=self._meet)
        return OWN if self._cuda is None else self._cuda

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors the group takes, which torch asks for."""
        taken = torch.cuda.is_available() and self.cuda_backend in (OWN, NCCL)
        return [_CPU, _CUDA] if taken else [_CPU]

    def _get_backend(self, device: torch.device) -> Any:
        """What takes the tensors of a device. It is the group itself, of which operations are methods, or NCCL."""
        kind = torch.device(device).type
        if kind == "cpu" or (kind == "cuda" and self.cuda_backend == OWN):
            return self
        return self._made_nccl() if kind == "cuda" and self.cuda_backend == NCCL else super()._get_backend(device)

    def _made_nccl(self) -> Any:
        """NCCL inside of the group, made when it is first needed: torch tells who takes CUDA tensors only then."""
        if not c10d.is_nccl_available():
            raise InvalidTensorError(
                "the group leaves CUDA tensors to NCCL, which this torch does not have",
                'install a torch with NCCL, or name the backend "bps" alone',
            )
        with self._making_nccl:
            if self._nccl is None:
                options = c10d.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=self._seconds)
                # Nothing is found there that an earlier attempt to start the job has left.
                store = c10d.PrefixStore(f"bps {self._first:x}/nccl/", self._store)
                made = c10d.ProcessGroupNCCL(store, self.rank(), self.size(), options)
                self._register_backend(_CUDA, _BackendType.NCCL, made)
                super()._set_group_name(self._group_name)  # of the backends as well
                super()._set_group_desc(self._group_desc)
                self._nccl = made
        return self._nccl

    # ---- Calls that torch makes together

    def _start_coalescing(self, device: torch.device) -> None:
        """Calls start at once; what they start belongs together until _end_coalescing()."""
        if self._get_backend(device) is self:
            self._coalesced.begin(self)
        else:
            super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        """All that was started since _start_coalescing(), as one work."""
        if self._get_backend(device) is not self:
            return super()._end_coalescing(device)
        return kept(work_of(self._coalesced.end()))

    def _kept(self, work: BpsWork) -> BpsWork:
        order.check()
        self._coalesced.add(work)
        return kept(work)

    # torch asks the backend of CUDA tensors for these.

    supports_splitting = True
    supports_coalescing = supports_shrinking = supports_time_estimate = False
    options = None  # that of its parent a new group has by itself

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """False: FSDP allocates its buffers itself."""
        return False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Does nothing: a group is connected once it is made."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing: ranks that are in no new group are not needed."""

    def getBackendName(self) -> str:  # noqa: N802
        """The name of this backend."""
        return "bps"

    # torch keeps the name and the description of a group in its backends, of which there may be none.

    def getGroupName(self) -> str:  # noqa: N802
        """The name that torch has given the group."""
        return self._group_name

    def getGroupDesc(self) -> str:  # noqa: N802
        """What torch says of the group."""
        return self._group_desc

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def _set_group_name(self, name: str) -> None:
        self._group_name = name
        super()._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        self._group_desc = desc
        super()._set_group_desc(desc)

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of operations that start from now on."""
        self._seconds = timeout.total_seconds()
        super().set_timeout(timeout)

    # ---- What operations need

    def _call(self, opts: Any, timeout: timedelta | None = None) -> Call:
        self._pace.check()
        order.begin()
        wanted = timeout if timeout is not None else getattr(opts, "timeout", _UNSET)
        # asyncOp tells whether the caller waits next; callers in C++ do not set it. A profile shows works.
        waits = not getattr(opts, "asyncOp", True) and not (profiling() or order.is_in_callback)
        return Call(wanted.total_seconds() if wanted > _UNSET else self._seconds, awaited=waits)

    def _call_of_message(self) -> Call:
        """The way to call where torch passes no options: dist.send() waits next, and calls what isend() calls."""
        self._pace.check()
        order.begin()
        caller = sys._getframe(2).f_back  # behind whole(): isend() or irecv(), or who calls the group itself
        waits = caller is not None and caller.f_back is not None and caller.f_back.f_code in _WAIT
        return Call(self._seconds, awaited=waits and not (profiling() or order.is_in_callback))

    def _work(self, kind: str, pending: Pending, tensors: list[Any], inputs: Any, call: Call) -> BpsWork:
        if call.awaited:
            settle(pending.handles, pending.finishes, self._pace)  # the caller does nothing but wait for the work
            return done()
        return self._kept(BpsWork(kind, pending.handles, pending.finishes, tensors, inputs, self._pace))

    def _takes(self, tensor: Tensor) -> bool:
        """Returns whether the core moves a tensor."""
        return tensor.layout is torch.strided and self._is_at_home(tensor)

    def _is_at_home(self, tensor: Tensor) -> bool:
        """Whether it is on a device whose tensors the core moves."""
        return tensor.is_cpu or (tensor.is_cuda and self.cuda_backend == OWN)

    def _inner(self, tensor: Tensor) -> Any:
        """NCCL, for what it takes instead of the core."""
        if self._is_at_home(tensor):
            raise InvalidTensorError(
                f"the tensor of shape {tuple(tensor.shape)} has the layout {tensor.layout}", "pass tensor.to_dense()"
            )
        if tensor.is_cuda and self.cuda_backend == NCCL:
            return self._made_nccl()
        raise InvalidTensorError(
            f"the tensor is on {tensor.device}, which this group does not take",
            'move it to the CPU first; a group of the backend "bps" takes CUDA tensors, too',
        )


def each(start: Callable[[Any, Any], Pending], outputs: list[Any], inputs: list[Any]) -> Pending:
    """Starts one operation for each output and its input; all of them as one."""
    if len(outputs) != len(inputs):
        raise InvalidArgumentError(f"{len(inputs)} inputs for {len(outputs)} outputs", "pass one for each")
    pairs: Iterable[tuple[Any, Any]] = zip(outputs, inputs, strict=True)
    return together(start(output, tensor) for output, tensor in pairs)


def only(tensors: Any) -> Any:
    """The one tensor of a list, or a tensor that is passed as it is."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise InvalidArgumentError(f"{len(tensors)} tensors at once", "pass one; the coalesced forms take several")
    return tensors[0]


def operation_of(opts: Any) -> ReduceOp | Fold:
    """The reduction that options name, or that is passed instead of them."""
    if opts is None:
        return ReduceOp.sum
    return operation(getattr(opts, "reduceOp", opts))


def options_of(made: Any, opts: Any) -> Any:
    """Options for the inner backend, where the caller has passed none, or a reduction instead."""
    if opts is None:
        return made
    if hasattr(opts, "timeout"):
        return opts
    made.reduceOp = opts
    return made


def rooted(made: Any, opts: Any, op: Any = None) -> Any:
    """Options, also where the caller has passed the root instead."""
    if not isinstance(opts, int):
        return opts
    made.rootRank = opts
    if op is not None:
        made.reduceOp = op
    return made


def root_of(opts: Any) -> int:
    """The root that options name."""
    return 0 if opts is None else int(opts.rootRank)
