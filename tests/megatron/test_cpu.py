# SPDX-License-Identifier: Apache-2.0
"""The example without a GPU on a build of torch with CUDA, on a machine without a driver."""

import threading
from typing import Any

import cpu
import harness
import pytest
import torch
import torch.distributed as dist
from gpt import Setup, Training

from bps_rdma import megatron


def refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("Found no NVIDIA driver on your system.")


def pins(bps: Any) -> dict[str, Any]:
    """What becomes of memory that is to be pinned, in this thread and in another one; torch's own way raises."""
    for name in ("pin_memory", "is_pinned"):
        setattr(torch.Tensor, name, refuse)  # as such a build does; one for the CPU refuses the first only
    with pytest.raises(RuntimeError, match="NVIDIA driver"):
        torch.ones(2).pin_memory()
    cpu.install()
    tensor = torch.arange(4.0)
    found = [(tensor.pin_memory(), tensor.pin_memory(device="cuda"), torch.zeros(2, pin_memory=True))]
    other = threading.Thread(target=lambda: found.append((tensor.pin_memory(), tensor.pin_memory(), torch.zeros(2))))
    other.start()
    other.join()
    dist.init_process_group("gloo")
    with megatron.enabled(use_dpu_reduce=True):
        training = Training(Setup(steps=2))
    for buffer in (buffer for chunk in training.model for buffer in chunk.buffers):
        if buffer.param_data is not None:
            buffer.offload_to_cpu(move_grads=False)
            buffer.reload_from_cpu(move_grads=False)
    training.step()
    losses = list(training.losses)
    training.close()
    return {
        "values": [[one.tolist() for one in some] for some in found],
        "copies": all(one.data_ptr() != tensor.data_ptr() for some in found for one in some),
        "pinned": tensor.is_pinned(),
        "losses": losses,
    }


def test_nothing_is_pinned_without_a_driver():
    found = harness.run(pins, workers=1, init=False)[0]
    assert found["values"] == [[[0, 1, 2, 3], [0, 1, 2, 3], [0, 0]]] * 2
    assert found["copies"]
    assert found["pinned"] is False
    assert len(found["losses"]) == 1
