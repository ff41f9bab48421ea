"""push_pull and its relatives on tensors, with BytePS's semantics, and joining the job over a group of torch's."""

from __future__ import annotations

from typing import Any

import cluster
import pytest

pytestmark = pytest.mark.timeout(300)


def gradients(bps: Any) -> None:
    import torch

    import bps_rdma.torch as bps_torch

    rank, size = bps.rank(), bps.size()
    for average in (False, True):
        x = torch.full((5,), float(rank + 1), requires_grad=True)
        y = bps_torch.push_pull(x, average=average)
        assert torch.equal(y, torch.full((5,), sum(range(size + 1)) / (size if average else 1)))
        # d(sum over ranks r of r * y) / dx: the gradients of all ranks arrive, summed or averaged.
        (y * rank).sum().backward()
        assert torch.equal(x.grad, torch.full((5,), sum(range(size)) / (size if average else 1)))
        assert not bps_torch.push_pull(x.detach()).requires_grad


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_gradients_flow_through_push_pull(workers):
    cluster.run(gradients, workers=workers)
