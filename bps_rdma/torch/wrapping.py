# SPDX-License-Identifier: Apache-2.0
"""Shared by the wrappers of optimizers: another base class without a copy of the state, and steps of GradScaler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from bps_rdma.errors import InvalidArgumentError

T = TypeVar("T")


def rebase(optimizer: torch.optim.Optimizer, methods: type[T]) -> T:
    """The same optimizer, with other methods: state, param_groups and hooks are those of `optimizer`, not copies.

    Learning-rate schedulers may have been made with either of the two. The result is an instance of `methods` and of
    the optimizer's own class.

    Raises:
        InvalidArgumentError: the optimizer has these methods already.
    """
    own = type(optimizer)
    if issubclass(own, methods):
        raise InvalidArgumentError(f"this {own.__name__} is distributed already", "wrap an optimizer once")
    rebased: Any = new_instance(methods, own)
    # Schedulers wrap the step() of the instance; that of the new class must be found instead.
    optimizer.__dict__.pop("step", None)
    rebased.__dict__ = optimizer.__dict__
    return rebased  # type: ignore[no-any-return]


def new_instance(methods: type, own: type) -> Any:
    """An empty optimizer of the class that rebase() makes of these two."""
    about = {"__doc__": methods.__doc__, "__module__": own.__module__, "_bps_made_of": (methods, own)}
    kind: Any = type(own.__name__, (methods, own), about)
    return kind.__new__(kind)


def remove_hooks(hooks: Iterable[Any]) -> None:
    """Removes hooks, given what their registration returned."""
    for hook in hooks:
        hook.remove()


def scaled_step(asked: Any, step: Callable[[], Any], parameters: Iterable[torch.Tensor]) -> Any:
    """Makes the step under torch's GradScaler, with gradients without their scale; no step where an infinity was found.

    The scaler leaves the step of an ordinary optimizer out. Ranks that train alone and count their steps would then
    meet in different ones. The scaler calls an optimizer with `_step_supports_amp_scaling` in any case, and that one
    finds `grad_scale` and `found_inf` among its attributes.

    Args:
        asked: what the scaler called.
        step: makes the step.
        parameters: whose gradients are used.
    """
    own = asked.__dict__
    given = {name: own.pop(name) for name in _OF_SCALER if name in own}  # some step() refuse them
    found, scale = given.get("found_inf"), given.get("grad_scale")
    result, divided = None, list[tuple[torch.Tensor, torch.Tensor | None]]()
    if found is None or not bool(found):
        try:
            for parameter in parameters:
                gradient = parameter.grad
                if scale is not None and gradient is not None:
                    kept = gradient.clone() if gradient.dtype.itemsize < _BYTES_OF_ALL_SCALES else None
                    gradient.div_(scale.to(gradient.device))
                    divided.append((gradient, kept))
            result = step()
        except BaseException:  # the script may call the scaler once more, which gives the scale once more
            for gradient, kept in divided:
                if kept is None:
                    gradient.mul_(given["grad_scale"].to(gradient.device))
                else:
                    gradient.copy_(kept)
            raise
    own.update(given)  # the scaler deletes them
    return result


_BYTES_OF_ALL_SCALES = 4  # in shorter dtypes a gradient may be too small without its scale
_OF_SCALER = ("grad_scale", "found_inf")  # attributes that torch's GradScaler gives an optimizer before its step()


@contextlib.contextmanager
def forgetting_scale(optimizer: Any) -> Iterator[None]:
    """Around a step(): where that raises something, the optimizer has nothing of torch's GradScaler afterwards.

    The scaler itself deletes it after a step() that returns only, and multiplies the next scale by one that is left.
    """
    try:
        yield
    except BaseException:
        for name in _OF_SCALER:
            optimizer.__dict__.pop(name, None)
        raise
