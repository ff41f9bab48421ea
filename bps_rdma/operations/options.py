# SPDX-License-Identifier: Apache-2.0
"""The options of one operation as one value that passes through all layers, and how callers write them."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypedDict

from bps_rdma import _core, argument_types
from bps_rdma.compression import Compression
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.group import Group
from bps_rdma.positions import level_of_caller

ReduceOp = _core.ReduceOp
ReduceName = Literal["sum", "average", "min", "max", "product"]
AnyCompression = Compression | str | Mapping[str, Any]  # callers may pass any of these as `compression`
SUM, AVERAGE = ReduceOp.sum, ReduceOp.average  # looked up once: an attribute of an enum costs a call


class OperationOptions(NamedTuple):  # immutable like a frozen dataclass, and made in a third of its time
    """The options of one operation.

    Attributes:
        op: the reduction; ignored by operations that only move data.
        name: identifies the tensor on all ranks. None: calls are matched by their order per kind, dtype and size.
        priority: operations with a higher priority are sent first.
        group: the ranks that take part; None: all workers.
        timeout: seconds until the operation fails with DeadlineError; None: BPS_TIMEOUT.
        awaited: the caller waits for the operation next, so the calling thread may drive it.
        compression: how the tensor travels between hosts, or that its sums are exact; None: as the name was declared,
            or BPS_COMPRESSION and BPS_EXACT say.
    """

    op: ReduceOp = SUM
    name: str | None = None
    priority: int = 0
    group: Group | None = None
    timeout: float | None = None
    awaited: bool = False
    compression: str | None = None


of_values = OperationOptions._make  # takes two thirds of the time of the class


class Moving(TypedDict, total=False):
    """Keywords of every operation; push_pull_inplace() says what they mean."""

    priority: int
    group: Group | None
    timeout: float | None


class Reduction(TypedDict, total=False):
    """Keywords that only sums and the like have."""

    average: bool
    op: ReduceName | None
    compression: AnyCompression | None
    exact: bool | None


class Reducing(Moving, Reduction, total=False):
    """Keywords of an operation that reduces."""


class PushPulling(Reducing, total=False):
    """Keywords of push_pull() in its four forms."""

    version: int


def moving(
    name: str | None,
    awaited: bool,
    /,
    *,
    priority: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
    **unknown: Any,
) -> OperationOptions:
    """The options of an operation that only moves data, from the keywords of its call; called by the operation."""
    if unknown:
        raise _unexpected(unknown)
    return OperationOptions(SUM, name, priority, group, timeout, awaited)


def reducing(
    name: str | None,
    awaited: bool,
    /,
    *,
    average: bool = True,
    op: ReduceName | None = None,
    priority: int = 0,
    group: Group | None = None,
    timeout: float | None = None,
    compression: AnyCompression | None = None,
    exact: bool | None = None,
    **unknown: Any,
) -> OperationOptions:
    """The options of an operation that reduces, from the keywords of its call; called by the operation.

    Calls that ask for nothing special take few steps. After a wait the processor's caches have lost them, so that each
    step of a short call costs several times what a loop without waits shows.
    """
    if unknown:
        raise _unexpected(unknown)
    return of_values((reduction(average, op), name, priority, group, timeout, awaited, text_of(compression, exact)))


def _unexpected(keywords: Mapping[str, Any]) -> TypeError:
    """The error of Python for the operation that has passed its keywords on."""
    operation = sys._getframe(2).f_code.co_name
    return TypeError(f"{operation}() got an unexpected keyword argument {next(iter(keywords))!r}")


def reduction(average: bool, op: ReduceName | None) -> ReduceOp:
    """The reduction that the public arguments `average` and `op` select; `op` wins.

    Raises:
        InvalidArgumentError: `op` is not the name of a reduction, or `average` is no truth value.
    """
    if op is None:
        return AVERAGE if average is True or argument_types.truth("average", average) else SUM
    found = ReduceOp.__members__.get(op) if isinstance(op, str) else None
    if found is None:
        raise InvalidArgumentError(f"{op!r} is not a reduction", f"use one of {', '.join(ReduceOp.__members__)}")
    return found


NONE = "none"  # BPS_COMPRESSION and BPS_EXACT do not count
EXACT = "exact"  # not compressed at all: sums are exact, and rounded once
EXACT_TO_ODD = "exact:to_odd"  # exact sums in float64, for callers that round them again

_TRUE, _FALSE = ("1", "true"), ("0", "false", "none", "")


def text_of(compression: AnyCompression | None, exact: bool | None = None) -> str | None:
    """The text for the core; None: as the name was declared, or BPS_COMPRESSION and BPS_EXACT say.

    Raises:
        InvalidArgumentError: `compression` is no Compression, text or dict of BytePS's parameters, or has unknown keys;
            or a sum is to be both compressed and exact.
    """
    if compression is None and exact is None:
        return None
    if exact is not None:
        exact = argument_types.truth("exact", exact)
        text = compression_text(compression)
        if exact and text not in (None, NONE, EXACT):
            raise InvalidArgumentError("what is compressed is not exact", "pass `compression` or exact=True, not both")
        return EXACT if exact else text or NONE
    return compression_text(compression)


def compression_text(compression: AnyCompression | None) -> str | None:
    """The text of what callers pass as `compression`; see text_of()."""
    if compression is None:
        return None
    if isinstance(compression, Compression):
        return compression.text
    if isinstance(compression, str):
        _tell_of_objects(compression)
        return compression
    if isinstance(compression, Mapping):
        return _from_byteps(compression)
    raise InvalidArgumentError(
        f"compression={compression!r} says nothing of how to compress",
        "pass an object such as bps_rdma.Int8(feedback=True)",
    )


def _tell_of_objects(text: str) -> None:
    """Warns a program that passes what is for settings."""
    try:
        advice = _advice_for(text)
    except InvalidArgumentError:
        return  # the core refuses it, and says what there is
    warnings.warn(advice, DeprecationWarning, stacklevel=level_of_caller())


@functools.cache  # loops pass the same text again and again
def _advice_for(text: str) -> str:
    wanted = "exact=True" if text == EXACT else f"compression={Compression.from_text(text).spelled}"
    return f"compression={text!r} is how settings say it; a program passes {wanted}"


def _flag(value: Any) -> str:
    text = str(value).lower()
    if text in _TRUE or text in _FALSE:
        return str(int(text in _TRUE))
    raise InvalidArgumentError(f"{value!r} is neither true nor false", "pass True or False")


def _one_of(*words: str) -> Callable[[Any], str]:
    """BytePS's clients write words, and its core numbers."""
    meanings = {str(i): word for i, word in enumerate(words)} | {word: word for word in words}

    def meaning(value: Any) -> str:
        if str(value) not in meanings:
            raise InvalidArgumentError(f"{value!r} is none of {', '.join(words)}", "pass one of them")
        return meanings[str(value)]

    return meaning


