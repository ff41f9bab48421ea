# SPDX-License-Identifier: Apache-2.0
"""Strategies for Lightning and its Fabric, which are installed beside bps_rdma: gradients by our communication hook.

Importing this registers both by the name "bps": `Trainer(strategy="bps")`. Lightning starts the ranks, makes the
process group and wraps the model, as its DDPStrategy does. It would leave out a hook that it is given on a CPU.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.operations.options import AnyCompression
from bps_rdma.torch import membership
from bps_rdma.torch.ddp_comm_hook import HookState, ddp_comm_hook

_HOOKS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")


class BpsStrategy(DDPStrategy):  # type: ignore[misc]
    """For Trainer(strategy=...): torch's DDP, whose gradients bps_rdma averages, on a CPU and on GPUs.

    Args:
        compression: how gradients travel between hosts, as in BFloat16(); see docs/compression.md.
        exact: True: means are exact, and rounded once. Default: what BPS_EXACT says.
        process_group_backend: what carries everything else, such as metrics.
        options: as for Lightning's DDPStrategy, without a communication hook.

    Raises:
        InvalidArgumentError: another communication hook is given.
    """

    strategy_name = "bps"

    def __init__(
        self,
        compression: AnyCompression | None = None,
        exact: bool | None = None,
        process_group_backend: str = "bps",
        **options: Any,
    ) -> None:
        if given := [name for name in _HOOKS if options.get(name) is not None]:
            raise InvalidArgumentError(
                f"BpsStrategy has a communication hook, and {given[0]} is for another one",
                "use `compression`, or Lightning's DDPStrategy(process_group_backend='bps') with your hook",
            )
        super().__init__(process_group_backend=process_group_backend, **options)
        self._averaging = compression, exact

    def configure_ddp(self) -> None:
        """Wraps the model; called when a training begins."""
        super().configure_ddp()
        _average(self.model, *self._averaging)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers the name "bps"."""
        strategy_registry.register("bps", cls, description="DDP, whose gradients bps_rdma averages", override=True)


class BpsFabricStrategy(FabricDDPStrategy):  # type: ignore[misc]
    """The same for Fabric(strategy=...); see BpsStrategy."""

    def __init__(
        self,
        compression: AnyCompression | None = None,
        exact: bool | None = None,
        process_group_backend: str = "bps",
        **options: Any,
    ) -> None:
        super().__init__(process_group_backend=process_group_backend, **options)
        self._averaging = compression, exact

    def setup_module(self, module: Any) -> Any:
        """Wraps a model."""
        wrapped = super().setup_module(module)
        _average(wrapped, *self._averaging)
        return wrapped

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers the name "bps"."""
        strategy_registry.register("bps", cls, description="DDP, whose gradients bps_rdma averages", override=True)


def _average(model: Any, compression: AnyCompression | None, exact: bool | None) -> None:
    membership.init()  # if a group of another backend was there already
    model.register_comm_hook(HookState(None, compression, exact), ddp_comm_hook)


BpsStrategy.register_strategies(StrategyRegistry)
BpsFabricStrategy.register_strategies(STRATEGY_REGISTRY)
