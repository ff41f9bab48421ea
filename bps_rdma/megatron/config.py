# SPDX-License-Identifier: Apache-2.0
"""The configuration of Megatron's DistributedDataParallel with the fields of bps_rdma, typed; needs megatron-core."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.distributed import DistributedDataParallelConfig as _Stock


@dataclass
class DistributedDataParallelConfig(_Stock):  # type: ignore[misc]
    """For Megatron's DistributedDataParallel, in place of its own.

    Call bps_rdma.megatron.enable() once, too, without a configuration: with one that has use_bps=False it does nothing,
    for other models either.

    Attributes:
        use_bps: push/pull gradients of the models with this configuration; the same on all ranks of the model. False:
            Megatron alone trains them, also beside others that use push/pull.
        cure_frozen_embeddings: see enable(), whose own argument overrides this.
    """

    use_bps: bool = True
    cure_frozen_embeddings: bool = True
