# SPDX-License-Identifier: Apache-2.0
"""Context parallelism of the example: sequences that ranks share give the losses of whole ones."""

from typing import Any

import cpu
import harness
import pytest
import torch.distributed as dist
from gpt import Setup, Trained, train

from bps_rdma import megatron


def trained(bps: Any, setup: Setup) -> Trained:
    cpu.install()
    dist.init_process_group("gloo")
    with megatron.enabled(use_dpu_reduce=True):
        return train(setup)


@pytest.mark.parametrize(
    ("whole", "parts"),
    [({}, {"cp": 2}), pytest.param({"tp": 2}, {"tp": 2, "cp": 2, "overlap": True}, marks=pytest.mark.long)],
)
def test_parts_of_a_sequence_train_like_a_whole_one(whole, parts):
    ranks = {"tp": 1, "cp": 1}
    runs = []
    for sizes in (whole, parts):
        workers = {**ranks, **sizes}["tp"] * {**ranks, **sizes}["cp"]
        runs.append(harness.run(trained, Setup(steps=5, **sizes), workers=workers, init=False)[0])
    assert runs[1].bucket_groups > 0
    assert runs[1].losses == pytest.approx(runs[0].losses, abs=1e-5)
    assert runs[1].norms == pytest.approx(runs[0].norms, rel=1e-4)
