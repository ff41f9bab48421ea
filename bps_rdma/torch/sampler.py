# SPDX-License-Identifier: Apache-2.0
"""ElasticSampler: which samples a rank reads, in a job whose members may change in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch

from bps_rdma import job
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.torch import membership


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides each epoch's samples among the ranks, and what is left of them again when the ranks have changed.

    Example::

        sampler = bps.ElasticSampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        state = bps.TrainingState(model, optimizer, sampler=sampler, epoch=0)
        while state.epoch < epochs:
            try:
                state.sync()
                sampler.set_epoch(state.epoch)
                for inputs, targets in loader:
                    train(inputs, targets)
                    sampler.record(len(inputs))
                state.epoch += 1
            except bps.RoundAbortedError:
                optimizer.zero_grad()

    An iteration that begins after a change goes on with the samples that no step has used. Samples of steps that were
    aborted are read again, so that each sample is used once in an epoch, however often the ranks change. All ranks get
    equally many; as torch's DistributedSampler does, some samples are used twice where the number of ranks does not
    divide what is left.

    Args:
        dataset: what is sampled; only its length counts.
        shuffle: another order in each epoch, the same on all ranks; otherwise the dataset's order.
        seed: of the order, the same on all ranks.

    Source: the name is that of Horovod's, which does the same for its jobs.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        membership.init()
        self.samples = len(dataset)
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.position = 0  # how many of the epoch's samples all ranks together have used

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch; one that has begun goes on."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def record(self, samples: int) -> None:
        """Notes that a step has used so many samples on each rank. All ranks call it, after the optimizer's step."""
        if samples < 0:
            raise InvalidArgumentError(f"record({samples}): a step uses no negative number of samples", "")
        self.position = min(self.samples, self.position + samples * job.size())

    def __iter__(self) -> Iterator[int]:
        """The indices of this rank's samples, from where the epoch is."""
        order = self._order()[self.position :]
        size = job.size()
        order += [order[i % len(order)] for i in range(-len(order) % size)]
        return iter(order[job.rank() :: size])

    def __len__(self) -> int:
        """The samples that an iteration which begins now has for this rank."""
        size = job.size()
        return (self.samples - self.position + size - 1) // size

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.samples))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.samples, generator=generator, device="cpu").tolist()

    def state_dict(self) -> dict[str, Any]:
        """The position of the sampler; the same on all ranks."""
        return {"epoch": self.epoch, "position": self.position, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved position, with any number of ranks."""
        self.epoch, self.position, self.seed = int(state["epoch"]), int(state["position"]), int(state["seed"])
