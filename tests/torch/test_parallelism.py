# SPDX-License-Identifier: Apache-2.0
"""FSDP2, tensor parallelism and pipelines of torch: examples/frameworks train as on gloo, bit for bit."""

import re
from pathlib import Path

import harness
import pytest

pytestmark = pytest.mark.timeout(400)

FOLDER = Path(__file__).parents[2] / "examples" / "frameworks"


def said(ranks: int, script: str, *options: str) -> dict[str, str]:
    """What rank 0 printed, by the first word."""
    done = harness.succeeded(harness.scripts(str(FOLDER / script), *options, ranks=ranks))
    return dict(re.findall("^(losses|weights|backend): (.*)$", done.stdout, re.MULTILINE))


@pytest.mark.parametrize(
    ("ranks", "script", "options"),
    [
        pytest.param(2, "fsdp.py", [], id="FSDP2 with a checkpoint"),
        pytest.param(2, "tensor_parallel.py", [], id="tensor parallelism"),
        pytest.param(4, "tensor_parallel.py", [], id="with FSDP2 on a mesh of 2 x 2", marks=pytest.mark.long),
        pytest.param(2, "pipeline.py", ["GPipe"], id="GPipe", marks=pytest.mark.long),
        pytest.param(2, "pipeline.py", ["1F1B"], id="1F1B"),
        pytest.param(4, "pipeline.py", ["1F1B"], id="1F1B of 4 ranks", marks=pytest.mark.long),
    ],
)
def test_losses_and_weights_are_those_of_gloo(ranks, script, options):
    expected, found = said(ranks, script, *options, "gloo"), said(ranks, script, *options, "bps")
    assert (expected.pop("backend"), found.pop("backend")) == ("gloo", "bps")
    assert found == expected
    losses = [float(word) for word in found["losses"].split()]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
