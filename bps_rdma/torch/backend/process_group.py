# SPDX-License-Identifier: Apache-2.0
"""A torch.distributed process group over bps_rdma.

It contains gloo, and NCCL where it is available, as torch's own groups do: point to point, all_to_all, gather, scatter
and monitored_barrier go there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from bps_rdma import job
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError
from bps_rdma.operations import ReduceOp
from bps_rdma.torch.backend.collectives import Call, Collectives, Pending, together
from bps_rdma.torch.backend.recurring import Recurring
from bps_rdma.torch.backend.reductions import operation
from bps_rdma.torch.backend.work import BpsWork, done, kept, profiling, settle

Tensor = torch.Tensor
c10d: Any = distributed_c10d  # torch's stubs lack its newer names, and say nothing of subclasses
_CPU = torch.device("cpu")
_UNSET = timedelta(0)  # options say -1 ms for "the group's"
_BackendType = c10d.ProcessGroup.BackendType


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
        self._collectives = collectives
        self._recurring = Recurring()
        self._leaves = leaves
        self._stages = stages
        self._seconds = options.timeout.total_seconds()
        self._store = options.store  # rank 0 may host it: gloo reads it when ranks send something for the first time
        self._add_inner(options)

    def _add_inner(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        gloo = c10d.ProcessGroupGloo(self._store_of(options, "gloo"), rank, size, _gloo_options(options.timeout))
        if not hasattr(dist, "_reconfigure"):  # torch 2.14 counts by itself, and warns of this call
            gloo._set_sequence_number_for_group()
        self._register_backend(_CPU, _BackendType.GLOO, gloo)
        self._set_default_backend(_BackendType.GLOO)
        if torch.cuda.is_available() and c10d.is_nccl_available():
            nccl_options = c10d.ProcessGroupNCCL.Options()
            nccl_options._timeout = options.timeout
            nccl = c10d.ProcessGroupNCCL(self._store_of(options, "nccl"), rank, size, nccl_options)
            self._register_backend(torch.device("cuda"), _BackendType.NCCL, nccl)

    @staticmethod
    def _store_of(options: Any, library: str) -> Any:
        """A part of the store where nothing is found that an earlier attempt to start the job has left."""
        first = job.current().identities[options.global_ranks_in_group[0] if options.global_ranks_in_group else 0]
        return c10d.PrefixStore(f"bps {first:x}/{library}/", options.store)

    def getBackendName(self) -> str:  # noqa: N802
        """The name of this backend."""
        return "bps"

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of operations that start from now on."""
        self._seconds = timeout.total_seconds()
        super().set_timeout(timeout)

    def shutdown(self) -> None:
        """Called by destroy_process_group(); a default group that has joined the job leaves it, waiting for nobody.

        The others go on: what they need of this process stays until they have left, too.
        """
        super().shutdown()
        if self._leaves:
            self._leaves = False
            job.depart(with_it=self._store)

    # ---- Reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Every rank's tensor becomes the reduction of all; see docs/torch-backend.md for operations and dtypes."""
        tensor = _only(tensors)
        op = _operation(opts)
        call = self._call(opts, timeout)
        recurs = call.awaited and not profiling()
        if recurs and op is not None and self._recurring.run(tensor, op, call.seconds):
            return done()
        if op is None or not self._takes(tensor):
            return self._inner(tensor).allreduce([tensor], _options(c10d.AllreduceOptions(), opts))
        work = _work("all_reduce", self._collectives.reduce(tensor, op, call), [tensor], [tensor], call)
        if recurs:
            self._recurring.note(tensor, self._collectives.options("all_reduce", tensor, op, call))
        return work

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """allreduce() of several tensors."""
        op, call = _operation(opts), self._call(opts)
        if op is None or not all(map(self._takes, tensors)):
            return self._inner(tensors[0]).allreduce_coalesced(tensors, opts or c10d.AllreduceCoalescedOptions())
        pending = together(self._collectives.reduce(tensor, op, call) for tensor in tensors)
        return _work("all_reduce", pending, tensors, tensors, call)

    def reduce(self, tensors: Any, opts: Any, op: Any = None, timeout: timedelta | None = None) -> Any:
        """Reduces for one rank; on the others the result goes into a scratch buffer, not into the tensor."""
        tensor = _only(tensors)
        opts = _rooted(c10d.ReduceOptions(), opts, op)
        found = _operation(opts)
        if found is None or not self._takes(tensor):
            return self._inner(tensor).reduce([tensor], opts)
        here = opts.rootRank == self.rank()
        target = tensor if here else tensor.detach().clone(memory_format=torch.contiguous_format)
        call = self._call(opts, timeout)
        return _work("reduce", self._collectives.reduce(target, found, call), [tensor], [tensor], call)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """This rank's part of the reduction, from one tensor per rank; they may differ in size."""
        output, parts = (outputs, inputs) if isinstance(outputs, Tensor) else (_only(outputs), _only(inputs))
        op = _operation(opts)
        if op is None or not all(map(self._takes, [output, *parts])):
            return self._inner(output).reduce_scatter([output], [parts], _options(c10d.ReduceScatterOptions(), opts))
        call = self._call(opts, timeout)
        pending = self._collectives.reduce_scatter_parts(output, parts, op, call)
        return _work("reduce_scatter", pending, [output], parts, call)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        """This rank's part of the reduction, from one tensor; the output may be that part of it."""
        op = _operation(opts)
        if op is None or not (self._takes(output) and self._takes(whole)):
            return self._inner(output)._reduce_scatter_base(output, whole, opts or c10d.ReduceScatterOptions())
        call = self._call(opts)
        return _work(
            "reduce_scatter", self._collectives.reduce_scatter(output, whole, op, call), [output], [whole], call
        )

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """reduce_scatter_single() of several tensors."""
        op, call = _operation(opts), self._call(opts)
        if op is None or not all(map(self._takes, [*outputs, *inputs])):
            opts = opts or c10d.ReduceScatterOptions()
            return self._inner(outputs[0]).reduce_scatter_tensor_coalesced(outputs, inputs, opts)

        def start(output: Tensor, whole: Tensor) -> Pending:
            return self._collectives.reduce_scatter(output, whole, op, call)

        return _work("reduce_scatter", _each(start, outputs, inputs), outputs, inputs, call)

    # ---- Moving: any dtype

    def broadcast(self, tensors: Any, opts: Any, timeout: timedelta | None = None) -> Any:
        """Every rank's tensor becomes that of one rank."""
        tensor = _only(tensors)
        opts = _rooted(c10d.BroadcastOptions(), opts)
        if not self._takes(tensor):
            return self._inner(tensor).broadcast([tensor], opts)
        call = self._call(opts, timeout)
        return _work("broadcast", self._collectives.broadcast(tensor, opts.rootRank, call), [tensor], [tensor], call)

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
        return _work("all_gather", pending, [result], [tensor], call)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """allgather() of several tensors; `outputs` has a list of them for each rank."""
        if len(outputs) != self.size():
            raise InvalidArgumentError(f"{len(outputs)} lists for {self.size()} ranks", "pass one list for each rank")
        call = self._call(opts)

        def start(parts: tuple[Tensor, ...], tensor: Tensor) -> Pending:
            return self._collectives.all_gather_parts(parts, tensor, call)

        by_tensor = list(zip(*outputs, strict=True))
        return _work("all_gather", _each(start, by_tensor, inputs), outputs, inputs, call)

    def all_gather_single(self, whole: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Every rank gets every rank's tensor, in one large one. Its own may be a part of that one."""
        if not (self._takes(whole) and self._takes(tensor)):
            return self._inner(whole)._allgather_base(whole, tensor, opts or c10d.AllgatherOptions())
        call = self._call(opts)
        return _work("all_gather", self._collectives.all_gather(whole, tensor, call), [whole], [tensor], call)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """all_gather_single() of several tensors."""
        if not all(map(self._takes, [*outputs, *inputs])):
            opts = opts or c10d.AllgatherOptions()
            return self._inner(outputs[0]).allgather_into_tensor_coalesced(outputs, inputs, opts)
        call = self._call(opts)

        def start(whole: Tensor, tensor: Tensor) -> Pending:
            return self._collectives.all_gather(whole, tensor, call)

        return _work("all_gather", _each(start, outputs, inputs), outputs, inputs, call)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Complete once every rank has called it."""
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        device = getattr(opts, "device", None)
        if device is not None and device.type != "cpu" and not self._stages:
            return self._get_backend(device).barrier(opts)
        call = self._call(opts, timeout)
        return _work("barrier", self._collectives.barrier(call), [], [], call)

    # ---- What gloo or NCCL does
    #
    # ProcessGroup's own forms of these hold the interpreter's lock while they start an operation on gloo. gloo's thread
    # wants that lock when it releases the tensors of the operation before, under a lock of its own that the start waits
    # for: a deadlock. The methods of a Backend hold no lock.

    def all_to_all_single(self, output: Tensor, whole: Tensor, *rest: Any, **options: Any) -> Any:
        """Every rank sends a part of its tensor to every rank."""
        return self._inner(whole).alltoall_base(output, whole, *rest, **options)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], *rest: Any, **options: Any) -> Any:
        """Every rank sends a tensor to every rank."""
        return self._inner(inputs[0]).alltoall(outputs, inputs, *rest, **options)

    def gather(self, outputs: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        """One rank gets every rank's tensor."""
        tensor = inputs if isinstance(inputs, Tensor) else inputs[0]
        return self._inner(tensor).gather(outputs, inputs, *rest, **options)

    def scatter(self, outputs: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        """Every rank gets one of the tensors of one rank."""
        tensor = outputs if isinstance(outputs, Tensor) else outputs[0]
        return self._inner(tensor).scatter(outputs, inputs, *rest, **options)

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Any:  # noqa: N803  torch's name
        """Sends a tensor to one rank."""
        return self._inner(tensors[0]).send(tensors, dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Any:  # noqa: N803  torch's name
        """Receives a tensor from one rank."""
        return self._inner(tensors[0]).recv(tensors, srcRank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """Receives a tensor from any rank."""
        return self._inner(tensors[0]).recv_anysource(tensors, tag)

    # Names before torch 2.13
    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- Helpers

    def _call(self, opts: Any, timeout: timedelta | None = None) -> Call:
        wanted = timeout if timeout is not None else getattr(opts, "timeout", _UNSET)
        # asyncOp tells whether the caller waits next; callers in C++ do not set it.
        return Call(
            wanted.total_seconds() if wanted > _UNSET else self._seconds, awaited=not getattr(opts, "asyncOp", True)
        )

    def _takes(self, tensor: Tensor) -> bool:
        """Returns whether the core moves a tensor: on a GPU only if it is to be staged."""
        return tensor.layout is torch.strided and (tensor.is_cpu or (self._stages and tensor.is_cuda))

    def _inner(self, tensor: Tensor) -> Any:
        """The backend for what the core does not take: bitwise operations, sparse tensors, other devices."""
        try:
            return self._get_backend(tensor.device)
        except RuntimeError as error:
            raise InvalidTensorError(
                f"the tensor is on {tensor.device}, for which this process has no backend", "move it to the CPU first"
            ) from error


def _gloo_options(timeout: timedelta) -> Any:
    """Ranks connect by the interface that bps_rdma uses.

    Gloo's own choice is the address of the host's name, which is 127.0.1.1 on many machines. They connect at once: to
    connect later, gloo lets the call that starts to receive wait until the other rank sends or receives something, too.
    """
    options = c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    device = c10d.ProcessGroupGloo.create_device
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interfaces:
        options._devices = [device(interface=name) for name in interfaces.split(",")]
    else:
        options._devices = [device(hostname=job.current().process.address)]
    options._threads = 2 * len(options._devices)
    return options


def _work(kind: str, pending: Pending, tensors: list[Any], inputs: Any, call: Call) -> BpsWork:
    if call.awaited and not profiling():
        settle(pending.handles, pending.finishes)  # the caller does nothing but wait for the returned work
        return done()
    return kept(BpsWork(kind, pending.handles, pending.finishes, tensors, inputs))


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


def _operation(opts: Any) -> ReduceOp | None:
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
