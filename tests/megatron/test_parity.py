# SPDX-License-Identifier: Apache-2.0
"""Training over push/pull is training on stock Megatron, bit for bit: losses, norms and weights."""

from typing import Any

import cpu
import gpt
import harness
import pytest
import torch.distributed as dist
from gpt import Setup, Training
from parity import BOTH_OVERLAPS, TWO_RANKS, check, stock_and_ours

GROUPS = {
    "TP 2": (4, Setup(tp=2, steps=8)),
    "PP 2, overlap": (4, Setup(pp=2, steps=8, overlap=True)),
    "TP 2, sequence parallel, both overlaps": (4, Setup(tp=2, sp=True, steps=8, **BOTH_OVERLAPS)),
    "PP 2, VPP 2, both overlaps": (4, Setup(pp=2, vpp=2, steps=8, **BOTH_OVERLAPS)),
    "two instances of the distributed optimizer": (4, Setup(distributed_optimizer=True, instances=2, steps=8)),
    "experts, EP 2, overlap": (4, Setup(experts=4, ep=2, steps=8, overlap=True)),
    "TP 2, PP 2, both overlaps": (8, Setup(tp=2, pp=2, steps=4, **BOTH_OVERLAPS)),
    "TP 2, PP 2, VPP 2, both overlaps": (8, Setup(tp=2, pp=2, vpp=2, steps=4, **BOTH_OVERLAPS)),
}

# What runs on other versions of Megatron too.
CORE = {
    "plain",
    "overlap",
    "overlap, average, NaN check",
    "distributed optimizer, both overlaps",
    "bf16, fp32 gradients, both overlaps",
    "fp16, both overlaps",
    "experts, overlap",
    "TP 2, PP 2, VPP 2, both overlaps",
}


# What a landing runs of the others.
SHORT = CORE | {
    "per token",
    "TP 2, sequence parallel, both overlaps",
    "two instances of the distributed optimizer",
    "experts, EP 2, overlap",
}


def cases(setups: dict[str, Any]) -> list[Any]:
    """Parameters for a test, with their marks."""
    marks = {name: [pytest.mark.core] if name in CORE else [] for name in setups}
    return [pytest.param(name, marks=[*marks[name], *([] if name in SHORT else [pytest.mark.long])]) for name in setups]


@harness.on_ranks(workers=2, init=False)
def test_it_can_be_switched_off(bps: Any) -> None:
    """After disable() Megatron is stock again."""
    from bps_rdma import megatron
    from bps_rdma.megatron.communicator import counts

    cpu.install()
    dist.init_process_group("gloo")
    with megatron.enabled():
        first = gpt.train(Setup(steps=4))
    before = dict(counts)
    assert gpt.train(Setup(steps=4)) == first
    assert counts == before, "disable() left something behind"


def started_before_the_last_gradient(bps: Any, setup: Setup) -> int:
    """How many buckets were on their way when the last gradient of a step came: the embedding's, the first layer's."""
    from bps_rdma import megatron
    from bps_rdma.megatron.communicator import counts

    cpu.install()
    dist.init_process_group("gloo")
    with megatron.enabled():
        training = Training(setup)
        training.step()
        before, seen = dict(counts), []
        embedding = next(training.model[0].parameters())
        embedding.register_hook(lambda _: seen.append(dict(counts)))
        training.step()
        training.close()
    assert len(seen) == setup.microbatches
    return sum(seen[-1][kind] - before[kind] for kind in ("all_reduce", "reduce_scatter"))


@pytest.mark.core
@pytest.mark.parametrize(
    ("overlap", "distributed"),
    [
        pytest.param(True, False, id="overlap-all-reduce", marks=pytest.mark.long),
        pytest.param(True, True, id="overlap-reduce-scatter"),
        pytest.param(False, False, id="no overlap-all-reduce"),
        pytest.param(False, True, id="no overlap-reduce-scatter", marks=pytest.mark.long),
    ],
)
def test_buckets_travel_while_the_backward_pass_goes_on(overlap, distributed):
    setup = Setup(overlap=overlap, distributed_optimizer=distributed)
    for started in harness.run(started_before_the_last_gradient, setup, workers=2, init=False):
        assert started > 1 if overlap else started == 0


def with_a_nan(bps: Any, check: bool) -> str:
    """Rank 1 has a gradient that is not a number; what it hears of that."""
    from bps_rdma import megatron

    cpu.install()
    dist.init_process_group("gloo")
    with megatron.enabled():
        training = Training(Setup(overlap=True, average=True, check_nan=check))
        training.step()
        if dist.get_rank() == 1:
            next(training.model[0].parameters()).register_hook(lambda gradient: gradient * float("nan"))
        try:
            training.step()
        except Exception as error:
            return str(error)
    assert training.norms[-1] != training.norms[-1], "the NaN did not get into the sum"
    return "nothing"


