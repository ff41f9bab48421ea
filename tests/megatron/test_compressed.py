# SPDX-License-Identifier: Apache-2.0
"""Megatron's gradients in bfloat16, compressed by a setting: both ways of its optimizer."""

from typing import Any

import harness
import pytest
from gpt import Setup
from parity import stock_and_ours

ENV = {"BPS_TRANSPORT": "tcp", "BPS_COMPRESSION": "int8", "BPS_MIN_COMPRESS_BYTES": "4096"}


@pytest.mark.parametrize(
    "options", [{}, {"distributed_optimizer": True, "overlap": True}], ids=["plain", "distributed"]
)
def test_training_in_bf16_reaches_about_the_same_losses(options: dict[str, Any]) -> None:
    setup = Setup(bf16=True, steps=8, **options)
    for found in harness.run(stock_and_ours, setup, workers=2, init=False, env=ENV):
        assert found["ours"].losses == pytest.approx(found["stock"].losses, rel=0.03)
        assert 0 < found["compressed_bytes"] < 0.56 * found["uncompressed_bytes"]
