# SPDX-License-Identifier: Apache-2.0
"""What models and flags say on their own, and where ranks or models differ in it."""

import warnings
from datetime import timedelta
from typing import Any

import cpu
import gpt
import harness
import pytest
import torch
import torch.distributed as dist
from gpt import Setup

import bps_rdma
from bps_rdma import megatron


def initialise(timeout: float = 60) -> None:
    cpu.install()
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))


def model_groups(**sizes: int) -> None:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def made(setup: Setup, ddp_config: Any, *, frozen: bool = False) -> Any:
    """One chunk of the example's model, wrapped."""
    from megatron.core.distributed import DistributedDataParallel

    config = gpt._config(setup)
    (chunk,) = gpt._chunks(setup, config)
    if frozen:
        chunk.embedding.requires_grad_(False)
    return DistributedDataParallel(config, ddp_config, chunk)


@harness.on_ranks(workers=2, init=False)
def test_a_rank_whose_model_is_left_to_megatron_joins_as_well(bps: Any) -> None:
    """Whether this rank joined by making its own model, which only rank 1 leaves to push/pull."""
    from bps_rdma.megatron.config import DistributedDataParallelConfig

    initialise(timeout=15)
    setup = Setup(pp=2)
    model_groups(pipeline_model_parallel_size=2)
    with megatron.enabled():
        made(setup, DistributedDataParallelConfig(use_bps=dist.get_rank() == 1))
    assert bps.is_initialized()


@harness.on_ranks(workers=1, init=False)
def test_a_model_says_whether_its_embedding_is_cured(bps: Any) -> None:
    """Whether frozen embeddings pass gradients, by what enable() and the model's configuration say."""
    from bps_rdma.megatron.config import DistributedDataParallelConfig

    initialise()
    setup = Setup(recompute=True, shared_embeddings=False)
    model_groups()
    found = []
    for keyword, own in ((None, True), (None, False), (True, False), (False, True)):
        with megatron.enabled(DistributedDataParallelConfig(), cure_frozen_embeddings=keyword):
            ddp = made(setup, DistributedDataParallelConfig(cure_frozen_embeddings=own), frozen=True)
        found.append(hasattr(ddp.module.embedding, "_bps_rdma_passes_gradients"))
    assert found == [True, False, True, False]


def with_other_flags(bps: Any) -> str:
    initialise(timeout=15)
    with megatron.enabled(use_dpu_reduce=True, use_dpu_tp_reduce=dist.get_rank() == 0):
        try:
            model_groups(tensor_model_parallel_size=2)
        except bps_rdma.InvalidArgumentError as error:
            return str(error)
    return ""


def test_flags_that_differ_between_ranks_are_refused():
    for said in harness.run(with_other_flags, workers=2, init=False):
        assert "rank 1 has none of --use-bps-tp, --use-bps-pp, but rank 0 has --use-bps-tp" in said


def of_experts(bps: Any) -> tuple[set[str], list[str]]:
    """The groups of our backend, and what is said, where experts are not divided."""
    from megatron.core import parallel_state

    initialise()
    setup = Setup(experts=2, ep=2)
    with warnings.catch_warnings(record=True) as said, megatron.enabled(use_dpu_reduce=False, use_dpu_tp_reduce=True):
        warnings.simplefilter("always")
        model_groups(expert_model_parallel_size=2)
        for _ in range(2):
            made(setup, gpt._ddp_config(setup))
    groups = {
        name
        for name, group in vars(parallel_state).items()
        if isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "bps"
    }
    return groups, [str(one.message) for one in said if "replaced no group" in str(one.message)]


def test_without_tensor_parallelism_the_flag_replaces_nothing_and_says_so_once():
    (groups, (message,)), other = harness.run(of_experts, workers=2, init=False)
    assert groups == set()
    assert message.startswith("--use-bps-tp replaced no group: ")
    assert other == (set(), [])


def of_several(bps: Any) -> dict[str, tuple[list[int], float]]:
    """Name -> the ranks of this rank's group, and the sum of their numbers over it."""
    from megatron.core import parallel_state

    initialise()
    with megatron.enabled(use_dpu_reduce=False, use_dpu_tp_reduce=True, use_bps_pp=True):
        model_groups(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    found = {}
    for name, group in vars(parallel_state).items():
        if isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "bps":
            number = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(number, group=group)
            found[name] = dist.get_process_group_ranks(group), number.item()
    return found


def test_each_rank_gets_its_own_of_several_groups():
    ranks = harness.run(of_several, workers=4, init=False)
    stages, tensors = [[0, 2], [1, 3]], [[0, 1], [2, 3]]
    for rank, found in enumerate(ranks):
        of_rank = {
            "_TENSOR_MODEL_PARALLEL_GROUP": tensors[rank // 2],
            "_EXPERT_TENSOR_PARALLEL_GROUP": tensors[rank // 2],
            "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": tensors[rank // 2],
            "_PIPELINE_MODEL_PARALLEL_GROUP": stages[rank % 2],
            "_EMBEDDING_GROUP": stages[rank % 2],
        }
        assert found == {name: (members, sum(members)) for name, members in of_rank.items()}


@harness.on_ranks(workers=2, init=False)
def test_the_groups_have_megatrons_timeout(bps: Any) -> None:
    from megatron.core import parallel_state

    initialise()
    with megatron.enabled(use_dpu_reduce=False, use_dpu_tp_reduce=True):
        model_groups(tensor_model_parallel_size=2, distributed_timeout_minutes=7)
    assert float(parallel_state.get_tensor_model_parallel_group()._seconds) == pytest.approx(420)