@pytest.mark.core
@pytest.mark.parametrize("check", [True, False], ids=["checked", "not checked"])
def test_a_nan_is_found_before_it_is_sent(check):
    env = {"BPS_SHUTDOWN_TIMEOUT": "1"}
    with harness.start(with_a_nan, check, workers=2, init=False, env=env) as job:
        found = job.outcomes()[1]
    assert not found.error, found.error
    assert ("found NaN in local grad norm" in found.value) == check, found.value


@pytest.mark.parametrize("name", cases(TWO_RANKS))
def test_two_ranks(name):
    found = harness.run(stock_and_ours, TWO_RANKS[name], workers=2, init=False)
    check(found, TWO_RANKS[name])
    for one in found:
        assert one["partitions"] > 0
        assert one["copied_bytes"] == 0 or TWO_RANKS[name].experts, "the buffers do not lie in shared memory"


@pytest.mark.parametrize("name", cases(GROUPS))
def test_groups(name):
    workers, setup = GROUPS[name]
    check(harness.run(stock_and_ours, setup, workers=workers, init=False), setup)


def test_tensor_parallel_collectives():
    """Two ranks of tensor parallelism, two of data parallelism: all of it over bps_rdma."""
    setup = Setup(tp=2, steps=8)
    found = harness.run(stock_and_ours, setup, True, workers=4, init=False)
    check(found, setup)
    for one in found:
        assert one["operations"] > 2 * setup.steps * one["counts"]["all_reduce"] / setup.steps


def over_bps(bps: Any, setup: Setup, flags: dict[str, bool]) -> tuple[bool, set[str]]:
    """Whether results are those of stock Megatron, and which groups have our backend."""
    from megatron.core import parallel_state

    from bps_rdma import megatron

    cpu.install()
    dist.init_process_group("gloo")
    stock = gpt.train(setup)
    with megatron.enabled(**{"use_dpu_reduce": False, **flags}):
        training = Training(setup)
    found = {
        name
        for name, group in vars(parallel_state).items()
        if isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "bps"
    }
    for _ in range(setup.steps):
        training.step()
    same = training.result() == stock
    training.close()
    return same, found


EXPERT_GROUPS = {"_EXPERT_TENSOR_PARALLEL_GROUP", "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"}
STAGE_GROUPS = {"_PIPELINE_MODEL_PARALLEL_GROUP", "_EMBEDDING_GROUP"}


@pytest.mark.parametrize(
    ("setup", "flags", "expected"),
    [
        pytest.param(
            Setup(tp=2, sp=True, experts=2, steps=4), {"use_dpu_tp_reduce": True},
            {"_TENSOR_MODEL_PARALLEL_GROUP", *EXPERT_GROUPS}, id="experts",
        ),
        # One direction is in the group of all ranks, unless messages are batched.
        pytest.param(Setup(pp=2, steps=4), {"use_bps_pp": True}, STAGE_GROUPS, id="stages"),
        pytest.param(Setup(pp=2, batched=True, steps=4), {"use_bps_pp": True}, STAGE_GROUPS, id="batched"),
        pytest.param(Setup(pp=2, vpp=2, steps=4), {"use_bps_pp": True}, STAGE_GROUPS, id="virtual stages"),
    ],
)  # fmt: skip
def test_groups_of_experts_and_stages(setup, flags, expected):
    """Alone, without gradients, so that nothing else can make a difference: two ranks, results as stock."""
    for same, found in harness.run(over_bps, setup, flags, workers=2, init=False):
        assert found == expected
        assert same


@pytest.mark.parametrize(
    "setup",
    [Setup(pp=2, overlap=True, steps=4), pytest.param(Setup(pp=2, steps=4, **BOTH_OVERLAPS), marks=pytest.mark.long)],
    ids=["overlap", "both overlaps"],
)
def test_gradients_and_stages_together(setup):
    """Two groups of stages, and in each stage a group of data parallelism: sums of two, the same in any order."""
    flags = {"use_bps_pp": True, "use_dpu_reduce": True}
    for same, found in harness.run(over_bps, setup, flags, workers=4, init=False):
        assert found == STAGE_GROUPS
        assert same


def test_two_hosts_of_two_ranks():
    """One data-parallel group: the ranks of a host sum first. The hosts are one machine, told apart by BPS_HOST_ID."""
    setup = Setup(overlap=True, steps=4)
    found = harness.run(stock_and_ours, setup, init=False, **harness.on_hosts("aabb"))
    check(found, setup)
    assert len({one["ours"].weights for one in found}) == 1, "the ranks do not have the same weights"
    assert sum(one["host_sums"] for one in found) > 0
