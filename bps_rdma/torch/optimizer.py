# SPDX-License-Identifier: Apache-2.0
"""DistributedOptimizer: an optimizer that steps on the mean of all ranks' gradients, as BytePS and Horovod have it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from bps_rdma import job
from bps_rdma.errors import BpsError, InvalidArgumentError
from bps_rdma.operations import Options, ReduceOp
from bps_rdma.operations.compressed import NONE
from bps_rdma.spans import spans
from bps_rdma.torch import start, transfer
from bps_rdma.torch.asynchronous import AsynchronousOptimizer
from bps_rdma.torch.checks import check_count, check_optimizer
from bps_rdma.torch.compression import AnyCompression, Compression, compressor_of
from bps_rdma.torch.names import unique
from bps_rdma.torch.plan import StrategyName
from bps_rdma.torch.rebase import rebase, remove_hooks
from bps_rdma.torch.start import AnyGroup
from bps_rdma.torch.synchronizer import GradientSynchronizer
from bps_rdma.torch.units import Place


def DistributedOptimizer(  # noqa: N802
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: AnyCompression = Compression.none,
    backward_passes_per_step: int = 1,
    strategy: StrategyName = "overlap",
    bucket_mb: float = 25.0,
    group: AnyGroup = None,
    exact: bool | None = None,
) -> _DistributedOptimizer | AsynchronousOptimizer:
    """The optimizer, whose step() waits until all gradients are means over all ranks.

    With BPS_ASYNC=1 servers keep the weights, and no rank waits for another; see docs/async.md. Otherwise gradients are
    sent during backward, as soon as they are complete. Use broadcast_parameters() and
    broadcast_optimizer_state() to start from the same values.

        optimizer.zero_grad(); loss.backward(); optimizer.step()

    or, to look at the means before they are used:

        optimizer.zero_grad(); loss.backward(); optimizer.synchronize(); clip(...); optimizer.step()

    Args:
        optimizer: any torch.optim.Optimizer, of parameters on the CPU or on CUDA devices; it shares its state with the
            result.
        named_parameters: (name, parameter) for all of its parameters, the same names on all ranks, for instance
            `model.named_parameters()`; None: they are named by their place in the optimizer.
        compression: the dtype in which gradients are sent, e.g. Compression.bf16, or how float32 gradients of at least
            BPS_MIN_COMPRESS_BYTES travel between hosts, e.g. "int8:feedback=1"; see docs/compression.md.
        backward_passes_per_step: backward passes whose gradients are added up before they are sent, not averaged; with
            exact means without rounding, and then the same number on all ranks.
        strategy: as for DistributedDataParallel; "overlap" sends each gradient in place.
        bucket_mb: size of buckets, 2^20 bytes, for the strategies that have them.
        group: a group of bps_rdma or of torch.distributed; default: all workers.
        exact: True: means are exact, and rounded once: the same bits for any number of ranks (see docs/exact.md).
            Default: what BPS_EXACT says.

    Raises:
        InvalidArgumentError: a name twice, or a parameter without a name.
        InvalidTensorError, MismatchError: a parameter cannot be synchronised; names it.
    """
    check_optimizer(optimizer)
    start.init()
    ours = start.group_of(group)
    named = names_of(optimizer, named_parameters)
    check_count("backward_passes_per_step", backward_passes_per_step, 1)
    if job.current().asynchronous:
        how = compressor_of(compression, exact)
        if how.dtype is not None or how.method not in (None, NONE):
            raise InvalidArgumentError("changes of weights travel as they are", "do without compression and exact")
        if how.method is None:
            _refuse_settings()
        kept = rebase(optimizer, AsynchronousOptimizer)
        kept._begin(named, ours)
        return kept
    result = rebase(optimizer, _DistributedOptimizer)
    how = compressor_of(compression, exact)
    several = backward_passes_per_step > 1
    result._begin(
        GradientSynchronizer(named, unique("Gradient"), strategy, bucket_mb, how, ours, accumulates=several),
        backward_passes_per_step,
    )
    return result


def _refuse_settings() -> None:
    """Raises InvalidArgumentError where a setting asks for what changes of weights cannot have."""
    running = job.current()
    for name in ("BPS_EXACT", "BPS_COMPRESSION"):
        value = running.config.text(name)
        if value not in ("", "0", NONE):
            raise InvalidArgumentError(
                f"changes of weights travel as they are, and there is {name}={value}",
                f"do without {name}, or without BPS_ASYNC; or pass exact=False if {name} is for other tensors",
            )


def names_of(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> list[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) for every parameter of the optimizer that is trained, in the order of `named`.

    Raises:
        InvalidArgumentError: a name twice, a parameter without a name, or no optimizer.
    """
    if not hasattr(optimizer, "param_groups"):
        raise InvalidArgumentError(
            f"{type(optimizer).__name__} is not an optimizer", "pass one, such as torch.optim.SGD(...)"
        )
    parameters = [p for options in optimizer.param_groups for p in options["params"]]
    if named is None:
        return [(f"parameter {number}", p) for number, p in enumerate(parameters) if p.requires_grad]
    pairs = list(named)
    names = {name for name, _ in pairs}
    if len(names) < len(pairs):
        twice = sorted(name for name in names if [n for n, _ in pairs].count(name) > 1)
        raise InvalidArgumentError(f"parameters have the same name: {', '.join(twice)}", "give each its own name")
    wanted = {id(p) for p in parameters}
    unnamed = wanted - {id(p) for _, p in pairs}
    if unnamed:
        raise InvalidArgumentError(
            f"{len(unnamed)} parameters of the optimizer have no name", "pass named_parameters=model.named_parameters()"
        )
    return [(name, p) for name, p in pairs if id(p) in wanted and p.requires_grad]


