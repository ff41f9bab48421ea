# SPDX-License-Identifier: Apache-2.0
"""ElasticSampler: each sample is used once in an epoch, however often the ranks change."""

import os
import signal
from typing import Any

import harness
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bps_rdma.job
import bps_rdma.torch as bps_torch
from bps_rdma.torch import membership
from bps_rdma.torch.sampler import ElasticSampler

SAMPLES = 96
BATCH = 4


class OneRank:
    """A sampler as rank `number` of `of` would have it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, samples: int, shuffle: bool) -> None:
        self.number, self.of = 0, 1
        monkeypatch.setattr(membership, "init", lambda: None)
        monkeypatch.setattr(bps_rdma.job, "rank", lambda: self.number)
        monkeypatch.setattr(bps_rdma.job, "size", lambda: self.of)
        self.sampler = ElasticSampler(range(samples), shuffle=shuffle)

    def all_ranks(self, size: int) -> list[list[int]]:
        found = []
        for number in range(size):
            self.number, self.of = number, size
            found.append(list(self.sampler))
            assert len(found[-1]) == len(self.sampler)
        return found


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # of an example: a machine may be busy
@given(
    st.integers(1, 60), st.booleans(), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=6)
)  # fmt: skip
def test_each_sample_is_used_once_whatever_happens(samples, shuffle, views):
    """In each view some steps count, of batches of 2; then the ranks change, and the last one reads the rest."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        one = OneRank(monkeypatch, samples, shuffle)
        used: list[int] = []
        for size, steps in [*views, (3, samples)]:
            ranks = one.all_ranks(size)
            assert len({len(of_rank) for of_rank in ranks}) == 1, "all ranks take as many steps"
            for step in range(min(steps, -(-len(ranks[0]) // 2))):
                batches = [of_rank[2 * step : 2 * step + 2] for of_rank in ranks]
                used += [sample for column in zip(*batches, strict=True) for sample in column]
                one.sampler.record(len(batches[0]))
        # What is read twice pads the last step of the epoch.
        assert sorted(used[:samples]) == list(range(samples))
        assert len(used) < samples + 5
        assert len(one.sampler) == 0


def test_epochs_differ_and_are_the_same_on_all_ranks(monkeypatch):
    one = OneRank(monkeypatch, SAMPLES, True)
    (first,) = one.all_ranks(1)
    one.sampler.record(8)
    one.sampler.set_epoch(0)
    assert one.all_ranks(1)[0] == first[8:], "the epoch that has begun goes on"
    state = one.sampler.state_dict()
    one.sampler.set_epoch(1)
    (second,) = one.all_ranks(1)
    assert first != second
    assert sorted(first) == sorted(second)
    one.sampler.load_state_dict(state)
    assert one.all_ranks(1)[0] == first[8:]


def train(bps: Any) -> Any:
    """Rank 1 of 3 is killed in the fourth step. Returns how many ranks and which samples each step had."""
    model = bps_torch.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    data = torch.arange(SAMPLES, dtype=torch.float32).reshape(-1, 1) / SAMPLES
    sampler = bps_torch.ElasticSampler(data)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), BATCH, sampler=sampler)
    generator = torch.Generator().manual_seed(7 + bps.rank())
    state = bps_torch.TrainingState(
        model, optimizer, sampler=sampler, schedule=schedule, generator=generator, used=[], epoch=0
    )
    first = bps.rank()
    while state.epoch < 1:
        try:
            state.sync()
            sampler.set_epoch(state.epoch)
            for (inputs,) in loader:
                if (first, len(state.used)) == (1, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                schedule.step()
                sampler.record(len(inputs))
                state.used.append((bps.size(), (inputs.flatten() * SAMPLES).round().int().tolist()))
            state.epoch += 1
        except bps_torch.RoundAbortedError:
            continue
    return state.used, schedule.last_epoch, torch.rand(1, generator=generator).item(), sampler.state_dict()


def test_the_ranks_that_are_left_read_what_no_step_has_used():
    ranks = harness.run(train, workers=3, env={"BPS_MIN_WORKERS": "2"}, but=[1])
    (ours, steps, drawn, at), (theirs, other_steps, other_drawn, other_at) = ranks
    assert steps == other_steps == len(ours)
    assert drawn == other_drawn, "rank 0's generator"
    assert at == other_at == {"epoch": 0, "position": SAMPLES, "seed": 0}
    assert [size for size, _ in ours] == [3] * 3 + [2] * (len(ours) - 3)
    # sync() gave rank 2 what rank 0 had used; the steps with two ranks are its own.
    after = [sample for used in (ours, theirs) for _, samples in used[3:] for sample in samples]
    before = [sample for _, samples in ours[:3] for sample in samples]
    assert len(set(after)) == SAMPLES - 3 * 3 * BATCH
    assert not set(after) & set(before)
