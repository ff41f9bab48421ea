# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors by the core's own route, without CUDA: tensors whose memory is that of the fake driver."""

from typing import Any

import gpu_arrays
import harness
import numpy as np
import pytest
import torch
from gpu_arrays import GpuArray, Kernel, fake
from reference.values import pushed, summed

import bps_rdma.torch

COUNT = 50_000


class Tensor(torch.Tensor):
    """A tensor that says that it is on a GPU, and has its memory there."""

    is_cuda = property(lambda _: True)  # type: ignore[assignment]
    is_cpu = property(lambda _: False)  # type: ignore[assignment]
    on: GpuArray

    def data_ptr(self) -> int:
        return self.on.address

    def untyped_storage(self) -> Any:
        return Storage(self.on)


class Storage:
    """That of such a tensor."""

    def __init__(self, on: GpuArray) -> None:
        self._on = on

    def data_ptr(self) -> int:
        return self._on.address

    def nbytes(self) -> int:
        return self._on.nbytes


class Stream:
    """What torch.cuda.current_stream() gives."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number


def tensor_on(array: GpuArray, dtype: torch.dtype) -> Tensor:
    made = torch.empty(array.nbytes // dtype.itemsize, dtype=dtype).as_subclass(Tensor)
    made.on = array
    return made


@harness.on_ranks("transport", workers=2, env=gpu_arrays.env)
def test_sums_in_the_order_of_streams(bps: Any) -> None:
    stream = fake().fake_stream()
    torch.cuda.current_stream = lambda _: Stream(stream)
    array = gpu_arrays.of(pushed(COUNT, "float32", bps.rank()))
    tensor = tensor_on(array, torch.float32)
    version = tensor._version
    assert bps.push_pull_inplace(tensor, average=False, name="x") is tensor
    assert np.array_equal(array.read(), summed(COUNT, "float32", range(bps.size())))
    assert tensor._version > version, "autograd knows"
    array.stream = stream
    kernel = Kernel(array, 1)
    halves = tensor_on(array, torch.bfloat16)
    handle = bps.push_pull_async_inplace(halves, average=False, name="halves")
    assert not handle.done()
    kernel.let_go()
    handle.wait()
    both = torch.full((1,), 0x0101, dtype=torch.int16).view(torch.bfloat16) * bps.size()
    assert (array.read().view(np.int16) == both.view(torch.int16).item()).all()
    array.write(pushed(COUNT, "float32", bps.rank()))
    prepared = bps_rdma.torch.prepare("push_pull", tensor, "prepared", average=False)
    for times in (1, bps.size()):
        assert prepared() is tensor
        assert np.array_equal(array.read(), times * summed(COUNT, "float32", range(bps.size())))
    tensor.on = GpuArray(COUNT)  # as after `tensor.data = other`
    with pytest.raises(bps.InvalidArgumentError, match="other memory"):
        prepared()


@harness.on_ranks(
    "transport", workers=2, env=lambda: gpu_arrays.env() | {"BPS_GPU_CHUNK_BYTES": "4096"}
)  # of no staging
def test_what_compression_remembers(bps: Any) -> None:
    """What compression remembers of a CUDA tensor is one state, as in CPU memory."""
    torch.cuda.current_stream = lambda _: Stream(1)
    values = np.random.default_rng(bps.rank()).standard_normal(COUNT).astype(np.float32)
    array = gpu_arrays.of(values)
    tensor, host, how = (
        tensor_on(array, torch.float32),
        torch.from_numpy(values),
        bps.Int8(feedback=True, everywhere=True),
    )
    found = []
    for one, name in ((tensor, "on GPU"), (host, "on CPU")):
        bps_rdma.torch.prepare("push_pull", one, name, compression=how)()
        state = bps_rdma.torch.feedback_state(one, name)
        bps_rdma.torch.load_feedback_state(one, name, state)
        bps_rdma.torch.prepare("push_pull", one, name, compression=how)()
        found.append(state)
    assert found[0].keys() == found[1].keys() == {"residual", "servers", "saved_by"}
    for key, value in found[0].items():
        if key == "saved_by":
            continue
        assert value.any()
        assert torch.equal(value, found[1][key])
    assert np.array_equal(array.read(), values)
