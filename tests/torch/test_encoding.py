# SPDX-License-Identifier: Apache-2.0
"""Objects that are sent to other ranks: every type that is allowed, nothing else, and no code that comes with them."""

import collections
import contextlib
import datetime as dt
import enum
import io
import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bps_rdma.torch as bps_torch
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.torch.check_alike import all_gather_bytes
from bps_rdma.torch.encoding import Encoder, decode


def there_and_back(obj: Any, **options: bool) -> Any:
    file = io.BytesIO()
    Encoder(**options).write(obj, file)
    return decode(memoryview(file.getvalue()), 3, **options)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.builds(bytearray, st.binary()),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text(), st.integers()), inner)
        | st.sets(st.text() | st.integers() | st.binary())
        | st.frozensets(st.integers())
        | st.dictionaries(st.text(), inner).map(collections.OrderedDict)
    ),
    max_leaves=20,
)


def alike(one: Any, other: Any) -> bool:
    """Equal in types and values, with NaN equal to itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (one != one and other != other)
    if isinstance(one, complex):
        return alike(one.real, other.real) and alike(one.imag, other.imag)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return alike(list(one.items()), list(other.items()))
    return bool(one == other)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of an example: a machine may be busy
@given(values)
def test_values_come_back_as_they_were(obj):
    assert alike(there_and_back(obj), obj)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64,
                                   torch.float8_e4m3fn])  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 0, 3)])
def test_tensors(dtype, shape):
    tensor = (torch.arange(math.prod(shape)) % 7).reshape(shape).to(dtype)
    found = there_and_back({"it": [tensor]})["it"][0]
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
    turned = tensor.swapaxes(0, -1) if shape else tensor  # not contiguous
    assert there_and_back(turned).shape == turned.shape


def test_what_torch_and_numpy_have_besides():
    for obj in (torch.float16, torch.device("cpu"), torch.Size([2, 3])):
        found = there_and_back(obj)
        assert found == obj
        assert type(found) is type(obj)
    parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    found = there_and_back(parameter)
    assert type(found) is torch.nn.Parameter
    assert not found.requires_grad
    assert torch.equal(found, parameter)
    for array in (np.arange(6, dtype=">i4").reshape(2, 3).T, np.zeros((0, 2)), np.array("2026-01-01", "M8[D]"),
                  np.array(["a", "bc"]), np.array([True, False])):  # fmt: skip
        found = there_and_back(array)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)
        found[...] = found  # writable, as a copy of one's own
    for number in (np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("x")):
        found = there_and_back(number)
        assert found == number
        assert type(found) is type(number)


def test_a_state_dict_keeps_its_metadata():
    state = torch.nn.BatchNorm1d(3).state_dict()
    found = there_and_back(state)
    assert type(found) is collections.OrderedDict
    assert found._metadata == state._metadata
    torch.nn.BatchNorm1d(3).load_state_dict(found)


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "obj",
    [Colour.RED, Text("x"), Pair(1, 2), print, Colour, dt.timedelta(1), torch.nn.Linear(2, 2),
     np.array([object()]), collections.defaultdict(list), torch.ones(2).to_sparse(), np.zeros(2, "i4,f4")],
)  # fmt: skip
def test_other_types_are_named_and_refused(obj):
    kind = type(obj)
    with pytest.raises(InvalidArgumentError) as raised:
        there_and_back([{"a": obj}])
    assert f"{kind.__module__}.{kind.__qualname__}" in raised.value.message
    assert "allow_pickle=True" in raised.value.hint


def test_with_allow_pickle_other_types_come_back():
    found = there_and_back({"a": Pair(1, 2), "b": [dt.timedelta(1), 5]}, allow_pickle=True)
    assert found == {"a": Pair(1, 2), "b": [dt.timedelta(1), 5]}
    assert type(found["a"]) is Pair


def test_an_object_that_contains_itself_is_refused():
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidArgumentError, match="contains itself"):
        there_and_back(loop)


# ---- What a malicious member may send


class Evil:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {os.environ.get('EVIL', '/dev/null')}",)


def message(structure: Any, blobs: bytes = b"") -> memoryview:
    text = json.dumps(structure).encode()
    return memoryview(len(text).to_bytes(8, "little") + text + blobs)


def test_a_pickle_is_not_read_unless_that_is_allowed(tmp_path, monkeypatch):
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    blob = pickle.dumps(Evil())
    with pytest.raises(InvalidArgumentError, match=r"worker 2.* pickled"):
        decode(message({"pickle": [0, len(blob)]}, blob), 2)
    assert not (tmp_path / "evil").exists()
    decode(message({"pickle": [0, len(blob)]}, blob), 2, allow_pickle=True)
    assert (tmp_path / "evil").exists(), "the test would not notice"


@pytest.mark.parametrize(
    "structure",
    [
        {"system": "x"}, {}, {"tuple": [], "list": []}, {"tuple": 5}, {"bytes": [0, 100]}, {"bytes": [-1, 1]},
        {"bytes": [3, -1]}, {"bytes": ["a", 1]}, {"dtype": "load"}, {"dtype": "__class__"}, {"device": "nowhere"},
        {"ndarray": ["O", [1], [0, 8]]}, {"ndarray": ["i4,O", [1], [0, 8]]}, {"ndarray": ["f8", [100], [0, 8]]},
        {"ndarray": ["f8", [-1], [0, 8]]}, {"Tensor": ["float32", [1 << 40], "cpu", [0, 8]]},
        {"Tensor": ["float32", [3], "cpu", [0, 8]]}, {"Tensor": ["float32", [-2], "cpu", [0, 8]]},
        {"Tensor": ["Tensor", [2], "cpu", [0, 8]]}, {"Tensor": ["float32", [2.5], "cpu", [0, 8]]},
        {"set": [[1]]}, {"complex": ["x", 1]}, {"OrderedDict": [1, 2]}, {"dict": [[[1]], None]},
    ],
)  # fmt: skip
def test_malformed_messages_are_refused(structure):
    with pytest.raises(InvalidArgumentError, match="worker 7"):
        decode(message(structure, bytes(8)), 7)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of an example: a machine may be busy
@given(st.binary(max_size=100))
def test_any_bytes_are_read_or_refused(data):
    for text in (data, bytes(memoryview(len(data).to_bytes(8, "little"))) + data):
        with contextlib.suppress(InvalidArgumentError):
            decode(memoryview(text), 7)


def evil_member(bps: Any) -> str:
    """Rank 0 sends a pickle under the names of broadcast_object(), as the first version did."""
    if bps.rank() == 0:
        all_gather_bytes(lambda file: pickle.dump(Evil(), file), "broadcast_object x", None)
        return "sent"
    try:
        bps_torch.broadcast_object(None, name="x")
    except bps.BpsError as error:
        told = str(error)
    else:
        told = "nothing"
    return told


def test_a_member_cannot_run_code_on_another_one(tmp_path):
    found = harness.run(evil_member, workers=2, env={"EVIL": str(tmp_path / "evil")})
    assert "cannot be read" in found[1]
    assert not (tmp_path / "evil").exists()


@harness.on_ranks(workers=2, env={"BPS_SECRET": "", "BPS_INSECURE": "1"})
def test_a_job_without_a_secret_never_pickles(bps: Any) -> None:
    with pytest.raises(bps.InvalidArgumentError) as raised:
        bps_torch.broadcast_object(Path("x"), allow_pickle=True)
    assert "job without a secret" in str(raised.value)


def optimizer_with_an_object(bps: Any, allow_pickle: bool) -> str:
    optimizer = torch.optim.SGD([torch.zeros(3)], lr=0.1)
    optimizer.param_groups[0]["note"] = dt.timedelta(bps.rank() + 1)
    try:
        bps_torch.broadcast_optimizer_state(optimizer, allow_pickle=allow_pickle)
    except bps.InvalidArgumentError as error:
        return str(error)
    return repr(optimizer.param_groups[0]["note"].days)


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_optimizers_with_objects_of_other_classes(allow_pickle):
    found = harness.run(optimizer_with_an_object, allow_pickle, workers=2)
    if allow_pickle:
        assert found == ["1", "1"]
    else:
        assert all("datetime.timedelta cannot be sent" in told for told in found)
