# SPDX-License-Identifier: Apache-2.0
"""Makes Megatron's DistributedDataParallel use push/pull, without changing Megatron's files or copying its code.

After a DistributedDataParallel has been made, the communication group of each of its bucket groups is replaced by a
Communicator. These attributes are read only inside the bucket groups' own methods. The methods have changed in every
release while the attributes have not (0.14 to 0.19), so replacing them depends on no method's body.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from bps_rdma import Group, extras
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.megatron.arguments import check_options, check_version, is_set
from bps_rdma.megatron.communicator import Communicator
from bps_rdma.megatron.lora import cure_frozen_embedding, watch_first_step
from bps_rdma.megatron.memory import MappedBuffers, follow_moves
from bps_rdma.megatron.model_groups import is_replaced, replace_groups
from bps_rdma.megatron.order import watch_order
from bps_rdma.torch import membership
from bps_rdma.torch.membership import unique

_GROUPS = (
    "data_parallel_group",
    "intra_distributed_optimizer_instance_group",
    "inter_distributed_optimizer_instance_group",
)
_undo: list[Callable[[], None]] = []  # how to restore the classes of Megatron that are patched in this process


def enable(
    config: Any = None, *, use_dpu_reduce: bool | None = None, use_dpu_tp_reduce: bool | None = None,
    use_bps_pp: bool | None = None, cure_frozen_embeddings: bool | None = None,
) -> bool:  # fmt: skip
    """Makes each Megatron DistributedDataParallel that is constructed from now on use push/pull for its gradients.

    Call it once at start-up, on all ranks with the same arguments, before parallel groups and the model are made.
    Without the flags Megatron is not changed at all. Models whose own configuration has use_bps=False are left to
    Megatron (see bps_rdma.megatron.config).

    Args:
        config: Megatron's arguments or a DistributedDataParallelConfig, from which `use_bps` (or `use_dpu_reduce`),
            `use_bps_tp` (or `use_dpu_tp_reduce`) and `use_bps_pp` are read where it has them. None: use_dpu_reduce
            alone.
        use_dpu_reduce: synchronise gradients and the distributed optimizer's parameters; overrides `config`, but not
            the configuration of a model.
        use_dpu_tp_reduce: also the collectives of tensor parallelism, through a group of bps_rdma's torch.distributed
            backend, and those of experts that are divided in this way; overrides `config`.
        use_bps_pp: also what pipeline stages send each other, and the gradients of embeddings that they share;
            overrides `config`. Of two stages without batch_p2p_comm only the activations: Megatron sends the gradients
            of activations in the group of all ranks.
        cure_frozen_embeddings: let_embeddings_pass_gradients() of models that recompute in full over a frozen
            embedding, whose first stage would otherwise never train; overrides the configuration of a model, which
            overrides `config`. Default: True.

    Returns:
        Whether anything is enabled.

    Raises:
        InvalidArgumentError: Megatron's version, or an option in `config`, is not supported; says why.
    """
    gradients = use_dpu_reduce
    if gradients is None:
        gradients = is_set(config, "--use-dpu-reduce", otherwise=config is None)
    tensors = is_set(config, "--use-dpu-tp-reduce") if use_dpu_tp_reduce is None else use_dpu_tp_reduce
    stages = is_set(config, "--use-bps-pp") if use_bps_pp is None else use_bps_pp
    if not (gradients or tensors or stages):
        return False
    extras.require("megatron.core", "bps_rdma.megatron")
    import megatron.core

    check_version(megatron.core.__version__)
    if gradients:
        check_options(config)
    disable()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel

    if gradients:
        cure = _then_cure(cure_frozen_embeddings, otherwise=getattr(config, "cure_frozen_embeddings", True))
        _replace(DistributedDataParallel, "__init__", cure)
        _replace(DistributedDataParallel, "__init__", _then_attach)
    flags = ["--use-bps-tp"] * tensors + ["--use-bps-pp"] * stages
    if flags:
        _replace(DistributedDataParallel, "__init__", _then_warn_of_idle(flags))
    # Without these flags, too: this rank has to tell ranks that have them.
    _replace(parallel_state, "initialize_model_parallel", _then_replace(flags))
    return True


def disable() -> None:
    """Undoes enable(). Models that have been made keep using push/pull."""
    while _undo:
        _undo.pop()()


@contextlib.contextmanager
def enabled(config: Any = None, **flags: bool | None) -> Iterator[bool]:
    """enable() for the models that are made within this context."""
    try:
        yield enable(config, **flags)
    finally:
        disable()


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    before = getattr(owner, name)
    setattr(owner, name, wrap(before))
    _undo.append(lambda: setattr(owner, name, before))


def _then_attach(initialise: Any) -> Any:
    @functools.wraps(initialise)
    def initialise_and_attach(self: Any, config: Any, ddp_config: Any, *args: Any, **options: Any) -> None:
        if not is_set(ddp_config, "--use-dpu-reduce", otherwise=True):
            initialise(self, config, ddp_config, *args, **options)
            membership.init()  # other ranks may make a model that uses it, and all ranks join
            return
        with MappedBuffers():
            initialise(self, config, ddp_config, *args, **options)
        attach(self)

    return initialise_and_attach


def _then_cure(keyword: bool | None, *, otherwise: bool) -> Callable[[Any], Any]:
    def wrap(initialise: Any) -> Any:
        @functools.wraps(initialise)
        def initialise_and_cure(self: Any, *args: Any, **options: Any) -> None:
            initialise(self, *args, **options)
            own = getattr(self.ddp_config, "cure_frozen_embeddings", otherwise)
            wanted = own if keyword is None else keyword
            if wanted and is_set(self.ddp_config, "--use-dpu-reduce", otherwise=True):
                cure_frozen_embedding(self.module, self.config)

        return initialise_and_cure

    return wrap


def _then_warn_of_idle(flags: Sequence[str]) -> Callable[[Any], Any]:
    """Warns of flags without effect when the first model is made."""
    waiting = list(flags)

    def wrap(initialise: Any) -> Any:
        @functools.wraps(initialise)
        def initialise_and_warn(self: Any, *args: Any, **options: Any) -> None:
            import torch.distributed as dist

            initialise(self, *args, **options)
            idle = [flag for flag in waiting if not is_replaced(flag)]
            waiting.clear()
            if idle and dist.get_rank() == 0:
                warnings.warn(
                    f"{' and '.join(idle)} replaced no group: those groups have one rank, or were not made by "
                    "Megatron's initialize_model_parallel() after enable(). Groups of a HyperCommGrid or of an own "
                    "ProcessGroupCollection stay as they are",
                    stacklevel=2,
                )

        return initialise_and_warn

    return wrap


def attach(ddp: Any) -> int:
    """Makes one DistributedDataParallel of Megatron's use push/pull; every rank of its data-parallel groups calls it.

    Joins the job first, with the ranks of torch.distributed's default group, if this process has not joined it.

    Returns:
        How many groups of bucket groups have been replaced; 0 where a data-parallel group has one rank only.

    Raises:
        InvalidArgumentError: an option of `ddp`, or its version, is not supported.
    """
    check_options(ddp.ddp_config)
    membership.init()
    chunks = _Chunks()
    replaced = 0
    for kind in ("bucket_groups", "expert_parallel_bucket_groups"):
        groups = getattr(ddp, kind)
        for number, bucket_group in enumerate(groups):
            name = f"{kind.removesuffix('bucket_groups')}{number}"
            # The last bucket group is sent last, and its parameters are what the next forward needs first.
            replaced += _attach_to(bucket_group, chunks, name, priority=number)
    follow_moves(ddp)
    watch_first_step(ddp)
    watch_order(ddp)
    return replaced


class _Chunks:
    """The name of one model chunk in each data-parallel group. The ranks of a group make its chunks in one order."""

    def __init__(self) -> None:
        self._names: dict[Group | None, str] = {}

    def name_in(self, group: Group | None) -> str:
        """The same for all bucket groups of the chunk."""
        if group not in self._names:
            self._names[group] = unique("megatron", group)
        return self._names[group]


def _attach_to(bucket_group: Any, chunks: _Chunks, name: str, priority: int) -> int:
    replaced = known = 0
    for attribute in _GROUPS:
        stock = getattr(bucket_group, attribute, None)
        if stock is None or isinstance(stock, Communicator):
            continue
        known += 1
        if stock.size() > 1:
            group = membership.group_of(stock)
            full_name = f"{chunks.name_in(group)} {name} {attribute}"
            communicator = Communicator(stock, group, full_name, priority)
            setattr(bucket_group, attribute, communicator)
            replaced += 1
    if not known:
        raise InvalidArgumentError(
            f"this {type(bucket_group).__name__} has none of the known communication groups: {', '.join(_GROUPS)}",
            "this version of Megatron is not supported yet: please report it",
        )
    return replaced


def _then_replace(flags: Sequence[str]) -> Callable[[Any], Any]:
    def wrap(initialise: Any) -> Any:
        @functools.wraps(initialise)
        def initialise_and_replace(*args: Any, **options: Any) -> None:
            initialise(*args, **options)
            given = inspect.signature(initialise).bind(*args, **options)
            given.apply_defaults()
            minutes = given.arguments.get("distributed_timeout_minutes")
            replace_groups(flags, None if minutes is None else timedelta(minutes=minutes))

        return initialise_and_replace

    return wrap
