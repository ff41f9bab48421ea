# SPDX-License-Identifier: Apache-2.0
"""Strategies for Lightning and its Fabric, which are installed beside bps_rdma: gradients by our communication hook.

Importing this registers both by the name "bps": `Trainer(strategy="bps")`. Lightning starts the ranks, makes the
process group and wraps the model, as its DDPStrategy does. It would leave out a hook that it is given on a CPU.
"""

from __future__ import annotations

import weakref
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from bps_rdma import job
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.operations.options import AnyCompression
from bps_rdma.torch import membership
from bps_rdma.torch.ddp_comm_hook import HookState, ddp_comm_hook

_HOOKS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")


class _Averaged:
    """What both strategies have in common.

    Args:
        compression: how gradients travel between hosts, as in BFloat16(); see docs/compression.md.
        exact: True: means are exact, and rounded once. Default: what BPS_EXACT says.
        process_group_backend: what carries everything else, such as metrics.
        options: as for Lightning's DDPStrategy, without a communication hook.

    Raises:
        InvalidArgumentError: another communication hook is given.
    """

    def __init__(
        self,
        compression: AnyCompression | None = None,
        exact: bool | None = None,
        process_group_backend: str = "bps",
        **options: Any,
    ) -> None:
        if given := [name for name in _HOOKS if options.get(name) is not None]:
            raise InvalidArgumentError(
                f"{type(self).__name__} has a communication hook, and {given[0]} is for another one",
                "use `compression`, or Lightning's DDPStrategy(process_group_backend='bps') with your hook",
            )
        super().__init__(process_group_backend=process_group_backend, **options)  # type: ignore[call-arg]
        self._averaging = compression, exact
        self._states: list[tuple[Any, Any, HookState]] = []  # weak references to a model and its job

    def _average(self, model: Any) -> None:
        membership.init()  # if a group of another backend was there already
        model.register_comm_hook(self._state_of(model.module), ddp_comm_hook)

    def _state_of(self, module: Any) -> HookState:
        """The same for each fit() of a model, so that names on the servers do not become more and more."""
        running = job.current()
        self._states = [each for each in self._states if each[0]() is not None and each[1]() is running]
        for known, _, state in self._states:
            if known() is module:
                state.wrapped_anew()
                return state
        state = HookState(None, *self._averaging)
        self._states.append((weakref.ref(module), weakref.ref(running), state))
        return state

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers the name "bps"."""
        strategy_registry.register("bps", cls, description="DDP, whose gradients bps_rdma averages", override=True)


class BpsStrategy(_Averaged, DDPStrategy):  # type: ignore[misc]
    """For Trainer(strategy=...): torch's DDP, whose gradients bps_rdma averages, on a CPU and on GPUs.

    Its arguments are `compression`, `exact`, and those of Lightning's DDPStrategy without a communication hook.
    """

    strategy_name = "bps"

    def configure_ddp(self) -> None:
        """Wraps the model; called when a training begins."""
        super().configure_ddp()
        self._average(self.model)


class BpsFabricStrategy(_Averaged, FabricDDPStrategy):  # type: ignore[misc]
    """The same for Fabric(strategy=...); see BpsStrategy."""

    def setup_module(self, module: Any) -> Any:
        """Wraps a model."""
        wrapped = super().setup_module(module)
        self._average(wrapped)
        return wrapped


BpsStrategy.register_strategies(StrategyRegistry)
BpsFabricStrategy.register_strategies(STRATEGY_REGISTRY)
