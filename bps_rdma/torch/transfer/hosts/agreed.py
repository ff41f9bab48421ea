# SPDX-License-Identifier: Apache-2.0
"""Which operations the GPUs of a host begin among themselves: decided alike on all ranks, once for each group.

It depends on the setting, which is the same in all processes of a job; on the call; and on where the ranks of the group
compute, which they tell each other at their first such operation.
"""

from __future__ import annotations

import hashlib
import threading
from typing import NamedTuple

import numpy as np
import torch

import bps_rdma
from bps_rdma import Group, _core, job
from bps_rdma.errors import InvalidTensorError
from bps_rdma.hosts import host_identity
from bps_rdma.operations import OperationOptions, ReduceOp, start
from bps_rdma.torch.transfer.device import Device
from bps_rdma.torch.transfer.hosts.plan import APART, Plan, Where, plan_for
from bps_rdma.torch.transfer.hosts.queue import HostQueue

# NCCL and servers reduce these alike. A mean is a sum that is divided, and may be too large for float16 before that.
# The largest must go the way of the mean of its name, to be refused there: see GradientSynchronizer.meet().
_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16})
_SUMMED = _DTYPES | {torch.float16, torch.int64, torch.int32, torch.uint8}
_OPS = frozenset({ReduceOp.sum, ReduceOp.average, ReduceOp.min, ReduceOp.max})
_DIGEST = 16  # bytes


def on_hosts() -> bool:
    """Whether GPUs of a host may come first. Then operations that are started `in_order` have to be.

    Not in jobs that may lose ranks: the collectives of a host would have to be made anew.
    """
    running = job.current()
    return running.config.text("BPS_GPU_HOST_SUM") == "1" and not (running.may_lose_members or running.asynchronous)


def is_summed(tensor: torch.Tensor, op: ReduceOp) -> bool:
    """Whether GPUs of a host reduce such a tensor, which is on a device, first."""
    return op in _OPS and tensor.dtype in (_SUMMED if op is ReduceOp.sum else _DTYPES) and tensor.numel() > 0


class _Made(NamedTuple):
    place: torch.device
    queue: HostQueue | None


class HostQueues:
    """Those of a job, by group; see Job.part()."""

    def __init__(self) -> None:
        self._made: dict[int, _Made] = {}
        self._making = threading.Lock()

    def find(self, device: Device, place: torch.device, members: Group) -> HostQueue | None:
        """That of a group; None: its tensors go as they do without. The first call is a collective one.

        Args:
            device: on which the tensor is.
            place: the same in torch's terms.
            members: the group.

        Raises:
            InvalidTensorError: earlier tensors of the group were on another device.
        """
        with self._making:
            found = self._made.get(members.id)
            if found is None:
                plan = _agree(device, members)
                queue = HostQueue(device, place, members, plan) if isinstance(plan, Plan) else None
                found = self._made[members.id] = _Made(place, queue)
                if isinstance(plan, str) and members.ranks[0] == bps_rdma.rank():
                    say = _core.log_info if plan == APART else _core.log_warning
                    say(f"BPS_GPU_HOST_SUM=1 has no effect on {members}: {plan}")
        if found.queue is not None and found.place != place:
            raise InvalidTensorError(
                f"the tensor is on {place}, and earlier ones of {members} were on {found.place}",
                "use one GPU for each rank, or set BPS_GPU_HOST_SUM=0",
            )
        return found.queue

    def close(self) -> None:
        """Ends all of them."""
        for made in self._made.values():
            if made.queue is not None:
                made.queue.close()


def _agree(device: Device, members: Group) -> Plan | str:
    """Tells the ranks of the group where this one computes; the plan that follows from what they tell."""
    host = f"{host_identity()} {job.current().config.text('BPS_HOST_ID')}"
    gpu = device.identity()
    own = _digest(host) + (_digest(gpu) if gpu else bytes(_DIGEST))
    everyone = np.zeros(len(own) * members.size, np.uint8)
    options = OperationOptions(name=f"sums on hosts {members.id}, where", group=members, awaited=True)
    start.all_gather(np.frombuffer(own, np.uint8), everyone, options).wait()
    parts = [each.tobytes() for each in np.split(everyone, members.size)]
    return plan_for(bps_rdma.rank(), members.ranks, [Where(each[:_DIGEST], each[_DIGEST:]) for each in parts])


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest()
