# SPDX-License-Identifier: Apache-2.0
"""Ray Train: `TorchTrainer(loop, torch_config=BpsConfig())` trains unmodified loops over bps_rdma.

The process group of all workers gets the torch.distributed backend bps. Ray Train chooses ranks, and starts the workers
again after a failure. Every rank is also a server.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.train.torch.config import TorchConfig, _TorchBackend

from bps_rdma.ray.placement import adopt


@dataclass
class BpsConfig(TorchConfig):  # type: ignore[misc]  # Ray is not checked
    """TorchConfig for the backend bps.

    Args:
        backend: "bps", or for example "cpu:gloo,cuda:bps".
        settings: of bps_rdma in all workers, for example {"BPS_INTERFACE": "eth1"}.
    """

    backend: str | None = "bps"
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def backend_cls(self) -> type:
        """The class whose code Ray Train runs in its workers before the training loop."""
        return _BpsBackend


class _BpsBackend(_TorchBackend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: BpsConfig) -> None:
        # Torch's store, through which ranks find each other, is not authenticated. The secret comes from here.
        worker_group.execute(_prepare, {**backend_config.settings, "BPS_SECRET": secrets.token_hex(32)})
        super().on_start(worker_group, backend_config)


def _prepare(env: Mapping[str, str]) -> None:
    adopt(env)
    import bps_rdma.torch  # noqa: F401  # registers the backend
