# SPDX-License-Identifier: Apache-2.0
"""bps_rdma.torch offers all of bps_rdma, under the same names, with the same keywords and defaults."""

import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import pytest
import torch

import bps_rdma
import bps_rdma.torch

# Name -> what the torch face lacks of it, and why. There is nothing at present.
EXCEPTIONS: dict[str, str] = {}


def parameters(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Name -> (kind, default). What a call operates on comes first by position and may be called otherwise."""
    found = list(inspect.signature(function).parameters.values())
    renamed = {"array": "tensor", "arrays": "tensors"}
    return {renamed.get(one.name, one.name): (one.kind, one.default) for one in found}


def methods(kind: type) -> dict[str, Callable[..., Any]]:
    own = {name: value for name, value in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
    return own | {"__init__": kind.__init__}  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(set(bps_rdma.__all__) - set(EXCEPTIONS)))
def test_the_torch_face_has_all_of_it(name: str) -> None:
    core = getattr(bps_rdma, name)
    assert name in bps_rdma.torch.__all__
    face = getattr(bps_rdma.torch, name)
    if face is core:
        return
    assert not (inspect.isclass(core) and issubclass(core, BaseException)), "an error is one class in both faces"
    if inspect.isclass(core):
        assert issubclass(face, core)
        pairs = [(method, methods(face)[method]) for method in methods(core).values() for method in [method.__name__]]
        for method, found in pairs:
            assert parameters(methods(core)[method]).items() <= parameters(found).items(), method
    else:
        assert parameters(core).items() <= parameters(face).items()


def test_there_are_no_exceptions_for_what_is_there() -> None:
    assert not [name for name in EXCEPTIONS if hasattr(bps_rdma.torch, name)]


OPERATIONS = [
    name
    for name in bps_rdma.__all__
    if inspect.isfunction(getattr(bps_rdma, name))
    and "timeout" in inspect.signature(getattr(bps_rdma, name)).parameters
    and name not in ("barrier", "commit", "shutdown")
]


@pytest.mark.parametrize("face", ["bps_rdma", "bps_rdma.torch"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_behind_the_tensor_and_the_name_there_are_keywords(face: str, name: str) -> None:
    found = inspect.signature(getattr(importlib.import_module(face), name)).parameters
    positional = [one.name for one in found.values() if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    before = {"prepare": 2}.get(name, 1)
    assert positional[before] == "name"
    assert len(positional) == before + (2 if name == "load_feedback_state" else 1)
    assert {"op", "average"} & set(found) in (set(), {"op", "average"})


@pytest.mark.parametrize("face", ["bps_rdma", "bps_rdma.torch"])
def test_the_order_of_older_programs_is_understood(face: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """BytePS's push_pull(tensor, average, name, version, priority), Horovod's broadcast(tensor, root, name)."""
    found = importlib.import_module(face)
    seen: dict[str, Any] = {}

    def called(name: str, /, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        """Calls the wrapper of a function with another function inside."""
        wrapper = of_order = getattr(found, name)
        while hasattr(of_order.__wrapped__, "__wrapped__"):  # a handle is given up by another wrapper, around that one
            of_order = of_order.__wrapped__
        inside = of_order.__wrapped__

        def take(*args: Any, **kw: Any) -> None:
            seen.clear()
            seen.update(inspect.signature(inside).bind(*args, **kw).arguments)

        cell = next(each for each in of_order.__closure__ if each.cell_contents is inside)
        monkeypatch.setattr(cell, "cell_contents", take)
        take.__name__ = name
        try:
            wrapper(*arguments, **keywords)
        finally:
            monkeypatch.undo()
        return {key: value for key, value in seen.items() if key not in ("array", "tensor", "delta", "like")}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert called("push_pull", 0, "w", average=False) == {"name": "w", "average": False}
        assert called("push_pull", 0) == {}
        assert called("broadcast", 0, "w", root=1) == {"name": "w", "root": 1}
        assert called("all_gather", 0, None) == {"name": None}
        assert called("broadcast", 0, None, root=1) == {"name": None, "root": 1}
        assert called("push_pull", 0, None, op="max") == {"name": None, "op": "max"}
        assert called("push_pull_inplace", 0, None, average=False) == {"name": None, "average": False}
        assert called("reduce_scatter", 0, None, average=False) == {"name": None, "average": False}
        assert called("prepare", "push_pull", 0, None, op="sum") == {"kind": "push_pull", "name": None, "op": "sum"}
    for name in ("push_pull", "push_pull_inplace", "push_pull_async", "push_pull_async_inplace"):
        with pytest.warns(DeprecationWarning, match="average=..., version=..., priority=..."):
            assert called(name, 0, False, "w", 3, 4) == {"average": False, "name": "w", "version": 3, "priority": 4}
        with pytest.warns(DeprecationWarning, match=f"{name}.*takes average as keywords only"):
            assert called(name, 0, False, name="w") == {"average": False, "name": "w"}
    with pytest.warns(DeprecationWarning, match="average"):  # which the function then refuses: once it meant a sum
        assert called("push_pull", 0, None) == {"average": None}
    with pytest.warns(DeprecationWarning, match="root"):
        assert called("broadcast", 0, 1, "w") == {"root": 1, "name": "w"}
    with pytest.warns(DeprecationWarning, match="root"):
        assert called("store", 0, 1, "w") == {"root": 1, "name": "w"}
    with pytest.warns(DeprecationWarning, match="out"):
        assert called("accumulate", 0, "w", 5) == {"name": "w", "out": 5}
    with pytest.warns(DeprecationWarning, match="average"):
        assert called("prepare", "push_pull", 0, False, "w") == {"kind": "push_pull", "average": False, "name": "w"}
    with pytest.raises(TypeError, match="multiple values for argument 'name'"):
        called("push_pull", 0, False, "w", name="x")
    with pytest.raises(TypeError, match="at most"):
        called("push", 0, "w", True, 0, None, 1)


@harness.on_ranks(workers=1)
def test_operations_take_the_keywords_that_they_show(bps: Any) -> None:
    """Python names the first one that a function does not know: one that is here by no means, behind all of its own."""
    for face, make in (bps_rdma, np.ones), (bps_rdma.torch, torch.ones):
        for name in OPERATIONS:
            function = getattr(face, name)
            x = make(4)
            leading = ["push_pull", x] if name == "prepare" else [[x]] if "many" in name else [x]
            given = {
                one.name: {"out": x}.get(one.name, 0) if one.default is one.empty else one.default
                for one in inspect.signature(function).parameters.values()
                if one.kind is one.KEYWORD_ONLY
            }
            called = rf"{name.removesuffix('_async')}(_async)?\(\)"
            with pytest.raises(TypeError, match=rf"^{called} got an unexpected keyword argument 'unheard_of'"):
                function(*leading, "x", **given, unheard_of=3)
