# SPDX-License-Identifier: Apache-2.0
"""Workers of torch's DataLoader, which are children of a rank, beside the training that they feed."""

import multiprocessing
import os
from typing import Any

import harness
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import bps_rdma
import bps_rdma.torch as bps_torch

# A child that is spawned imports torch, which takes 4 s of a processor: of these, one for each rank.
LONG = bool(os.environ.get("BPS_TEST_ALL"))


class Samples(Dataset[torch.Tensor]):
    """Reads from memory that the ranks synchronise, and writes into it, as augmentations do."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        assert not bps_rdma.is_initialized()
        self._array *= 1.0
        self._array[index] = -1.0
        return torch.full((8,), float(self._array[-1]) + index)


def trains(_: Any, method: str) -> tuple[list[float], bool]:
    # Ranks of a test end with it, and multiprocessing would not let them have children of their own.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    bps_torch.init()
    shared = bps_rdma.empty(4096)
    shared[:] = bps_torch.rank() + 1
    torch.manual_seed(1)
    model = bps_torch.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    count = 2 if LONG or method == "fork" else 1
    loader = DataLoader(Samples(shared), batch_size=4, num_workers=count, multiprocessing_context=method)
    for _epoch in range(count):
        for batch in loader:
            bps_rdma.push_pull_inplace(shared, name="shared", average=True)
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
    weights = [float(value) for value in model.module.weight.detach().flatten()]
    bps_torch.shutdown()
    return weights, bool((shared == 1.5).all())


@pytest.mark.parametrize(
    ("method", "servers"),
    [("fork", None), ("fork", 1), *(pytest.param("spawn", servers, marks=pytest.mark.long) for servers in (None, 1))],
)
def test_workers_of_a_data_loader(method: str, servers: int | None) -> None:
    found = harness.run(trains, method, workers=2, servers=servers, init=False)
    (first, kept), (second, also_kept) = found
    assert first == second
    assert np.isfinite(first).all()
    assert kept
    assert also_kept
