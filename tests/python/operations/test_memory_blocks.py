# SPDX-License-Identifier: Apache-2.0
"""Which block of memory an array lies in: told apart where addresses are not."""

import gc

import numpy as np
import pytest

import bps_rdma
from bps_rdma import _core, arrays


def identity(array):
    return arrays.describe(array, writable=True).block[2]


def test_one_array_and_its_views_are_one_block():
    array = np.zeros((100, 10))
    seen = {identity(array), identity(array[3:5]), identity(array.reshape(-1)[17:]), identity(array.view(np.int64))}
    assert len(seen) == 1
    block = arrays.describe(array[50:], writable=True).block
    assert block[:2] == (array.__array_interface__["data"][0], array.nbytes)
    assert all(map(_core.knows_block, seen))


def test_a_freed_block_is_forgotten_and_its_address_is_another_block():
    last, addresses = 0, set()
    for _ in range(19):
        array = np.zeros(1_000_000)
        addresses.add(array.__array_interface__["data"][0])
        assert identity(array) > last
        last = identity(array[1:])
        assert _core.knows_block(last)
        del array
        gc.collect()
        assert not _core.knows_block(last)
    assert len(addresses) < 19, "no address came twice, so nothing was shown"


def test_a_view_keeps_the_block():
    array = np.zeros(1000)
    view = array[10:]
    first = identity(array)
    del array
    assert _core.knows_block(first)
    assert identity(view) == first
    del view
    assert not _core.knows_block(first)


def test_an_array_that_is_known_cannot_be_moved():
    array = np.zeros(1000)
    first = identity(array)
    with pytest.raises(ValueError, match="cannot resize"):  # numpy's rule for what is referred to weakly
        array.resize(2_000_000, refcheck=False)
    assert identity(array) == first


def test_buffers_have_a_block_per_use():
    buffer = bytearray(1000)
    first, second = identity(buffer), identity(buffer)
    assert first != second
    assert not _core.knows_block(first)
    assert not _core.knows_block(second)


def test_a_tensor_and_its_views_are_one_block():
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
    assert _core.knows_block(first)
    del view, parameter
    assert not _core.knows_block(first)


def test_a_storage_that_moved_is_another_block():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(1000)
    first = identity(tensor)
    tensor.untyped_storage().resize_(1 << 22)
    assert identity(tensor) > first
    assert not _core.knows_block(first)


def test_memory_that_is_forgotten_is_another_block_in_the_same_place():
    array = np.zeros(1000)
    first, other = identity(array), identity(np.ones(1000))
    bps_rdma.forget(array[10:20])
    assert not _core.knows_block(first)
    assert identity(array) > max(first, other)
    bps_rdma.forget(np.zeros(3))  # never used: nothing to forget
