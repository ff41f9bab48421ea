"""Which block of memory an array lies in: told apart where addresses are not."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import bps_rdma
from bps_rdma import _core, arrays


@pytest.fixture
def gone():
    """The identities of blocks that are gone, as they go."""
    found: list[int] = []
    gc.collect()  # those of other tests
    _core.when_block_gone(found.append)
    return found


def identity(array):
    return arrays.describe(array, writable=True).block[2]


def test_one_array_and_its_views_are_one_block(gone):
    array = np.zeros((100, 10))
    seen = {identity(array), identity(array[3:5]), identity(array.reshape(-1)[17:]), identity(array.view(np.int64))}
    assert len(seen) == 1
    block = arrays.describe(array[50:], writable=True).block
    assert block[:2] == (array.__array_interface__["data"][0], array.nbytes)
    assert gone == []


def test_what_is_freed_is_told_and_its_address_is_another_block(gone):
    last, addresses = 0, set()
    for count in range(1, 20):
        array = np.zeros(1_000_000)
        addresses.add(array.__array_interface__["data"][0])
        assert identity(array) > last
        last = identity(array[1:])
        del array
        gc.collect()
        assert len(gone) == count
        assert gone[-1] == last
    assert len(addresses) < 19, "no address came twice, so nothing was shown"


def test_a_view_keeps_the_block(gone):
    array = np.zeros(1000)
    view = array[10:]
    first = identity(array)
    del array
    assert gone == []
    assert identity(view) == first
    del view
    assert gone == [first]


def test_an_array_that_is_known_cannot_be_moved(gone):
    array = np.zeros(1000)
    first = identity(array)
    with pytest.raises(ValueError, match="cannot resize"):  # numpy's rule for what is referred to weakly
        array.resize(2_000_000, refcheck=False)
    assert identity(array) == first


def test_buffers_have_a_block_per_use(gone):
    buffer = bytearray(1000)
    first, second = identity(buffer), identity(buffer)
    assert first != second
    assert gone == [first, second]


def test_a_tensor_and_its_views_are_one_block(gone):
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(1000)
    first = identity(tensor)
    assert identity(tensor[5:]) == first
    parameter = torch.nn.Parameter(tensor)
    view = tensor.view(10, 100)[3]
    del tensor
    gc.collect()
    assert identity(view) == first
    assert identity(parameter.data) == first
    assert gone == []
    del view, parameter
    assert gone == [first]


def test_a_storage_that_moved_is_another_block(gone):
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(1000)
    first = identity(tensor)
    tensor.untyped_storage().resize_(1 << 22)
    assert identity(tensor) > first
    assert gone == [first]


def test_memory_that_is_forgotten_is_another_block_in_the_same_place(gone):
    array = np.zeros(1000)
    first, other = identity(array), identity(np.ones(1000))
    bps_rdma.forget(array[10:20])
    assert first in gone
    assert identity(array) > max(first, other)
    bps_rdma.forget(np.zeros(3))  # never used: nothing to forget
