# SPDX-License-Identifier: Apache-2.0
"""What the tests of DistributedDataParallel share: each runs with every strategy."""

from __future__ import annotations

from typing import Any

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


def train(ddp: Any, optimizer: Any, bps: Any, steps: int, set_to_none: bool = True) -> None:
    begin, end = training.share(bps.rank(), bps.size())
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        training.loss_of(ddp(training.batch(step, begin, end))).backward()
        optimizer.step()
