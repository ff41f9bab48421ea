# SPDX-License-Identifier: Apache-2.0
"""Arguments behind the tensor and the name, which are keywords, but which older programs pass by position.

BytePS's order is (tensor, average, name, ...), and Horovod's of a broadcast (tensor, root, name). They are understood
for one more release, with a DeprecationWarning.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack  # noqa: PLC0414  # whose users import it from here
else:
    try:
        from typing import Unpack
    except ImportError:  # Python 3.10

        class Unpack:
            """For typing.get_type_hints()."""

            def __class_getitem__(cls, keywords: Any) -> Any:
                return keywords


P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def keywords_of(documented: Callable[..., Any], **types: str) -> Callable[[F], F]:
    """Shows what a function takes as **options as the keywords of another one: in help() and on the site.

    Args:
        documented: the function whose docstring tells of these keywords.
        types: those of keywords that are of another type here.
    """
    keywords = {
        name: one.replace(annotation=types.get(name, one.annotation))
        for name, one in inspect.signature(documented).parameters.items()
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    }

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        kept = {n: p for n, p in own.parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
        function.__signature__ = own.replace(parameters=[*(kept | keywords | kept).values()])  # type: ignore[attr-defined]
        return function

    return decorate


def keywords_since(*old: str, leading: int = 1, named: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Lets a function whose other arguments are keywords take them in the order that they had, with a warning.

    Args:
        old: the names of the arguments behind the leading ones, in that order.
        leading: how many come first by position, now as ever.
        named: the next one by position is the name now; then a value that is no text has its place in the old order.
    """
    most = leading + named

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> R:
            if len(args) < most or (len(args) == most and (not named or isinstance(args[leading], str))):
                return function(*args, **keywords)
            return function(*args[:leading], **_named(function.__name__, old, args[leading:], keywords))

        return call

    return decorate


def _named(function: str, old: tuple[str, ...], values: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    if len(values) > len(old):
        _refuse(f"{function}() takes at most {len(old)} arguments behind the first, but got {len(values)}")
    if len(values) == 1 and values[0] is None and (old[0] != "average" or keywords.keys() & {"average", "op"}):
        return {"name": None} | keywords  # else it may be meant as average=None, which is refused
    # A value that can only be the name is taken for it; whoever needs a name refuses it then.
    is_nameless = "name" in old and "name" not in keywords
    if len(values) == 1 and is_nameless and (old[0] in keywords or isinstance(values[0], bytes)):
        return {"name": values[0]} | keywords
    given = dict(zip(old, values, strict=False))
    if both := given.keys() & keywords.keys():
        _refuse(f"{function}() got multiple values for argument {min(both)!r}")
    if others := [name for name in given if name != "name"]:
        warnings.warn(
            f"{function}(): the next release takes {', '.join(others)} as keywords only: "
            f"{', '.join(f'{name}=...' for name in others)}",
            DeprecationWarning,
            stacklevel=level_of_caller(),
        )
    return given | keywords


def level_of_caller() -> int:
    """The `stacklevel` with which a warning of the function that calls this is one of the program's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith("bps_rdma."):
        frame, level = frame.f_back, level + 1
    return level


def _refuse(text: str) -> NoReturn:
    raise TypeError(text)
