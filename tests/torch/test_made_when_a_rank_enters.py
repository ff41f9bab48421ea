# SPDX-License-Identifier: Apache-2.0
"""Wrappers that are made in the view in which a rank has entered: nobody waits for one that may be beyond this."""

import restarted

MAKE = """
inner = torch.nn.Linear(8, 3)
model = bps.DistributedDataParallel(inner)
optimizer = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9)
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
weights = [p.double().sum().item().hex() for each in [*more, late, state] for p in each.model.parameters()]
momentum = sum(s["momentum_buffer"].double().sum().item() for s in optimizer.state.values())
sys.stdout.write(f"end: {begun_at} {state.step} {len(more)} {weights} {momentum.hex()}\\n")
"""


def test_wrappers_that_are_made_beside_a_rank_that_has_just_entered(tmp_path):
    ends = restarted.ends_of(tmp_path, make=MAKE, loss="train_more(generator)", end=END)
    assert sorted(int(end[1]) for end in ends)[:2] == [0, 0]
    assert max(int(end[1]) for end in ends) > 5, "the new rank has gone on where the others were"
    assert len({tuple(end[2:]) for end in ends}) == 1, "all have the same step, weights and momentum, to the bit"
    assert ends[0][3] == "2"
