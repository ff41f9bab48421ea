# SPDX-License-Identifier: Apache-2.0
"""Prepared operations: described once, started many times, as MPI's persistent requests are."""

from __future__ import annotations

from typing import Any, Literal

from bps_rdma import _core, argument_types, arrays
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.group import Group
from bps_rdma.handle import PreparedOperation
from bps_rdma.job import current, surviving
from bps_rdma.operations import start
from bps_rdma.operations.options import SUM, AnyCompression, OperationOptions, ReduceName, reduction, text_of
from bps_rdma.operations.start import Described, Kind
from bps_rdma.positions import keywords_since

KINDS = ("push_pull", "reduce_scatter", "all_gather", "broadcast")


@keywords_since(
    "average", "name", "priority", "group", "out", "root", "op", "timeout", "compression", "exact", leading=2
)
def prepare(
    kind: Literal["push_pull", "reduce_scatter", "all_gather", "broadcast"],
    array: Any,
    name: str | None = None,
    *,
    average: bool = True,
    op: ReduceName | None = None,
    root: int = 0,
    priority: int = 0,
    group: Group | None = None,
    out: Any = None,
    timeout: float | None = None,
    compression: AnyCompression | None = None,
    exact: bool | None = None,
) -> PreparedOperation[Any]:
    """Describes an operation that is started many times on the same memory; nothing is sent yet.

    Checks, look-ups and the declaration of the name happen here, once, so that a call allocates nothing and costs a
    fraction of what push_pull_inplace() costs. Results are the same, bit for bit, and calls of both kinds may be mixed:
    each is the next round of its name.

    Args:
        kind: "push_pull", "reduce_scatter", "all_gather" or "broadcast".
        array: what the function of that name takes. Its memory must stay where it is, and its dtype what it is. Of an
            array of a GPU each start waits for the stream that the array has by then.
        average, name, priority, group, op, timeout, compression, exact: as for push_pull_inplace(); `timeout` is that
            of each start. Only reductions use `average`, `op`, `compression` and `exact`.
        out: receives the result of a push_pull (default: in place), reduce_scatter or all_gather (default: a new
            array); as for the functions of these names.
        root: of a broadcast.

    Returns:
        The operation: `operation()` runs it and returns its result; `operation.start()`, then `operation.wait()` or
        `await operation`, do the same in two steps. It belongs to this job: after shutdown() it raises
        NotInitializedError.

    Raises:
        InvalidArgumentError: `kind` is none of these. Otherwise as the function of that name, before anything is sent.
    """
    options = OperationOptions(SUM, name, priority, group, timeout)
    # The other two move numbers as they are, and their names say nothing of compression.
    if kind not in ("all_gather", "broadcast"):
        options = options._replace(op=reduction(average, op), compression=text_of(compression, exact))
    return _prepare(_described(kind, array, out, root, options), options)


def prepare_unowned(tensor: Any, options: OperationOptions) -> PreparedOperation[Any]:
    """Prepares the reduction of a torch tensor in place, without keeping the tensor alive; calls return None.

    The caller must hold the tensor during a call. Once its memory has been freed a call raises InvalidArgumentError.
    """
    memory = arrays.describe_torch(tensor, keep=None)
    start.check_mean(memory, options)
    found = Described(Kind.push_pull, memory, memory, None, memory.elements)
    return _prepare(found, options, like=arrays.describe_torch(tensor, keep=tensor))


def _prepare(found: Described, options: OperationOptions, like: Any = None) -> PreparedOperation[Any]:
    # `like`: memory that knows its shape, for a name that is not declared in this view.
    def prepared() -> PreparedOperation[Any]:
        job = current()
        tensor = start.tensor_of(job, found.kind, like or found.source, found.elements, options)
        return _core.prepare_operation(
            job.process,
            tensor,
            found.kind,
            options.op,
            found.source,
            found.target,
            found.result,
            found.root,
            options.priority,
            options.timeout,
            found.copy_to,
        )

    try:
        return surviving(prepared)
    except TypeError:
        argument_types.explain(name=options.name, priority=options.priority, timeout=options.timeout)
        raise


def _described(kind: str, array: Any, out: Any, root: int, options: OperationOptions) -> Described:
    if kind == "push_pull":
        return start.reducing(array, out, options)
    if kind == "reduce_scatter":
        return start.scattering(array, out, options)
    if kind == "all_gather":
        return start.gathering(array, out, options)
    if kind == "broadcast":
        return start.broadcasting(array, root, options)
    raise InvalidArgumentError(f"there is no operation {kind!r} to prepare", f"use one of {', '.join(KINDS)}")
