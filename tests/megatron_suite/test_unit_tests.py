# SPDX-License-Identifier: Apache-2.0
"""Megatron's unit tests of its data parallelism, stock and over push/pull: the same ones pass."""

import os
from typing import Any

import harness
import pytest
import torch.distributed as dist


class Outcomes:
    """A plugin of pytest's."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.found[report.nodeid] = report.outcome


def run_tests(bps: Any, checkout: str, file: str, only: str, ours: bool) -> tuple[dict[str, str], int]:
    """One rank: (test -> how it ended, operations that were sent by push/pull). Their NCCL is gloo here."""
    import cpu

    from bps_rdma import megatron

    cpu.install()
    cpu.pretend_a_gpu()
    join = dist.init_process_group
    dist.init_process_group = lambda backend=None, **options: join("gloo", **options)
    outcomes = Outcomes()
    # Not their conftest, which fetches data over the network.
    options = ["--noconftest", "-c", os.devnull, "--rootdir", checkout, "-p", "no:cacheprovider", "-k", only]
    with megatron.enabled(use_dpu_reduce=ours):
        pytest.main([*options, f"{checkout}/tests/unit_tests/distributed/{file}"], plugins=[outcomes])
    operations = 0
    if bps.is_initialized():
        operations = bps.metrics()["total"]["operations"]
        bps.shutdown()
    dist.destroy_process_group()
    return outcomes.found, operations


@pytest.mark.parametrize(
    ("file", "only", "sends"),
    [
        ("test_param_and_grad_buffer.py", "test_grad_sync", True),
        ("test_distributed_data_parallel.py", "", False),  # makes models, and looks at them
    ],
)
def test_unit_tests(checkout, file, only, sends):
    stock = harness.run(run_tests, str(checkout), file, only, False, workers=2, init=False)
    ours = harness.run(run_tests, str(checkout), file, only, True, workers=2, init=False)
    for (expected, none), (found, operations) in zip(stock, ours, strict=True):
        ends = list(found.values())
        print(f"{file}: {ends.count('passed')} passed, {ends.count('skipped')} skipped, {operations} operations")
        assert found == expected
        assert "passed" in ends
        assert "failed" not in ends
        assert none == 0
        assert (operations > 0) == sends
