# SPDX-License-Identifier: Apache-2.0
"""Wrappers that are made in the view in which a rank has entered: nobody waits for one that may be beyond this."""

from __future__ import annotations

import restarted

MAKE = """
inner = torch.nn.Linear(8, 3)
model = bps.DistributedDataParallel(inner)
optimizer = torch.optim.SGD(inner.parameters(), lr=0.05)
# Too large for all values to be compared. The rank that enters makes it when the others have made it before, and none
# trains it at first.
kept = torch.nn.Linear(8, 2000)
late = bps.TrainingState(bps.DistributedDataParallel(kept), torch.optim.SGD(kept.parameters(), lr=0.01))
more = []


def make_more():
    one, other = torch.nn.Linear(8, 40), torch.nn.Linear(8, 3)
    wrapped = bps.DistributedDataParallel(one)
    sharded = bps.ShardedOptimizer([one.weight], torch.optim.AdamW, lr=0.01)
    sharded.add_param_group({"params": [one.bias], "lr": 0.02})
    alone = bps.DiLoCo(torch.optim.SGD(other.parameters(), lr=0.05), every=1)
    more[:] = bps.TrainingState(wrapped, torch.optim.SGD(one.parameters(), lr=0.01)), bps.TrainingState(other, alone)
    more[0].sync()
    more[0].optimizer = sharded


def train_more(generator):
    if not more and died.exists() and bps.size() == 3:
        make_more()
    late.sync()
    for each in [*more, late] if more else []:
        each.sync()
        each.optimizer.zero_grad()
        each.model(torch.randn(16, 8, generator=generator)).square().mean().backward()
        each.optimizer.step()
    return model(torch.randn(16, 8, generator=generator)).square().mean()
"""
END = """
weights = [p.double().sum().item().hex() for each in [*more, late] for p in each.model.parameters()]
sys.stdout.write(f"end: {state.step} {len(more)} {weights}\\n")
"""


def test_wrappers_that_are_made_beside_a_rank_that_has_just_entered(tmp_path):
    ends = restarted.ends_of(tmp_path, make=MAKE, loss="train_more(generator)", end=END)
    assert len({tuple(end) for end in ends}) == 1, "all have the same step and weights, to the bit"
    assert ends[0][2] == "2"
