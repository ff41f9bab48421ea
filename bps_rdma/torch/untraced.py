# SPDX-License-Identifier: Apache-2.0
"""Keeps torch.compile out of the functions of this package: the compiler breaks its graph at their calls.

Their operations run outside of any graph, so there is nothing to gain from tracing them, and the compiler does not
understand process groups that are written in Python. torch.compiler.disable() says the same for one function, but
imports the whole compiler, which takes longer than the import of this package.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_Mark = Callable[[types.CodeType], Any]


def leave_untraced(package: str) -> None:
    """Keeps torch.compile out of all functions and methods of the modules of `package` that have been imported.

    It uses functions of torch that are not documented. With a torch that has others, the package works as ever, and the
    compiler stops at calls from compiled code only.
    """
    mark = _marker()
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for function in _functions_of(module, name):
                function._torchdynamo_disable = True  # type: ignore[attr-defined]  # a call from compiled code
                try:
                    _skip(function.__code__, mark)  # a call from Python while compiled code is running
                except (TypeError, ValueError, RuntimeError):
                    mark = _leave


def _functions_of(owner: Any, module: str) -> Iterator[types.FunctionType]:
    for member in list(vars(owner).values()):
        found = inspect.unwrap(member) if callable(member) else member
        if isinstance(found, property):
            yield from (one for one in (found.fget, found.fset) if isinstance(one, types.FunctionType))
        elif isinstance(found, staticmethod | classmethod):
            if isinstance(found.__func__, types.FunctionType):
                yield found.__func__
        elif isinstance(found, types.FunctionType):
            if found.__module__ == module:
                yield found
                if isinstance(member, types.FunctionType) and member is not found:  # a wrapper of it
                    yield member
        elif inspect.isclass(found) and found.__module__ == module and found is not owner:
            yield from _functions_of(found, module)


def _marker() -> _Mark:
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    try:
        only_this = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        strategy = frames.set_code_exec_strategy
    except (AttributeError, TypeError):
        found: _Mark = getattr(frames, "skip_code", _leave)  # torch before 2.7
        return found
    return lambda code: strategy(code, only_this)


def _leave(code: types.CodeType) -> None:
    """Marks nothing."""


def _skip(code: types.CodeType, mark: _Mark) -> None:
    mark(code)
    for constant in code.co_consts:  # functions that it defines
        if isinstance(constant, types.CodeType):
            _skip(constant, mark)
