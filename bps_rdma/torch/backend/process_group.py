"""A torch.distributed process group over bps_rdma.

Inside it are gloo, and NCCL where there is one, as torch's own groups have them: what is not defined here (point to
point, all_to_all, gather, scatter, monitored_barrier, names, ...) goes there through the base class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import bps_rdma
from bps_rdma import Group, Handle, operations
from bps_rdma._core import ReduceOp
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError
from bps_rdma.torch.backend import completion, dense
from bps_rdma.torch.backend.dense import Finish
from bps_rdma.torch.backend.work import BpsWork

c10d: Any = dist  # torch's stubs lack its newer names, and say nothing of subclasses
_CPU = torch.device("cpu")
_UNSET = timedelta(0)  # options say -1 ms for "the group's"
_BackendType = c10d.ProcessGroup.BackendType


class BpsProcessGroup(c10d.ProcessGroup):  # type: ignore[misc]
    """What init_process_group("bps") and new_group(backend="bps") make; see docs/torch-backend.md.

    Tensors that lie contiguous in CPU memory are used where they lie; others are copied, and copied back by whoever
    waits first. Collectives of one group must be called in the same order, with the same dtypes and sizes, on all of
    its ranks: a rank that differs gets MismatchError at once where it can be seen, and DeadlineError otherwise.
    """

    def __init__(self, options: Any, ranks: Sequence[int], group: Group | None, prefix: str, *, leaves: bool) -> None:
        """Arguments: torch's options; ranks in the group's order; our group; of names; whether its end is the job's."""
        super().__init__(options.group_rank, options.group_size)
        self._ranks = tuple(ranks)
        self._group = group
        self._in_order = list(ranks) == sorted(ranks)  # otherwise parts lie differently here and in the core
        self._prefix = prefix
        self._names: dict[tuple[str, torch.dtype, int], str] = {}
        self._leaves = leaves
        self._timeout = options.timeout
        self._seconds = options.timeout.total_seconds()
        self._add_inner(options)

    def _add_inner(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        gloo = c10d.ProcessGroupGloo(c10d.PrefixStore("gloo/", options.store), rank, size, timeout=options.timeout)
        gloo._set_sequence_number_for_group()
        self._register_backend(_CPU, _BackendType.GLOO, gloo)
        self._set_default_backend(_BackendType.GLOO)
        if torch.cuda.is_available() and c10d.is_nccl_available():
            nccl_options = c10d.ProcessGroupNCCL.Options()
            nccl_options._timeout = options.timeout
            nccl = c10d.ProcessGroupNCCL(c10d.PrefixStore("nccl/", options.store), rank, size, nccl_options)
            self._register_backend(torch.device("cuda"), _BackendType.NCCL, nccl)

    def getBackendName(self) -> str:  # noqa: N802
        """The name of this backend."""
        return "bps"

    def set_timeout(self, timeout: timedelta) -> None:
        """Deadline of the operations that start from now on."""
        self._timeout, self._seconds = timeout, timeout.total_seconds()
        super().set_timeout(timeout)

    def shutdown(self) -> None:
        """Called by destroy_process_group(); the default group leaves the job if it has joined it."""
        super().shutdown()
        if self._leaves:
            self._leaves = False
            bps_rdma.shutdown()
            completion.stop()

    # ---- Reductions

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Every rank's tensor becomes the reduction of all; see docs/torch-backend.md for operations and dtypes."""
        tensor = _only(tensors)
        op = dense.operation(getattr(opts, "reduceOp", opts) if opts is not None else c10d.ReduceOp.SUM)
        if op is None or not _ours(tensor):
            return self._inner(tensor).allreduce([tensor], _options(c10d.AllreduceOptions(), opts))
        pending, finish = self._reduce(tensor, op, opts, timeout)
        return BpsWork(pending, [tensor], finish)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """allreduce() of several tensors."""
        op = dense.operation(opts.reduceOp if opts is not None else c10d.ReduceOp.SUM)
        if op is None or not all(map(_ours, tensors)):
            return self._inner(tensors[0]).allreduce_coalesced(tensors, opts or c10d.AllreduceCoalescedOptions())
        return _all_of([self._reduce(tensor, op, opts) for tensor in tensors], tensors)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> Any:
        """As allreduce(), for one rank; on the others the result goes into a scratch buffer, and the tensor stays."""
        tensor = _only(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        name = dense.operation(op or getattr(opts, "reduceOp", c10d.ReduceOp.SUM))
        if name is None or not _ours(tensor):
            return self._inner(tensor).reduce([tensor], opts)
        target = tensor if root == self.rank() else tensor.detach().clone(memory_format=torch.contiguous_format)
        pending, finish = self._reduce(target, name, opts, timeout)
        return BpsWork(pending, [tensor], finish)

    def _reduce(
        self, tensor: torch.Tensor, op: ReduceOp, opts: Any, timeout: timedelta | None = None
    ) -> tuple[list[Handle], list[Finish | None]]:
        data, finish = dense.written(dense.reducible(tensor, op))
        if data.numel() == 0:
            return [], []
        handle = operations._reduce(
            data, data, op, self._name("all_reduce", data), 0, self._group,
            self._deadline(opts, timeout), awaited=_awaited(opts),
        )  # fmt: skip
        return [handle], [finish]

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """This rank's part of the reduction, from one tensor per rank; they may differ in size."""
        output, parts = (outputs, inputs) if isinstance(outputs, torch.Tensor) else (_only(outputs), _only(inputs))
        op = dense.operation(getattr(opts, "reduceOp", opts) if opts is not None else c10d.ReduceOp.SUM)
        if op is None or not all(map(_ours, [output, *parts])):
            return self._inner(output).reduce_scatter([output], [parts], _options(c10d.ReduceScatterOptions(), opts))
        self._check_parts(parts, output, "output")
        if self._in_order and _equal(parts):
            pending, finish = self._reduce_scatter(output, dense.joined(parts), op, opts, timeout)
            return BpsWork(pending, [output], finish)
        whole = torch.cat([part.detach().reshape(-1) for part in parts])
        begin = sum(part.numel() for part in parts[: self.rank()])
        own = whole[begin : begin + output.numel()]
        pending, _ = self._reduce(whole, op, opts, timeout)
        return BpsWork(pending, [output], [lambda: dense.copy(output, own)])

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Any:
        """This rank's part of the reduction, from one tensor; the output may be that part of it."""
        op = dense.operation(opts.reduceOp if opts is not None else c10d.ReduceOp.SUM)
        if op is None or not (_ours(output) and _ours(whole)):
            opts = opts or c10d.ReduceScatterOptions()
            return self._inner(output)._reduce_scatter_base(output, whole, opts)
        self._check_whole(whole, output)
        if not self._in_order:
            return self.reduce_scatter([output], [list(whole.reshape(self.size(), *output.shape))], opts)
        pending, finish = self._reduce_scatter(output, whole, op, opts)
        return BpsWork(pending, [output], finish)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """reduce_scatter_single() of several tensors."""
        return self._each(self.reduce_scatter_single, outputs, inputs, opts)

    def _reduce_scatter(
        self, output: torch.Tensor, whole: torch.Tensor, op: ReduceOp, opts: Any, timeout: timedelta | None = None
    ) -> tuple[list[Handle], list[Finish | None]]:
        whole = dense.reducible(whole, op).contiguous()
        target, finish = dense.filled(dense.reducible(output, op))
        if whole.numel() == 0:
            return [], []
        handle = operations._reduce_scatter(
            whole, op, self._name("reduce_scatter", whole), 0, self._group, target,
            self._deadline(opts, timeout), awaited=_awaited(opts),
        )  # fmt: skip
        return [handle], [finish]

    # ---- Moving

    def broadcast(self, tensors: Any, opts: Any, timeout: timedelta | None = None) -> Any:
        """Every rank's tensor becomes that of one rank; any dtype."""
        tensor = _only(tensors)
        if not _ours(tensor):
            return self._inner(tensor).broadcast([tensor], opts)
        root = opts if isinstance(opts, int) else opts.rootRank
        pending, finish = self._broadcast(tensor, root, opts, timeout)
        return BpsWork(pending, [tensor], finish, source=root)

    def _broadcast(
        self, tensor: torch.Tensor, root: int, opts: Any, timeout: timedelta | None = None
    ) -> tuple[list[Handle], list[Finish | None]]:
        data, finish = dense.written(tensor)
        if data.numel() == 0:
            return [], []
        data = dense.movable(data)
        handle = operations._broadcast(
            data, self._ranks[root], self._name("broadcast", data), 0, self._group, self._deadline(opts, timeout),
            awaited=_awaited(opts),
        )  # fmt: skip
        return [handle], [finish if root != self.rank() else None]

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Every rank gets every rank's tensor, each in one of its own; they may differ in size. Any dtype."""
        flat = bool(outputs) and isinstance(outputs[0], torch.Tensor)
        parts, tensor = (outputs, inputs) if flat else (_only(outputs), _only(inputs))
        if not all(map(_ours, [tensor, *parts])):
            return self._inner(tensor).allgather([parts], [tensor], _options(c10d.AllgatherOptions(), opts))
        self._check_parts(parts, tensor, "input")
        if self._in_order and _equal(parts):
            whole, finish = dense.gathered(parts)
            pending, _ = self._all_gather(whole, tensor, opts)
            return BpsWork(pending, outputs, [finish])
        dense.copy(parts[self.rank()], tensor)
        return _all_of([self._broadcast(part, rank, opts) for rank, part in enumerate(parts)], outputs)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """allgather() of several tensors; `outputs` has a list for each of them."""
        return self._each(lambda parts, tensor, opts: self.allgather([parts], [tensor], opts), outputs, inputs, opts)

    def all_gather_single(self, whole: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        """Every rank gets every rank's tensor, in one large one, of which its own may be a part. Any dtype."""
        if not (_ours(whole) and _ours(tensor)):
            return self._inner(whole)._allgather_base(whole, tensor, opts or c10d.AllgatherOptions())
        self._check_whole(whole, tensor)
        target, finish = dense.filled(whole)
        if not self._in_order:
            parts = list(target.view(self.size(), *tensor.shape))
            work = self.allgather([parts], [tensor], opts)
            return BpsWork(work.handles, [whole], [*work.finishes, finish])
        pending, _ = self._all_gather(target, tensor, opts)
        return BpsWork(pending, [whole], [finish])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """all_gather_single() of several tensors."""
        return self._each(self.all_gather_single, outputs, inputs, opts)

    def _all_gather(
        self, whole: torch.Tensor, tensor: torch.Tensor, opts: Any
    ) -> tuple[list[Handle], list[Finish | None]]:
        if whole.numel() == 0:
            return [], []
        whole, tensor = dense.movable(whole), dense.movable(tensor.contiguous())
        handle = operations._all_gather(
            tensor, self._name("all_gather", whole), 0, self._group, whole, self._deadline(opts), awaited=_awaited(opts)
        )
        return [handle], []

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Complete once every rank has called it."""
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        device = getattr(opts, "device", None)
        if device is not None and device.type != "cpu":
            return self._get_backend(device).barrier(opts)
        token = torch.zeros(1, dtype=torch.uint8)
        handle = operations._reduce(
            token, token, ReduceOp.max, f"{self._prefix}.barrier", 0, self._group,
            self._deadline(opts, timeout), awaited=_awaited(opts),
        )  # fmt: skip
        return BpsWork([handle], [token])

    # Names before torch 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- Helpers

    def _name(self, kind: str, data: torch.Tensor) -> str:
        """Names count the kinds, dtypes and sizes that this group has seen.

        So ranks that come with different ones declare the same name differently, which is noticed at once.
        """
        key = (kind, data.dtype, data.numel())
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"{self._prefix}.{len(self._names)}"
        return name

    def _deadline(self, opts: Any, timeout: timedelta | None = None) -> float:
        """Seconds: of the call, or of the group."""
        wanted = timeout if timeout is not None else getattr(opts, "timeout", _UNSET)
        return wanted.total_seconds() if wanted > _UNSET else self._seconds

    def _inner(self, tensor: torch.Tensor) -> Any:
        """Who takes what the core does not."""
        try:
            return self._get_backend(tensor.device)
        except RuntimeError as error:
            raise InvalidTensorError(
                f"the tensor is on {tensor.device}, and this process has no NCCL", "move it to the CPU first"
            ) from error

    def _each(self, call: Callable[[Any, Any, Any], Any], outputs: list[Any], inputs: list[Any], opts: Any) -> Any:
        if len(outputs) != len(inputs):
            raise InvalidArgumentError(f"{len(inputs)} inputs for {len(outputs)} outputs", "pass one for each")
        works = [call(output, tensor, opts) for output, tensor in zip(outputs, inputs, strict=True)]
        if not all(isinstance(work, BpsWork) for work in works):
            for work in works:
                work.wait()
            return BpsWork([], outputs)
        return BpsWork(
            [h for work in works for h in work.handles], outputs, [f for work in works for f in work.finishes]
        )

    def _check_parts(self, parts: Sequence[torch.Tensor], own: torch.Tensor, what: str) -> None:
        mine = parts[self.rank()] if len(parts) == self.size() else None
        if mine is None or mine.numel() != own.numel() or {part.dtype for part in parts} != {own.dtype}:
            shapes = [(tuple(part.shape), part.dtype) for part in parts]
            raise InvalidTensorError(
                f"parts {shapes} do not suit a group of {self.size()} in which this is rank {self.rank()}, whose "
                f"{what} is {(tuple(own.shape), own.dtype)}",
                "pass one tensor per rank, of the dtype and size that the rank has",
            )

    def _check_whole(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        if whole.numel() != part.numel() * self.size() or whole.dtype != part.dtype:
            raise InvalidTensorError(
                f"a tensor of {whole.numel()} {whole.dtype} is not {self.size()} times one of {part.numel()} "
                f"{part.dtype}",
                "the large one has as many times the elements of the small one as the group has ranks",
            )


def _only(tensors: Any) -> Any:
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise InvalidArgumentError(f"{len(tensors)} tensors at once", "pass one; the coalesced forms take several")
    return tensors[0]


def _ours(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided


def _equal(parts: Sequence[torch.Tensor]) -> bool:
    return all(part.numel() == parts[0].numel() for part in parts)


def _awaited(opts: Any) -> bool:
    return not getattr(opts, "asyncOp", True)  # C++ callers do not say


def _options(made: Any, opts: Any) -> Any:
    """Options for the inner backend, where the caller has given none, or a reduction instead."""
    if opts is None:
        return made
    if hasattr(opts, "timeout"):
        return opts
    made.reduceOp = opts
    return made


def _all_of(pending: Sequence[tuple[Sequence[Handle], Sequence[Finish | None]]], tensors: list[Any]) -> BpsWork:
    return BpsWork([h for handles, _ in pending for h in handles], tensors, [f for _, fs in pending for f in fs])
