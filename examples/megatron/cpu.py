# SPDX-License-Identifier: Apache-2.0
"""Lets megatron-core run without a GPU by redirecting its CUDA calls to the CPU. Its logic does not change."""

from __future__ import annotations

import contextlib
import time
import types
import typing
from typing import Any

import torch
import typing_extensions
from torch.overrides import TorchFunctionMode

if not hasattr(typing, "override"):  # added in Python 3.12; megatron-core 0.18 and later import it
    typing.override = typing_extensions.override  # type: ignore[attr-defined]


class _OnCpu(TorchFunctionMode):
    """Creates tensors for "cuda" on the CPU, and reports the types that they would have on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1:
            return result.replace("torch.", "torch.cuda.", 1)
        return result


class _Stream:
    """A stream whose operations complete at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    wait_event = synchronize = wait_stream


class _Event:
    """An event that records a time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seconds = 0.0

    def record(self, *_: Any) -> None:
        self.seconds = time.perf_counter()

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end.seconds - self.seconds)


def install() -> None:
    """Redirect CUDA calls for the rest of this process."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = cuda.empty_cache = lambda *_, **__: None
    cuda.Stream = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _Stream()
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils

    # The class's, and not in the mode above, which is one thread's. Each raises here, for want of a device or a driver.
    tensor: Any = torch.Tensor
    tensor.pin_memory = _pinned
    tensor.is_pinned = lambda *_, **__: False

    megatron_random._get_cuda_rng_state = cuda.get_rng_state
    megatron_random._set_cuda_rng_state = cuda.set_rng_state
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 uses it without Transformer Engine, too
        moe_utils.te_general_gemm = None
    torch_norm.WrappedTorchNorm.__new__ = _norm
    _OnCpu().__enter__()


def pretend_a_gpu() -> None:
    """Report a GPU with memory, which Megatron's own scripts require in addition to install()."""
    cuda: Any = torch.cuda
    memory = 1 << 34  # bytes
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        name="CPU", major=8, minor=0, multi_processor_count=1, total_memory=memory
    )
    cuda.mem_get_info = lambda *_: (memory, memory)
    cuda.memory_stats = lambda *_, **__: {}
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.set_device = cuda.set_stream = cuda.reset_peak_memory_stats = cuda.ipc_collect = lambda *_, **__: None
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_, **__: None
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    cuda.Event = _Event
    with contextlib.suppress(ImportError):  # up to 0.16; builds kernels
        from megatron.legacy import fused_kernels

        fused_kernels.load = lambda *_: None


def _pinned(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """A copy, as on a GPU: Megatron frees the tensor and keeps this."""
    return tensor.clone()


def _norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """A LayerNorm for sequence parallelism, which Megatron's own refuses; the attribute marks its gradients."""
    norm = torch.nn.LayerNorm(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm
