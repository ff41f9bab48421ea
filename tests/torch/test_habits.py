# SPDX-License-Identifier: Apache-2.0
"""What training scripts do, with each way to train: the weights are those of torch's own DDP over gloo."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import habits
import harness
import pytest
import torch
import torch.distributed as dist
from torch import nn

import bps_rdma.torch as bps_torch
from bps_rdma.torch import CrossBarrier, DistributedDataParallel, DistributedOptimizer


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), 3])
@harness.on_ranks("workers", init=False)
def test_weights_are_those_of_torchs_ddp(bps: Any) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    bps_torch.init()
    group = dist.new_group(backend="bps")
    wrong = []
    for habit in habits.HABITS:
        expected = habits.trained("gloo", habit)
        for wrapper in habits.WRAPPERS:
            if (wrapper, habit) in habits.LEFT_OUT:
                continue
            try:
                found = habits.trained(wrapper, habit, group)
                for one, other in zip(found, expected, strict=True):
                    # gloo sums three ranks' bfloat16 in bfloat16
                    rounds = {"rtol": 0.02, "atol": 1e-3} if habit == "mixed dtypes" else {}
                    torch.testing.assert_close(one, other, **rounds)
            except Exception as error:
                wrong.append(f"{wrapper}, {habit}: {error}")
    assert not wrong


@harness.on_ranks(workers=2)
def test_a_sparse_gradient_that_was_not_announced_names_its_parameter(bps: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    with pytest.raises(bps.InvalidArgumentError, match=r"sparse= names 'other', which no parameter has"):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sparse=["other"])
    with pytest.raises(bps.InvalidTensorError, match=r"the gradient of '0.weight' is sparse") as caught:
        model(torch.tensor([1])).sum().backward()
    del optimizer
    assert "pass sparse=['0.weight'] to DistributedOptimizer" in caught.value.hint


@harness.on_ranks(workers=2)
def test_exact_means_of_complex_and_sparse_gradients_are_refused(bps: Any) -> None:
    for make, kind in ((habits.Waves, "'turn' are complex"), (habits.Words, "'words.weight' are sparse")):
        with pytest.raises(bps.InvalidTensorError, match=kind):
            DistributedDataParallel(make(), exact=True)


@harness.on_ranks(workers=2)
def test_embeddings_that_change_their_weight_in_forward_are_refused(bps: Any) -> None:
    """Each rank would change other rows. One alone may do so, and a frozen weight is the same wherever it is used."""
    for kind in (nn.Embedding, nn.EmbeddingBag):
        model = nn.Sequential(kind(4, 2, max_norm=1.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wraps: list[tuple[Callable[[], Any], str]] = [
            (lambda model=model: DistributedDataParallel(model), "'0' is"),
            (lambda optimizer=optimizer: DistributedOptimizer(optimizer), "'parameter 0' is a parameter of"),
            (lambda model=model, optimizer=optimizer: CrossBarrier(model, optimizer), "'0' is"),
        ]
        for wrap, what in wraps:
            with pytest.raises(bps.InvalidArgumentError, match=f"{what} an {kind.__name__} with max_norm") as caught:
                wrap()
            assert "weight.data.renorm_(2, 0, 1)" in caught.value.hint
        DistributedDataParallel(model, group=bps.new_group([bps.rank()]))
        DistributedDataParallel(model.requires_grad_(False))
