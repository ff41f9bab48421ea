# SPDX-License-Identifier: Apache-2.0
"""A backward fails on a rank that has come to the end of its inputs, or has still some while the others are there."""

from typing import Any

import harness
import pytest
from failed_passes import BUCKETS, Trained, is_told, with_buffers

SOON = {"BPS_TIMEOUT": str(20 * harness.PATIENCE)}


@pytest.mark.parametrize("what", ["model", "optimizer"])
@harness.on_ranks(workers=2)
def test_ranks_without_inputs_stay_in_join(bps: Any, what: str) -> None:
    trained = Trained(what, **BUCKETS)
    trained.make_passes(2)
    with trained.join():
        for batch in range(3 if bps.rank() == 1 else 0):
            if batch == 1:
                trained.lose(layer=1)
            else:
                trained.make_pass(2.0)
                trained.check(1.0)


@pytest.mark.parametrize(("what", "fails"), [("model", "early"), ("model", "late"), ("optimizer", "late")])
@pytest.mark.parametrize("batches", [1, 3])
@harness.on_ranks(workers=2, env=SOON)
def test_the_last_backward_of_a_rank_fails(bps: Any, batches: int, what: str, fails: str) -> None:
    """No forward follows that ends its pass. The other rank waits for that, in one of its own or without inputs."""
    trained, before = (with_buffers(), 2) if what == "model" else (Trained("optimizer", strategy="flat"), 0)
    with trained.join():
        for batch in range(batches if bps.rank() == 1 else 2):
            if batch == batches - 1:
                trained.fail(fails) if bps.rank() == 1 else is_told(trained.make_pass)
            else:
                trained.make_pass(2.0)
            if batch >= batches:
                trained.check(1.0)
    assert trained.passes == before + max(batches, 2)
    trained.make_passes()


@pytest.mark.parametrize(
    ("what", "told"), [("model", "finish_gradient_synchronization"), ("optimizer", r"call synchronize\(\)")]
)
@harness.on_ranks(workers=2, env=SOON)
def test_the_last_backward_of_a_rank_fails_when_it_has_sent_gradients(bps: Any, what: str, told: str) -> None:
    """It is told what to do, and does not wait for the other rank, which waits for the rest."""
    trained = Trained(what, **BUCKETS)
    trained.make_passes(2)
    if bps.rank() == 1:
        with pytest.raises(bps.BpsError, match=f"not finished.*{told}"), trained.join():
            trained.fail()
        is_told(trained.finish)
    else:
        with pytest.raises(bps.RefusedError), trained.join():
            trained.make_pass()
    trained.make_passes()
