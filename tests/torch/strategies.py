# SPDX-License-Identifier: Apache-2.0
"""What the tests of DistributedDataParallel share: each runs with every strategy."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import harness
import training

STRATEGIES = ["naive", "flat", "overlap", "bucketed"]


def with_every_strategy(bps: Any, body: Any, *args: Any) -> list[Any]:
    """One job for all strategies: starting the ranks takes longer than what they do."""
    results = []
    for strategy in STRATEGIES:
        try:
            results.append(body(bps, strategy, *args))
        except Exception as error:
            raise AssertionError(f"strategy {strategy!r}") from error
    return results


def every_strategy(*given: str, **options: Any) -> Callable[..., Any]:
    """harness.on_ranks() for a test that also takes a strategy, with each of them in one job."""

    def decorate(body: Callable[..., None]) -> Any:
        @functools.wraps(body)
        def each(bps: Any, *args: Any) -> None:
            with_every_strategy(bps, body, *args)

        signature = inspect.signature(body)
        others = [one for name, one in signature.parameters.items() if name != "strategy"]
        each.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return harness.on_ranks(*given, **options)(each)

    return decorate


def train(ddp: Any, optimizer: Any, bps: Any, steps: int, set_to_none: bool = True) -> None:
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        training.loss_of(ddp(training.share_of(bps, step))).backward()
        optimizer.step()
