# SPDX-License-Identifier: Apache-2.0
"""Compressed tensors over real verbs: with what the tests of other transports do."""

import harness
import pytest
from bodies import compressed_halves as halves
from bodies.compression import PARTITION, equal_everywhere, fed_back, many_at_once, scattered, sums
from levels import cases

ENV = harness.over("rdma") | harness.cut_at(PARTITION)


@pytest.mark.parametrize("text", cases(["int8"], ["int4", "topk:k=0.1"]))
def test_sums_are_what_the_codes_say(text: str) -> None:
    first, second, third = harness.run(sums, text, True, workers=3, servers=2, env=ENV)
    assert first == second == third


@pytest.mark.long
def test_16_bit_floats() -> None:
    results = harness.run(halves.sums, "bfloat16", True, workers=2, servers=2, env=ENV)
    assert results[0] == results[1]


@pytest.mark.long
def test_with_servers_in_the_workers() -> None:
    results = harness.run(equal_everywhere, "int8", workers=3, env=ENV)
    assert len({result[0] for result in results}) == 1
    harness.run(scattered, workers=3, env=ENV)


@pytest.mark.long
def test_feedback() -> None:
    harness.run(fed_back, "int8", workers=2, servers=1, env=ENV)


# Landing slots run out, and what could not be sent at once is not encoded twice.
@pytest.mark.long
def test_many_at_once_with_few_slots() -> None:
    few = harness.run(many_at_once, workers=3, servers=2, env=ENV | {"BPS_SERVER_WINDOW": "2"})
    many = harness.run(many_at_once, workers=3, servers=2, env=ENV)
    assert few[0] == few[1] == few[2] == many[0]
