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
from collections.abc import Iterator
from typing import Any

import torch

_frames: Any = torch._C._dynamo.eval_frame


def leave_untraced(package: str) -> None:
    """Does so for all functions and methods of the modules of `package` that have been imported."""
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for function in _functions_of(module, name):
                function._torchdynamo_disable = True  # type: ignore[attr-defined]  # a call from compiled code
                _skip(function.__code__)  # a call from Python while compiled code is running


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
        elif inspect.isclass(found) and found.__module__ == module and found is not owner:
            yield from _functions_of(found, module)


def _skip(code: types.CodeType) -> None:
    if hasattr(_frames, "set_code_exec_strategy"):
        only_this = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
        _frames.set_code_exec_strategy(code, only_this)
    elif hasattr(_frames, "skip_code"):  # torch before 2.7
        _frames.skip_code(code)
    for constant in code.co_consts:  # functions that it defines
        if isinstance(constant, types.CodeType):
            _skip(constant)
