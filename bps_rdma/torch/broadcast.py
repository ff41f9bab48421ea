# SPDX-License-Identifier: Apache-2.0
"""Broadcasts of a model's parameters, an optimizer's state and objects, under BytePS's and Horovod's names."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch

import bps_rdma
from bps_rdma.argument_types import check_root
from bps_rdma.errors import InvalidArgumentError, MismatchError
from bps_rdma.torch.broadcast_objects import Transfer, broadcast_objects, broadcast_tensors, check_pickle, check_tensor
from bps_rdma.torch.check_alike import all_gather_bytes, check_alike, optimizer_lines, place_of, tensor_line
from bps_rdma.torch.encoding import Encoder, decode
from bps_rdma.torch.membership import AnyGroup, group_of
from bps_rdma.torch.sharded import ShardedOptimizer
from bps_rdma.torch.transfer import members_of


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
    root_rank: int = 0,
    prefix: str = "Parameter.",
    group: AnyGroup = None,
) -> None:
    """Overwrites every tensor on all ranks by that of one rank, bit for bit. Every rank of the group must call it.

    Args:
        params: model.state_dict(), or pairs as from model.named_parameters(), in any order. Tensors of any dtype, shape
            and device, contiguous or not. Entries that are None are left out.
        root_rank: worker rank whose tensors are taken.
        prefix: of the names of all operations.
        group: a group of bps_rdma or of torch.distributed; default: all workers.

    Raises:
        InvalidArgumentError: `root_rank` is not in the group; a name occurs twice; a value is not a tensor.
        InvalidTensorError: a sparse, quantised, expanded or lazy tensor.
        MismatchError: names, shapes, dtypes or roots differ between ranks.
            These are raised on every rank before anything is overwritten.
        PeerLostError, DeadlineError: as bps_rdma.broadcast().
    """
    ours = group_of(group)
    root_rank = check_root(root_rank, members_of(ours).ranks, "root_rank")
    tensors: dict[str, torch.Tensor] = {}
    failure: InvalidArgumentError | None = None
    try:
        tensors = _named_tensors(params)
    except InvalidArgumentError as error:
        failure = error
    lines = [f"root {root_rank}", *(tensor_line(name, tensor) for name, tensor in tensors.items())]
    places = [place_of(tensor) for tensor in tensors.values()]
    alike = check_alike(lines, f"broadcast_parameters {prefix}", ours, failure, places)
    broadcast_tensors(
        [
            Transfer(f"{prefix}{name}.{tensor.numel() * tensor.element_size()}", root_rank, tensor)
            for name, tensor in tensors.items()
        ],
        ours,
        staged=alike,
    )


def _named_tensors(params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors by name, in the order of names."""
    hint = "pass model.state_dict() or model.named_parameters()"
    found: dict[str, torch.Tensor] = {}
    for pair in params.items() if isinstance(params, Mapping) else params:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise InvalidArgumentError(f"a {type(pair).__name__} is not a pair of a name and a tensor", hint)
        name, tensor = pair
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(
                f"{name} is a {type(tensor).__name__}, not a tensor", "use broadcast_object() for it"
            )
        if name in found:
            raise InvalidArgumentError(f"the name {name} occurs twice", hint)
        check_tensor(name, tensor)
        found[name] = tensor
    return dict(sorted(found.items()))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    prefix: str = "Parameter.",
    group: AnyGroup = None,
    *,
    allow_pickle: bool = False,
) -> None:
    """Gives all ranks one rank's optimizer state and options (lr, betas, ...). Every rank of the group must call it.

    The other ranks load it with `optimizer.load_state_dict()`, which replaces the state they had, if any.

    Args:
        optimizer: of the same class and over the same parameters on all ranks.
        root_rank: worker rank whose state is taken.
        prefix: of the names of all operations.
        group: a group of bps_rdma or of torch.distributed; default: all workers.
        allow_pickle: as for broadcast_object(); for optimizers that keep objects of their own classes.

    Raises:
        InvalidArgumentError: `root_rank` is not in the group; not an optimizer, or one whose state is sharded; a state
            that cannot be sent. MismatchError: optimizers, parameters or roots differ between ranks.
            These are raised on every rank.
        PeerLostError, DeadlineError: as bps_rdma.broadcast().
    """
    ours = group_of(group)
    root_rank = check_root(root_rank, members_of(ours).ranks, "root_rank")
    check_pickle(allow_pickle=allow_pickle)
    failure, lines = None, [f"root {root_rank}"]
    given: Any = optimizer
    if not isinstance(given, torch.optim.Optimizer):
        failure = InvalidArgumentError(f"a {type(given).__name__} is not an optimizer", "pass a torch.optim.Optimizer")
    elif isinstance(given, ShardedOptimizer):
        failure = InvalidArgumentError(
            "a ShardedOptimizer has no state that all ranks share", "load_state_dict() the same state on every rank"
        )
    else:
        lines += optimizer_lines(optimizer)
    name = f"broadcast_optimizer_state {prefix}"
    check_alike(lines, name, ours, failure)
    state = optimizer.state_dict() if bps_rdma.rank() == root_rank else None
    found = broadcast_objects(state, [root_rank], name, ours, allow_pickle=allow_pickle)[root_rank]
    if bps_rdma.rank() != root_rank:
        optimizer.load_state_dict(found)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, group: AnyGroup = None, *, allow_pickle: bool = False
) -> Any:
    """The object of one rank, on all ranks; on `root_rank` it is `obj` itself. Every rank of the group must call it.

    Args:
        obj: of any size, made of None, numbers, strings, bytes, lists, tuples, dicts, sets, dense tensors, dtypes and
            numpy arrays. Ignored on the other ranks.
        root_rank: worker rank whose object is taken.
        name: the same on all ranks; optional.
        group: a group of bps_rdma or of torch.distributed; default: all workers.
        allow_pickle: objects of other classes are pickled, except lambdas and local functions. Reading a pickled object
            can run code: the root can do everything on the other ranks. The same on all ranks; refused in a job without
            a secret.

    Raises:
        InvalidArgumentError: `root_rank` is not in the group; the object cannot be sent (raised on all ranks) or read
            (raised on that rank); allow_pickle in a job without a secret.
        MismatchError: ranks name different roots. PeerLostError, DeadlineError: as bps_rdma.broadcast().
    """
    ours = group_of(group)
    root_rank = check_root(root_rank, members_of(ours).ranks, "root_rank")
    check_pickle(allow_pickle=allow_pickle)

    def write(file: io.BytesIO) -> None:
        Encoder(allow_pickle=allow_pickle).write(obj, file)

    is_root = bps_rdma.rank() == root_rank
    messages = all_gather_bytes(write if is_root else None, f"broadcast_object {name or ''}", ours)
    ranks = members_of(ours).ranks
    senders = [rank for rank, text in zip(ranks, messages, strict=True) if text is not None]
    if len(senders) != 1 or senders[0] != root_rank:
        raise MismatchError(
            f"broadcast_object: this rank names worker {root_rank} as the root, but workers {senders} sent an object",
            "name the same root_rank on all ranks",
        )
    text = messages[ranks.index(root_rank)]
    assert text is not None
    return obj if is_root else decode(text, root_rank, allow_pickle=allow_pickle)
