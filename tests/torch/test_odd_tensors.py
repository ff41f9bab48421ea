# SPDX-License-Identifier: Apache-2.0
"""Tensors that are not what they seem: an operation gives the right numbers, or says what is wrong."""

from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist

import bps_rdma.torch as bps_torch


def each_form(bps: Any) -> list[Any]:
    return [bps.push_pull_inplace, bps_torch.push_pull, bps_torch.push_pull_inplace, bps_torch.push_pull_async]


@harness.on_ranks(workers=1)
def test_tensors_without_memory_are_refused(bps: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    given_back = torch.ones(1000)
    given_back.untyped_storage().resize_(0)  # as FSDP does with parameters that it has gathered
    shrunk = torch.ones(1000)
    shrunk.untyped_storage().resize_(100)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sharded = distribute_tensor(torch.arange(4.0), DeviceMesh("cpu", [0]), [Shard(0)])
    for tensor in (given_back, shrunk, sharded):
        for call in each_form(bps):
            with pytest.raises(bps.InvalidTensorError, match="no memory with its values"):
                call(tensor)
    empty = torch.empty(0)
    assert bps_torch.push_pull(empty).shape == (0,)


@harness.on_ranks(workers=2)
def test_views_with_another_sign_are_refused(bps: Any) -> None:
    minus_two = torch.tensor([1 + 2j]).conj().imag  # its memory holds 2
    assert minus_two.is_contiguous()
    for call in each_form(bps):
        with pytest.raises(bps.InvalidTensorError, match=r"resolve_neg\(\)"):
            call(minus_two)
    assert bps_torch.push_pull(minus_two.resolve_neg(), average=False).tolist() == [-2.0 * bps.size()]


def fails(product: torch.Tensor) -> bool:
    try:
        product.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


@harness.on_ranks(workers=2)
def test_autograd_sees_that_a_saved_tensor_has_changed(bps: Any) -> None:
    """Backward would multiply by what is in the tensor by then."""
    forms = {
        "bps_torch.push_pull_inplace": bps_torch.push_pull_inplace,
        "bps_torch.push_pull_async_inplace": lambda x: bps_torch.push_pull_async_inplace(x).wait(),
        "bps.push_pull_inplace": bps.push_pull_inplace,
        "bps.push_pull_async_inplace": lambda x: bps.push_pull_async_inplace(x).wait(),
        "bps.broadcast": bps.broadcast,
        "bps.broadcast_async": lambda x: bps.broadcast_async(x).wait(),
        "bps.all_gather": lambda x: bps.all_gather(torch.ones(2), out=x),
        "bps.all_gather_async": lambda x: bps.all_gather_async(torch.ones(2), out=x).wait(),
        "bps.reduce_scatter": lambda x: bps.reduce_scatter(torch.ones(4 * bps.size()), out=x),
        "bps.reduce_scatter_async": lambda x: bps.reduce_scatter_async(torch.ones(4 * bps.size()), out=x).wait(),
        "bps.pull": lambda x: (bps.push(torch.ones(4), name="half"), bps.pull(x, name="half")),
    }
    for form, change in forms.items():
        factor = torch.full((4,), float(bps.rank()))
        weight = torch.ones(4, requires_grad=True)
        product = (weight * factor).sum()
        change(factor)
        assert fails(product), form
    with torch.inference_mode():
        assert bps_torch.push_pull_inplace(torch.ones(3), average=False).tolist() == [2, 2, 2]


@harness.on_ranks(workers=2)
def test_views(bps: Any) -> None:
    """What else programs pass: parameters, views of larger memory, strides of length one, no dimension, no element."""
    rank = bps.rank()
    memory = torch.arange(12.0) + rank
    expected = 2 * torch.arange(12.0) + 1
    for view in (memory[4:8], memory.view(3, 4)[1:2], memory.view(3, 4)[2].unsqueeze(0).expand(1, 4)):
        place = view.storage_offset()
        assert torch.equal(bps_torch.push_pull(view, average=False).flatten(), expected[place : place + view.numel()])
    assert torch.equal(memory, torch.arange(12.0) + rank), "out of place"
    assert bps_torch.push_pull_inplace(memory[4:8], average=False).tolist() == expected[4:8].tolist()
    assert torch.equal(memory[:4], torch.arange(4.0) + rank)
    assert torch.equal(memory[8:], torch.arange(8.0, 12.0) + rank)
    for holes in (memory.view(3, 4).t(), memory[::2], torch.ones(3).expand(4, 3)):
        with pytest.raises(bps.InvalidTensorError, match="contiguous"):
            bps_torch.push_pull(holes)
