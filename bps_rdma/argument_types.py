# SPDX-License-Identifier: Apache-2.0
"""Names the argument of a refused call that has a wrong type.

The core checks the types of what it is called with, and refuses with the TypeError of its binding, which describes the
binding and not the caller's mistake. It is asked for only then, so that calls with proper arguments pay nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from bps_rdma.errors import InvalidArgumentError

_LARGEST = 2**31 - 1


def explain(*, name: object = None, priority: object = 0, timeout: object = None) -> None:
    """Raises InvalidArgumentError for the first of these that the core cannot use; without one it has no effect."""
    if name is not None:
        check_name(name)
    number = whole(priority)
    if number is None or not -_LARGEST <= number <= _LARGEST:
        raise InvalidArgumentError(
            f"priority={priority!r} is not a whole number of 32 bits", "pass a number; higher ones are sent first"
        )
    if timeout is not None and not _is_number(timeout):
        raise InvalidArgumentError(f"timeout={timeout!r} is not a number", "pass seconds, or float('inf') for no limit")


def check_name(name: object) -> None:
    """Raises InvalidArgumentError unless it is a text; None is none."""
    if not isinstance(name, str):
        text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        raise InvalidArgumentError(f"name={name!r} is not a text", f"pass name={text!r}, the same on all ranks")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"name={name!r} is not a text", "pass one without surrogates") from None


def _is_number(value: Any) -> bool:
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return False
    try:
        float(value)
    except (OverflowError, TypeError, ValueError):  # 10**400, or an array of several
        return False
    return True


def whole(value: object) -> int | None:
    """The whole number that `value` is, None if it is none: 2.0, "2" and True are none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def whole_numbers(name: str, values: object) -> list[int]:
    """The whole numbers in a list. Raises InvalidArgumentError if it is none."""
    found = [whole(value) for value in values] if isinstance(values, Iterable) else [None]
    numbers = [number for number in found if number is not None]
    if len(numbers) < len(found):
        raise InvalidArgumentError(
            f"{name}={values!r} is no list of whole numbers", "pass one for each rank of the group, as in [1, 3]"
        )
    return numbers


def check_root(root: object, ranks: Sequence[int], name: str = "root") -> int:
    """The rank that `root` is. Raises InvalidArgumentError unless it is one of `ranks`, those of the group."""
    rank = whole(root)
    if rank is None or rank not in ranks:
        raise InvalidArgumentError(
            f"{name}={root!r} is not in the group {tuple(ranks)}", "name a worker rank of the group"
        )
    return rank


def truth(name: str, value: object) -> bool:
    """The truth value of True, False, numpy's booleans, 1 or 0. Raises InvalidArgumentError for anything else."""
    try:
        known = value in (0, 1)
    except ValueError:  # an array of several elements
        known = False
    if not known:
        raise InvalidArgumentError(f"{name}={value!r} is neither True nor False", "pass one of them")
    return bool(value)


def extent_of(shape: object) -> tuple[int, ...]:
    """A shape as callers write it, a whole number or several, as a tuple.

    Raises:
        InvalidArgumentError: it is none, or has a negative length.
    """
    lengths = [whole(one) for one in shape] if isinstance(shape, Iterable) else [whole(shape)]
    extent = tuple(length for length in lengths if length is not None and length >= 0)
    if len(extent) < len(lengths):
        raise InvalidArgumentError(
            f"{shape!r} is not a shape", "pass a whole number from 0, or several, as in (1024, 1024)"
        )
    return extent