class _DistributedOptimizer(torch.optim.Optimizer):
    """See DistributedOptimizer()."""

    _bps_synchronizer: GradientSynchronizer
    _bps_passes: int  # backward passes per step
    _bps_left: dict[Place, int]  # how many of them are still to come
    _bps_done: bool  # synchronize() has been called, and no gradient has become ready since
    _bps_skip: bool

    def _begin(self, synchronizer: GradientSynchronizer, passes: int) -> None:
        self._bps_synchronizer = synchronizer
        self._bps_passes = passes
        self._bps_left = dict.fromkeys(synchronizer.places, passes)
        self._bps_done = self._bps_skip = False
        hooks = [
            place.parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), place))  # type: ignore[no-untyped-call]
            for place in synchronizer.places
        ]
        # The parameters may outlive this optimizer, and get another one.
        weakref.finalize(self, remove_hooks, hooks)
        weakref.finalize(self, remove_hooks, synchronizer.hooks)

    def _arrived(self, place: Place) -> None:
        if self._bps_left[place] == 0:
            raise BpsError(
                f"{place.name!r} got a gradient again before step(), after {self._bps_passes} backward passes",
                "set backward_passes_per_step to the number of backward passes between steps",
            )
        self._bps_done = False
        self._bps_left[place] -= 1
        self._bps_synchronizer.accumulated(place, self._bps_left[place] > 0)
        if self._bps_left[place] == 0:
            self._bps_synchronizer.ready(place)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes make a step; between two steps."""
        self._bps_passes = passes
        self._bps_left = dict.fromkeys(self._bps_left, passes)
        self._bps_synchronizer.accumulate(passes > 1)

    def synchronize(self) -> None:
        """Waits until all gradients are means over the ranks. Every rank calls it, or step().

        Raises:
            PeerLostError: a rank was lost. DeadlineError: a rank did not send its gradients in time; names it.
        """
        self._bps_synchronizer.begin()
        try:
            self._bps_synchronizer.finish()
        finally:
            self._bps_left = dict.fromkeys(self._bps_left, self._bps_passes)
        self._bps_done = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this context step() does not synchronise: use it after synchronize()."""
        self._bps_skip = True
        try:
            yield
        finally:
            self._bps_skip = False

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Synchronises, then steps. With a closure: after each call of it, and its loss is the mean over the ranks."""
        if closure is None:
            self._synchronize_once()
            with spans().around("optimizer"):
                return super().step(**options)

        def synchronized() -> Any:
            loss = closure()
            self._synchronize_once()
            return self._mean(loss)

        return super().step(synchronized, **options)

    def _synchronize_once(self) -> None:
        if not self._bps_skip and not self._bps_done:
            self.synchronize()
        self._bps_done = False

    def _mean(self, loss: Any) -> Any:
        """The mean loss: an optimizer that compares losses must get the same on all ranks, or they take other paths."""
        sent = self._bps_synchronizer.sent
        if isinstance(loss, float):
            return self._mean(torch.tensor(loss, dtype=torch.float64, device="cpu")).item()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return loss
        name = f"{sent.prefix}.loss.{loss.dtype}"
        options = Options(ReduceOp.average, name, 0, sent.group, None, True)
        return transfer.all_reduce(loss.detach().clone(memory_format=torch.contiguous_format), options).wait()

    def compression_state_dict(self) -> dict[str, Any]:
        """What compression remembers between steps on this rank: save it beside state_dict(), each rank its own.

        A collective call between steps: every rank must make it, which is why it is not a part of state_dict(). See
        bps_rdma.feedback_state().
        """
        return self._bps_synchronizer.compression_state()

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what compression_state_dict() gave on this rank. A collective call, before the first step.

        Raises:
            InvalidArgumentError: it is the state of other parameters, or of another compression.
        """
        self._bps_synchronizer.load_compression_state(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As usual, but refused between backward() and step(), while gradients are being synchronised."""
        was_open = self._bps_synchronizer.open
        if self._bps_synchronizer.begin_again():
            if was_open:
                self._bps_left = dict.fromkeys(self._bps_left, self._bps_passes)
        else:
            raise BpsError(
                "zero_grad() was called between backward() and step(), while gradients are being synchronised",
                "call step() or synchronize() first",
            )
        super().zero_grad(set_to_none)


def _hook(optimizer: weakref.ref[_DistributedOptimizer], place: Place) -> Callable[[torch.Tensor], None]:
    def arrived(_: torch.Tensor) -> None:
        alive = optimizer()
        if alive is not None:
            alive._arrived(place)

    return arrived