_METHOD = "byteps_compressor_type"
_KEYS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "byteps_compressor_onebit_scaling": ("scaling", _flag),
    "byteps_compressor_k": ("k", str),
    "byteps_seed": ("seed", str),
    "byteps_dithering_partition": ("partition", _one_of("linear", "natural")),
    "byteps_dithering_normalize": ("normalize", _one_of("max", "l2")),
}


def _from_byteps(parameters: Mapping[str, Any]) -> str:
    """BytePS's parameters of one tensor, as its declare calls take them."""
    left = {key: value for key, value in parameters.items() if value is not None}
    method = str(left.pop(_METHOD, ""))
    if not method:
        raise InvalidArgumentError(f"compression={dict(parameters)!r} names no method", f"give {_METHOD!r}")
    words = []
    for key, (ours, convert) in _KEYS.items():
        if key in left:
            words.append(f"{ours}={convert(left.pop(key))}")
    if _known(left.pop("byteps_error_feedback_type", None), "vanilla"):
        words.append("feedback=1")
    mu = left.pop("byteps_momentum_mu", 0.9)
    if _known(left.pop("byteps_momentum_type", None), "nesterov"):
        words.append(f"momentum={mu}")
    if left:
        known = ", ".join([_METHOD, *_KEYS, "byteps_error_feedback_type", "byteps_momentum_type", "byteps_momentum_mu"])
        raise InvalidArgumentError(f"compression has no parameter {next(iter(left))!r}", f"use {known}")
    return method + (":" + ",".join(words) if words else "")


def _known(value: Any, name: str) -> bool:
    if value is None or value is False:
        return False
    if value != name:
        raise InvalidArgumentError(f"{value!r} is not supported here", f"pass {name!r} or None")
    return True
