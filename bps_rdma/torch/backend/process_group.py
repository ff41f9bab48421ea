# SPDX-License-Identifier: Apache-2.0
"""A torch.distributed process group over bps_rdma; it contains NCCL where that is available, as torch's own do."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from bps_rdma import job
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError
from bps_rdma.operations import ReduceOp
from bps_rdma.torch.backend.collectives import Collectives
from bps_rdma.torch.backend.folded import Fold, sum_sparse
from bps_rdma.torch.backend.pending import Call, Pace, Pending, together
from bps_rdma.torch.backend.recurring import Recurring, may_recur
from bps_rdma.torch.backend.reductions import operation
from bps_rdma.torch.backend.work import BpsWork, ReceivedWork, done, kept, profiling, report_unseen, settle

Tensor = torch.Tensor
c10d_core: Any = torch._C._distributed_c10d
c10d: Any = distributed_c10d  # torch's stubs lack its newer names, and say nothing of subclasses
_CPU = torch.device("cpu")
_UNSET = timedelta(0)  # options say -1 ms for "the group's"
_BackendType = c10d.ProcessGroup.BackendType
_WAIT = [getattr(inspect.unwrap(one), "__code__", None) for one in (torch.distributed.send, torch.distributed.recv)]


class BpsProcessGroup(c10d.ProcessGroup):  # type: ignore[misc]
    """The group that init_process_group("bps") and new_group(backend="bps") return; see docs/torch-backend.md.

    Collectives of one group must be called in the same order, with the same dtypes and sizes, on all of its ranks. If
    they differ, MismatchError is raised at once where the core sees it, and DeadlineError otherwise.

    Args:
        options: torch's DistributedBackendOptions.
        collectives: of our group of the same ranks.
        leaves: whether the job ends with this group.
        stages: whether CUDA tensors are staged; otherwise NCCL takes them.
    """

    def __init__(self, options: Any, collectives: Collectives, *, leaves: bool, stages: bool = False) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._group_name = self._group_desc = ""
        self._collectives = collectives
        self._pace = Pace()
        self._recurring = Recurring(self._pace)
        self._leaves = leaves
        self._stages = stages
        self._seconds = options.timeout.total_seconds()
        self._store = options.store  # rank 0 may host it, and others still need it
        self._add_inner(options)

    def _add_inner(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        if torch.cuda.is_available() and c10d.is_nccl_available():
            nccl_options = c10d.ProcessGroupNCCL.Options()
            nccl_options._timeout = options.timeout
            nccl = c10d.ProcessGroupNCCL(self._store_of(options, "nccl"), rank, size, nccl_options)
            self._register_backend(torch.device("cuda"), _BackendType.NCCL, nccl)

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors the group takes, which torch asks for."""
        return [_CPU, *(device for device in super()._device_types if device != _CPU)]

    def _get_backend(self, device: torch.device) -> Any:
        """What takes the tensors of a device. On the CPU it is the group itself: all operations are its methods."""
        return self if torch.device(device).type == "cpu" else super()._get_backend(device)

    @staticmethod
    def _store_of(options: Any, library: str) -> Any:
        """A part of the store where nothing is found that an earlier attempt to start the job has left."""
        first = job.current().identities[options.global_ranks_in_group[0] if options.global_ranks_in_group else 0]
        return c10d.PrefixStore(f"bps {first:x}/{library}/", options.store)

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

    # ---- Groups of some ranks, as torch.distributed.split_group() makes them where there is an accelerator

    supports_splitting = True
    options = None  # that of its parent a new group has by itself

    def _set_sequence_number_for_group(self) -> None:
        """Calls are matched without numbers of torch."""

    def get_group_store(self) -> Any:
        """The store that the group was made with."""
        return self._store

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
        device_types: object = None,
    ) -> BpsProcessGroup | None:
        """Makes a group of some ranks of this one, on these; the others get None. It stages what this one stages.

        Args:
            new_ranks: in this group.
            timeout: default: that of this group.
            opts, device_types: of other backends, which are ignored.
            group_name: torch's, which may differ between ranks that have made other groups before.
            group_desc: for people.
        """
        if self.rank() not in new_ranks:
            return None
        collectives = self._collectives.of_some(new_ranks)
        options = c10d_core._DistributedBackendOptions()
        options.store = c10d.PrefixStore(f"{group_name}/", self._store)
        options.group_rank, options.group_size = list(new_ranks).index(self.rank()), len(new_ranks)
        options.global_ranks_in_group = list(collectives.ranks)
        options.timeout = timeout or timedelta(seconds=self._seconds)
        made = BpsProcessGroup(options, collectives, leaves=False, stages=self._stages)
        made._set_group_name(group_name)
        made._set_group_desc(group_desc or "undefined")
        return made

    def shutdown(self) -> None:
        """Called by destroy_process_group(); a default group that has joined the job leaves it, waiting for nobody.

        The others go on: what they need of this process stays until they have left, too.
        """
        report_unseen()
        super().shutdown()
        if self._leaves:
            self._leaves = False
            job.depart(with_it=self._store)

    # ---- Reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Every rank's tensor becomes the reduction of all; see docs/torch-backend.md for operations and dtypes."""
        tensor = _only(tensors)
        op = _operation(opts)
        if not (tensor.is_cpu or self._stages):
            return self._inner(tensor).allreduce([tensor], _options(c10d.AllreduceOptions(), opts))
        call = self._call(opts, timeout)
        if call.awaited and isinstance(op, ReduceOp) and self._recurring.run(tensor, op, call.seconds):
            return done()
        if tensor.layout is not torch.strided:
            return self._sum_sparse(tensor, op, call)
        if not self._takes(tensor):
            return self._inner(tensor).allreduce([tensor], _options(c10d.AllreduceOptions(), opts))
        work = self._work("all_reduce", self._collectives.reduce(tensor, op, call), [tensor], [tensor], call)
        if call.awaited and isinstance(op, ReduceOp) and may_recur(tensor):
            self._recurring.note(tensor, self._collectives.options("all_reduce", tensor, op, call))
        return work

    def _sum_sparse(self, tensor: Tensor, op: Any, call: Call) -> Any:
        like = torch.empty(0, dtype=tensor.dtype, device="cpu")
        options = self._collectives.options("all_reduce", like, ReduceOp.sum, call)
        return self._work("all_reduce", sum_sparse(tensor, op, self.size(), options), [tensor], [tensor], call)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """allreduce() of several tensors."""
        op = _operation(opts)
        if not all(map(self._takes, tensors)):
            return self._inner(tensors[0]).allreduce_coalesced(tensors, opts or c10d.AllreduceCoalescedOptions())
        call = self._call(opts)
        pending = together(self._collectives.reduce(tensor, op, call) for tensor in tensors)
        return self._work("all_reduce", pending, tensors, tensors, call)

    def reduce(self, tensors: Any, opts: Any, op: Any = None, timeout: timedelta | None = None) -> Any:
        """Reduces for one rank; on the others the result goes into a scratch buffer, not into the tensor."""
        tensor = _only(tensors)
        opts = _rooted(c10d.ReduceOptions(), opts, op)
        found = _operation(opts)
        if not self._takes(tensor):
            return self._inner(tensor).reduce([tensor], opts)
        here = opts.rootRank == self.rank()
        target = tensor if here else tensor.detach().clone(memory_format=torch.contiguous_format)
        call = self._call(opts, timeout)
        return self._work("reduce", self._collectives.reduce(target, found, call), [tensor], [tensor], call)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """This rank's part of the reduction, from one tensor per rank; they may differ in size."""
        output, parts = (outputs, inputs) if isinstance(outputs, Tensor) else (_only(outputs), _only(inputs))
        op = _operation(opts)
        if not all(map(self._takes, [output, *parts])):
            return self._inner(output).reduce_scatter([output], [parts], _options(c10d.ReduceScatterOptions(), opts))
        call = self._call(opts, timeout)
        pending = self._collectives.reduce_scatter_parts(output, parts, op, call)
        return self._work("reduce_scatter", pending, [output], parts, call)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        """This rank's part of the reduction, from one tensor; the output may be that part of it."""
        op = _operation(opts)
        if not (self._takes(output) and self._takes(whole)):
            return self._inner(output)._reduce_scatter_base(output, whole, opts or c10d.ReduceScatterOptions())
        call = self._call(opts)
        return self._work(
            "reduce_scatter", self._collectives.reduce_scatter(output, whole, op, call), [output], [whole], call
        )

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """reduce_scatter_single() of several tensors."""
        op = _operation(opts)
        if not all(map(self._takes, [*outputs, *inputs])):
            opts = opts or c10d.ReduceScatterOptions()
            return self._inner(outputs[0]).reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        call = self._call(opts)

        def start(output: Tensor, whole: Tensor) -> Pending:
            return self._collectives.reduce_scatter(output, whole, op, call)

        return self._work("reduce_scatter", _each(start, outputs, inputs), outputs, inputs, call)

    # ---- Moving: any dtype

    def broadcast(self, tensors: Any, opts: Any, timeout: timedelta | None = None) -> Any:
        """Every rank's tensor becomes that of one rank."""
        tensor = _only(tensors)
        opts = _rooted(c10d.BroadcastOptions(), opts)
        if not self._takes(tensor):
            return self._inner(tensor).broadcast([tensor], opts)
        call = self._call(opts, timeout)
        return self._work(
            "broadcast", self._collectives.broadcast(tensor, opts.rootRank, call), [tensor], [tensor], call
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Every rank gets every rank's tensor, each in one of its own; they may differ in size."""
        flat = isinstance(inputs, Tensor)
        parts, tensor = (outputs, inputs) if flat else (_only(outputs), _only(inputs))
        if not all(map(self._takes, [tensor, *parts])):
            return self._inner(tensor).allgather([parts], [tensor], _options(c10d.AllgatherOptions(), opts))
        call = self._call(opts)
        pending = self._collectives.all_gather_parts(parts, tensor, call)
        # Communication hooks index this by ranks, and then further, as they do with NCCL's futures.
        result = parts if pending.whole is None else pending.whole
        return self._work("all_gather", pending, [result], [tensor], call)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """allgather() of several tensors; `outputs` has a list of them for each rank."""
        if len(outputs) != self.size():
            raise InvalidArgumentError(f"{len(outputs)} lists for {self.size()} ranks", "pass one list for each rank")
        call = self._call(opts)

        def start(parts: tuple[Tensor, ...], tensor: Tensor) -> Pending:
            return self._collectives.all_gather_parts(parts, tensor, call)

        by_tensor = list(zip(*outputs, strict=True))
        return self._work("all_gather", _each(start, by_tensor, inputs), outputs, inputs, call)

    def all_gather_single(self, whole: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Every rank gets every rank's tensor, in one large one. Its own may be a part of that one."""
        if not (self._takes(whole) and self._takes(tensor)):
            return self._inner(whole)._allgather_base(whole, tensor, opts or c10d.AllgatherOptions())
        call = self._call(opts)
        return self._work("all_gather", self._collectives.all_gather(whole, tensor, call), [whole], [tensor], call)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """all_gather_single() of several tensors."""
        if not all(map(self._takes, [*outputs, *inputs])):
            opts = opts or c10d.AllgatherOptions()
            return self._inner(outputs[0]).allgather_into_tensor_coalesced(outputs, inputs, opts)
        call = self._call(opts)

        def start(whole: Tensor, tensor: Tensor) -> Pending:
            return self._collectives.all_gather(whole, tensor, call)

        return self._work("all_gather", _each(start, outputs, inputs), outputs, inputs, call)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Complete once every rank has called it."""
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        device = getattr(opts, "device", None)
        if device is not None and device.type != "cpu" and not self._stages:
            return self._get_backend(device).barrier(opts)
        call = self._call(opts, timeout)
        return self._work("barrier", self._collectives.barrier(call), [], [], call)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """barrier() in which rank 0 names the first rank that did not come in time, or with `wait_all_ranks` all."""
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        self._collectives.messages.monitored_barrier(seconds, wait_all_ranks)

    # ---- Messages: any dtype

    def all_to_all_single(
        self,
        output: Tensor,
        whole: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Any:
        """Every rank sends a part of its tensor to every rank."""
        if not (self._takes(output) and self._takes(whole)):
            return self._inner(whole).alltoall_base(
                output, whole, output_split_sizes, input_split_sizes, opts or c10d_core.AllToAllOptions()
            )
        call = self._call(opts, timeout)
        messages = self._collectives.messages
        pending = messages.all_to_all_single(output, whole, output_split_sizes, input_split_sizes, call)
        return self._work("all_to_all", pending, [output], [whole], call)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, timeout: timedelta | None = None
    ) -> Any:
        """Every rank sends a tensor to every rank."""
        if not all(map(self._takes, [*outputs, *inputs])):
            return self._inner(inputs[0]).alltoall(outputs, inputs, opts or c10d_core.AllToAllOptions())
        call = self._call(opts, timeout)
        return self._work(
            "all_to_all", self._collectives.messages.all_to_all(outputs, inputs, call), outputs, inputs, call
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """One rank gets every rank's tensor."""
        tensor = _only(inputs)
        opts = _rooted(c10d_core.GatherOptions(), opts)
        if not self._takes(tensor):
            return self._inner(tensor).gather(outputs, inputs, opts)
        parts = outputs[0] if outputs and not isinstance(outputs[0], Tensor) else outputs
        call = self._call(opts, timeout)
        pending = self._collectives.messages.gather(parts, tensor, _root(opts), call)
        return self._work("gather", pending, [parts], [tensor], call)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Every rank gets one of the tensors of one rank."""
        tensor = _only(outputs)
        opts = _rooted(c10d_core.ScatterOptions(), opts)
        if not self._takes(tensor):
            return self._inner(tensor).scatter(outputs, inputs, opts)
        parts = inputs[0] if inputs and not isinstance(inputs[0], Tensor) else inputs
        call = self._call(opts, timeout)
        pending = self._collectives.messages.scatter(tensor, parts, _root(opts), call)
        return self._work("scatter", pending, [tensor], parts, call)

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Any:  # noqa: N803  torch's name
        """Sends a tensor to one rank."""
        tensor = _only(tensors)
        if not self._takes(tensor):
            return self._inner(tensor).send(tensors, dstRank, tag)
        call = self._call_of_message()
        pending = self._collectives.messages.send(tensor, dstRank, tag, call)
        if call.awaited:
            settle(pending.handles, pending.finishes)
            return done()
        return kept(BpsWork("send", pending.handles, pending.finishes, [tensor], [tensor]))

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Any:  # noqa: N803  torch's name
        """Receives a tensor from one rank."""
        tensor = _only(tensors)
        if not self._takes(tensor):
            return self._inner(tensor).recv(tensors, srcRank, tag)
        call = self._call_of_message()
        pending = self._collectives.messages.receive(tensor, srcRank, tag, call)
        if call.awaited:
            settle(pending.handles, pending.finishes)
            return done()
        return kept(ReceivedWork("recv", pending.handles, pending.finishes, [tensor], [tensor], lambda: srcRank))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receives a tensor from any rank."""
        tensor = _only(tensors)
        if not self._takes(tensor):
            return self._inner(tensor).recv_anysource(tensors, tag)
        call = self._call_of_message()
        pending, sender = self._collectives.messages.receive_from_any(tensor, tag, call)
        if call.awaited:
            settle(pending.handles, pending.finishes)
            work = ReceivedWork("recvAnySource", (), (), [tensor], [tensor], sender)
            work.wait()
            return work
        return kept(ReceivedWork("recvAnySource", pending.handles, pending.finishes, [tensor], [tensor], sender))

    # Names before torch 2.13
    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- Helpers

    def _call(self, opts: Any, timeout: timedelta | None = None) -> Call:
        self._pace.check()
        wanted = timeout if timeout is not None else getattr(opts, "timeout", _UNSET)
        # asyncOp tells whether the caller waits next; callers in C++ do not set it. A profile shows works.
        waits = not getattr(opts, "asyncOp", True) and not profiling()
        return Call(wanted.total_seconds() if wanted > _UNSET else self._seconds, awaited=waits)

    def _call_of_message(self) -> Call:
        """The way to call where torch passes no options: dist.send() waits next, and calls what isend() calls."""
        self._pace.check()
        caller = sys._getframe(1).f_back  # isend() or irecv(), or who calls the group itself
        waits = caller is not None and caller.f_back is not None and caller.f_back.f_code in _WAIT
        return Call(self._seconds, awaited=waits and not profiling())

    def _work(self, kind: str, pending: Pending, tensors: list[Any], inputs: Any, call: Call) -> BpsWork:
        if call.awaited:
            settle(pending.handles, pending.finishes, self._pace)  # the caller does nothing but wait for the work
            return done()
        return kept(BpsWork(kind, pending.handles, pending.finishes, tensors, inputs, self._pace))

    def _takes(self, tensor: Tensor) -> bool:
        """Returns whether the core moves a tensor: on a GPU only if it is to be staged."""
        return tensor.layout is torch.strided and (tensor.is_cpu or (self._stages and tensor.is_cuda))

    def _inner(self, tensor: Tensor) -> Any:
        """The backend for what the core does not take: tensors on devices, unless they are staged."""
        if tensor.is_cpu:
            raise InvalidTensorError(
                f"the tensor of shape {tuple(tensor.shape)} has the layout {tensor.layout}", "pass tensor.to_dense()"
            )
        try:
            return self._get_backend(tensor.device)
        except RuntimeError as error:
            raise InvalidTensorError(
                f"the tensor is on {tensor.device}, for which this process has no backend", "move it to the CPU first"
            ) from error


def _each(start: Callable[[Any, Any], Pending], outputs: list[Any], inputs: list[Any]) -> Pending:
    if len(outputs) != len(inputs):
        raise InvalidArgumentError(f"{len(inputs)} inputs for {len(outputs)} outputs", "pass one for each")
    pairs: Iterable[tuple[Any, Any]] = zip(outputs, inputs, strict=True)
    return together(start(output, tensor) for output, tensor in pairs)


def _only(tensors: Any) -> Any:
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise InvalidArgumentError(f"{len(tensors)} tensors at once", "pass one; the coalesced forms take several")
    return tensors[0]


def _operation(opts: Any) -> ReduceOp | Fold:
    if opts is None:
        return ReduceOp.sum
    return operation(getattr(opts, "reduceOp", opts))


def _options(made: Any, opts: Any) -> Any:
    """Options for the inner backend, where the caller has passed none, or a reduction instead."""
    if opts is None:
        return made
    if hasattr(opts, "timeout"):
        return opts
    made.reduceOp = opts
    return made


def _rooted(made: Any, opts: Any, op: Any = None) -> Any:
    """Options, also where the caller has passed the root instead."""
    if not isinstance(opts, int):
        return opts
    made.rootRank = opts
    if op is not None:
        made.reduceOp = op
    return made


def _root(opts: Any) -> int:
    return 0 if opts is None else int(opts.rootRank)
