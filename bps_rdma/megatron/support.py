# SPDX-License-Identifier: Apache-2.0
"""The versions and options of Megatron that push/pull supports. Others are refused."""

from __future__ import annotations

from typing import Any

from bps_rdma.errors import InvalidArgumentError

OLDEST = (0, 14)

_ALL_TO_ALL = "it sends gradients by all_to_all; servers sum in float32 in any case"

# Options of DistributedDataParallelConfig or of the command line -> why they are refused.
_REFUSED = {
    "use_megatron_fsdp": "Megatron-FSDP has a gradient path of its own",
    "use_custom_fsdp": "Megatron-FSDP has a gradient path of its own",
    "use_torch_fsdp2": "torch's FSDP has a gradient path of its own",
    "reduce_scatter_with_fp32_accumulation": _ALL_TO_ALL,
    "ddp_reduce_scatter_with_fp32_accumulation": _ALL_TO_ALL,
}


def check_version(version: str) -> None:
    """Refuses a version of Megatron that is older than the oldest supported one.

    Raises:
        InvalidArgumentError: the version is too old.
    """
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < OLDEST:
        raise InvalidArgumentError(
            f"megatron-core {version} is older than {'.'.join(map(str, OLDEST))}", "install a newer megatron-core"
        )


def check_options(options: Any) -> None:
    """Refuses options with which gradients would not use push/pull.

    Args:
        options: Megatron's arguments, or a DistributedDataParallelConfig.

    Raises:
        InvalidArgumentError: an option is not supported; names it and the reason.
    """
    for name, reason in _REFUSED.items():
        if getattr(options, name, False):
            raise InvalidArgumentError(
                f"{name} cannot be combined with use_dpu_reduce: {reason}", "leave out one of the two"
            )
    # On the command line it is an optimizer with --use-distributed-optimizer, which the model's config then lacks.
    shards = getattr(options, "use_distributed_optimizer", False)
    layer_wise = not shards or getattr(options, "optimizer", "adam") not in ("adam", "sgd")
    if getattr(options, "overlap_param_gather", False) and layer_wise:
        raise InvalidArgumentError(
            "overlap_param_gather with the layer-wise optimizer cannot be combined with use_dpu_reduce: it gathers "
            "parts of unequal size",
            "leave out one of the two, or use --use-distributed-optimizer with adam or sgd",
        )
