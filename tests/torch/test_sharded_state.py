# SPDX-License-Identifier: Apache-2.0
"""ShardedOptimizer: states are those of the plain optimizer, and move between worlds of different sizes."""

import copy
from typing import Any

import harness
import pytest
import torch
from sharded_model import Model, assert_same, assert_same_models, bytes_of_state, train

import bps_rdma.torch as bps_torch
from bps_rdma.torch import ShardedOptimizer, broadcast_objects


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long), 3])
@harness.on_ranks("workers")
def test_states_move_between_sharded_and_plain(bps: Any) -> None:
    model, reference = Model(), Model()
    make = {"lr": 0.01, "amsgrad": True}
    sharded = ShardedOptimizer(model.parameters(), torch.optim.Adam, **make)
    plain = torch.optim.Adam(reference.parameters(), **make)
    assert_same(sharded.state_dict(), plain.state_dict())  # before any step
    train(model, sharded, range(3))
    train(reference, plain, range(3))
    sharded.param_groups[0]["lr"] = plain.param_groups[0]["lr"] = 0.02

    whole = copy.deepcopy(sharded.state_dict())
    on_last = sharded.state_dict(root=bps.size() - 1)
    if bps.rank() == bps.size() - 1:
        assert_same(on_last, whole)
    else:
        assert on_last == {}

    # from sharded to plain, and from plain to sharded
    into_plain = Model()
    into_plain.load_state_dict(model.state_dict())
    plain_again = torch.optim.Adam(into_plain.parameters(), lr=1.0)
    plain_again.load_state_dict(copy.deepcopy(whole))
    into_sharded = Model()
    into_sharded.load_state_dict(reference.state_dict())
    sharded_again = ShardedOptimizer(into_sharded.parameters(), torch.optim.Adam, lr=1.0)
    sharded_again.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert sharded_again.param_groups[0]["lr"] == 0.02
    assert bytes_of_state(sharded_again) == bytes_of_state(sharded)
    for each, optimizer in (
        (model, sharded), (reference, plain), (into_plain, plain_again), (into_sharded, sharded_again),
    ):  # fmt: skip
        train(each, optimizer, range(3, 6))
    for each, optimizer in ((reference, plain), (into_plain, plain_again), (into_sharded, sharded_again)):
        assert_same_models(each, model)
        state = optimizer.state_dict()
        assert_same(state, sharded.state_dict())


@harness.on_ranks(workers=3)
def test_ranks_that_do_not_want_the_state_hold_a_window_of_it(bps: Any) -> None:
    broadcast_objects._WINDOW_BYTES = 100_000  # less than a tensor, and room for several of the small ones
    held: list[int] = []
    move = broadcast_objects.broadcast_tensors

    def watched(transfers: Any, group: Any, *, staged: bool = True) -> None:
        if bps.rank() != 1:
            own = {value.data_ptr() for state in sharded.state.values() for value in state.values()}
            held.append(sum(t.tensor.nbytes for t in transfers if t.tensor.data_ptr() not in own))
        move(transfers, group, staged=staged)

    broadcast_objects.broadcast_tensors = watched
    model = Model()
    sharded = ShardedOptimizer(model.parameters(), torch.optim.Adam)
    train(model, sharded, range(1))
    whole = copy.deepcopy(sharded.state_dict())
    held.clear()
    part = sharded.state_dict(root=1)
    if bps.rank() == 1:
        assert_same(part, whole)
    else:
        assert part == {}
        assert len(held) > 2
        assert max(held) <= max(100_000, *(param.nbytes for param in model.parameters()))


def trains_from(bps: Any, state: Any, weights: Any, steps: range) -> Any:
    reference, model = Model(), Model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    train(reference, plain, range(steps.stop))
    sharded = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    if state is not None:
        model.load_state_dict(weights)
        sharded.load_state_dict(state)
    train(model, sharded, steps)
    assert_same_models(model, reference)
    assert_same(sharded.state_dict(), plain.state_dict())
    return sharded.state_dict(), model.state_dict()


def test_a_state_of_three_ranks_goes_on_with_two():
    state, weights = harness.run(trains_from, None, None, range(2), workers=3)[0]
    harness.run(trains_from, state, weights, range(2, 4), workers=2)


@harness.on_ranks(workers=2)
def test_states_and_roots_that_do_not_fit(bps: Any) -> None:
    model = Model()
    sharded = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(ValueError, match="parameter group"):
        sharded.load_state_dict(other.state_dict())
    train(model, sharded, range(1))
    with pytest.raises(bps.InvalidArgumentError, match="root=9"):
        sharded.state_dict(root=9)
    with pytest.raises(bps.MismatchError, match="root 1"):
        sharded.state_dict(root=bps.rank())
    with pytest.raises(bps.InvalidArgumentError, match="load_state_dict"):
        bps_torch.broadcast_optimizer_state(sharded)
