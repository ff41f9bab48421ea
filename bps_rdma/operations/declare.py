# SPDX-License-Identifier: Apache-2.0
"""Announcing names with their shape and dtype, and telling the core that memory has moved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bps_rdma import _core, argument_types, arrays
from bps_rdma.agreement import group_of
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.group import Group
from bps_rdma.job import current, surviving
from bps_rdma.operations.options import NONE, AnyCompression, OperationOptions, text_of
from bps_rdma.positions import keywords_since
from bps_rdma.running_job import Job

REDUCTIONS = (_core.Kind.push_pull, _core.Kind.reduce_scatter)


def declare(
    name: str,
    like: Any = None,
    *,
    shape: Any = None,
    dtype: Any = None,
    group: Group | None = None,
    compression: AnyCompression | None = None,
    exact: bool | None = None,
) -> None:
    """Announces a name before its first use; see declare_many()."""
    argument_types.check_name(name)  # which may be no key of a dict
    found = like if like is not None else (shape, dtype)
    declare_many({name: found}, group=group, compression=compression, exact=exact)


@keywords_since("group", "compression", "exact", named=False)
def declare_many(
    tensors: Mapping[str, Any],
    *,
    group: Group | None = None,
    compression: AnyCompression | None = None,
    exact: bool | None = None,
) -> None:
    """Announces any number of names in one round trip. Optional: the first use of a name declares it as well.

    Args:
        tensors: name -> an array of the shape and dtype that will be used, or (shape, dtype).
        group: default: all workers.
        compression: how sums of these names travel between hosts, as in Int8(feedback=True) (see docs/compression.md).
            A dict of BytePS's parameters (byteps_compressor_type and so on) says the same, and so does a text as in
            BPS_COMPRESSION, with a DeprecationWarning; Uncompressed(): as they are. Default: what BPS_COMPRESSION says
            of tensors of float32, float16 and bfloat16 of at least BPS_MIN_COMPRESS_BYTES.
        exact: whether sums and means of floating point are exact; see push_pull_inplace().

    Raises:
        InvalidArgumentError: there is no such compression, or not for this dtype.
        MismatchError: a name is declared with another dtype, size or compression here or on another rank; names both.
    """
    if not isinstance(tensors, Mapping):
        raise InvalidArgumentError(f"{type(tensors).__name__} is not a dict", "pass {name: array or (shape, dtype)}")
    for name in tensors:
        argument_types.check_name(name)
    declare_with(tensors, group, text_of(compression, exact))


def declare_with(tensors: Mapping[str, Any], group: Group | None, wanted: str | None) -> None:
    """declare_many() with the text of a compression."""
    shapes = [(name, *_shape_of(name, like)) for name, like in tensors.items()]

    def announce() -> None:
        job = current()
        number = group_of(job, group).id
        for name, dtype, count, _ in shapes:
            job.remark(number, name, dtype, count, wanted)
        job.declare(
            [
                (number, name, dtype, count, shape, job.compression(dtype, count, wanted))
                for name, dtype, count, shape in shapes
            ]
        )

    surviving(announce)


def _shape_of(name: str, like: Any) -> tuple[_core.Dtype, int, str]:
    """(dtype, elements, shape as text)."""
    if not (isinstance(like, tuple) and len(like) == 2 and not hasattr(like, "dtype")):
        memory = arrays.describe(like, writable=False)
        return memory.dtype, memory.elements, str(tuple(memory.shape))
    shape, dtype = like
    if shape is None or dtype is None:
        raise InvalidArgumentError(f"declare({name!r}) needs an array, or shape and dtype", "pass one of them")
    extent = argument_types.extent_of(shape)
    return arrays.core_dtype(dtype), math.prod(extent), str(extent)


def declared_compression(job: Job, members: Group, name: str, wanted: str | None) -> str | None:
    """The compression of a name for a call that wants this one; None: the settings decide."""
    if wanted is not None:
        return wanted
    known = job.tensors.get((members.id, name))
    if known is not None:
        return known.compression or NONE
    return job.compressed.get((job.numbering.keys[members.id], name)) if job.compressed else None


def declared(
    job: Job,
    kind: _core.Kind,
    members: Group,
    name: str,
    memory: arrays.Memory,
    count: int,
    options: OperationOptions,
) -> _core.Tensor:
    """The core's tensor of this name; declares it on its first use, and anew when what it stands for has changed."""
    compression = options.compression
    known = job.tensors.get((members._id, name))  # the job is that of the present view, and so is the group's number
    if known is not None and known.fits(memory, count) and compression is None:
        return known
    compression = declared_compression(job, members, name, compression)
    if known is None:
        argument_types.explain(name=name)  # the core would take bytes for a text
        if kind in REDUCTIONS:
            job.remark(members.id, name, memory.dtype, count, compression, options.op)
    shape = str(tuple(memory.shape)) if count == memory.elements else f"({count},)"
    wanted = job.compression(memory.dtype, count, compression)
    if known is not None and known.fits(memory, count) and known.compression == wanted:
        return known
    return job.declare([(members.id, name, memory.dtype, count, shape, wanted)])[0]


def forget(array: Any) -> None:
    """Tells the core that the memory of an array was freed and allocated again, perhaps at the same address.

    Needed only with BPS_RDMA_MEMORY=trusted, where that happens without the array's knowledge, as with torch's
    `storage.resize_()`: the transports then drop their registrations of the old memory. Otherwise that is noticed. No
    operation on the array may be in progress.
    """
    _, _, identity = arrays.describe(array, writable=False).block
    _core.renew_block(identity)
