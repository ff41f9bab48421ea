# SPDX-License-Identifier: Apache-2.0
"""pushpull_bench with tensors on a GPU: on a simulated one both ways, and by the command on a real one."""

import json
import sys
from typing import Any

import gpu_arrays
import harness
import pytest
import simulated
import torch

from bps_rdma.errors import InvalidArgumentError
from bps_rdma.tools.bench import on_gpu
from bps_rdma.tools.bench.measure import CaseRunner
from bps_rdma.tools.bench.pattern import WrongResultError
from bps_rdma.tools.bench.plan import OPS, Case, Plan, parse_memory
from bps_rdma.tools.bench.worker import make_ours

BENCH = [sys.executable, "-c", "from bps_rdma.tools.bench import main; main()"]
CASES = [Case(op, dtype, 64_000, 2, 3) for op in OPS for dtype in ("float32", "bfloat16")]
ROUNDS = 3


def measures(bps: Any, by_core: bool, prepared: bool) -> None:
    device = simulated.install_on_route() if by_core else simulated.install(1e-4, immediate=True)
    on_gpu.own_gpu = lambda: torch.device("cpu")
    ours = make_ours(Plan((), memory="cuda", prepared=prepared))
    for case in CASES:
        runner = CaseRunner(case, "cuda", [ours])
        assert len(runner.run(ROUNDS)[ours.name]["seconds"]) == ROUNDS
        assert runner.checked == ROUNDS * case.arrays
    assert (gpu_arrays.copied(bps) > 0) == by_core
    assert (device.copies > 0) is not by_core


@pytest.mark.parametrize(("by_core", "prepared"), [(False, False), (True, False), (True, True)])
def test_every_operation_is_measured_and_checked(by_core, prepared):
    env = gpu_arrays.env() if by_core else {}
    harness.run(measures, by_core, prepared, workers=2, env=env)


@harness.on_ranks(workers=2)
def test_a_wrong_result_is_found(bps: Any) -> None:
    """What is checked is what lies on the GPU, not what was sent to it."""
    simulated.install(immediate=True)
    on_gpu.own_gpu = lambda: torch.device("cpu")
    ours = make_ours(Plan((), memory="cuda"))
    for case in CASES[:2]:
        ours.start(case, "cuda")
        ours.prepare(0)
        with pytest.raises(WrongResultError):
            ours.check(0)  # nothing was summed


def test_other_libraries_are_refused():
    with pytest.raises(InvalidArgumentError, match="measures bps_rdma alone"):
        parse_memory("plain", "cuda", ["gloo"])
    with pytest.raises(InvalidArgumentError, match="unknown device 'tpu'"):
        parse_memory("plain", "tpu", [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("command", ["bps_rdma.tools.bench", "bps_rdma.tools.bench.allreduce"])
def test_a_machine_without_a_gpu_says_so(command):
    program = [sys.executable, "-c", f"from {command} import main; main()"]
    done = harness.run_command([*program, "--device", "cuda", "--sizes", "4K", "--iters", "5"])
    assert done.returncode != 0
    assert "torch finds no GPU on this machine" in done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_on_a_gpu():
    done = harness.run_command([*BENCH, "--device", "cuda", "--sizes", "64K", "--iters", "5", "--json", "-"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["job"]["memory"] == "cuda"
