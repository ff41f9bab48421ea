# SPDX-License-Identifier: Apache-2.0
"""A torch.distributed process group over bps_rdma; it contains NCCL if CUDA tensors are left to that."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from bps_rdma import job
from bps_rdma.torch.backend.base_group import c10d, c10d_core
from bps_rdma.torch.backend.group_messages import GroupMessages
from bps_rdma.torch.backend.group_moves import Moves
from bps_rdma.torch.backend.group_sums import Sums
from bps_rdma.torch.backend.work import report_unseen


class BpsProcessGroup(Sums, Moves, GroupMessages):
    """The group that init_process_group("bps") and new_group(backend="bps") return; see docs/torch-backend.md.

    Collectives of one group must be called in the same order, with the same dtypes and sizes, on all of its ranks. If
    they differ, MismatchError is raised at once where the core sees it, and DeadlineError otherwise.

    Args:
        options: torch's DistributedBackendOptions.
        collectives: of our group of the same ranks.
        leaves: whether the job ends with this group.
        cuda: the backend that takes CUDA tensors, "bps" or "nccl"; None: as the name of the group's backend says.
    """

    # ---- Groups of some ranks, as torch.distributed.split_group() makes them where there is an accelerator

    def _set_sequence_number_for_group(self) -> None:
        """Calls are matched without numbers of torch."""

    def get_group_store(self) -> Any:
        """The store that the group was made with."""
        return self._store

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
        device_types: object = None,
    ) -> BpsProcessGroup | None:
        """Makes a group of some ranks of this one, on these; the others get None. It takes what this one takes.

        Args:
            new_ranks: in this group.
            timeout: default: that of this group.
            opts, device_types: of other backends, which are ignored.
            group_name: torch's, which may differ between ranks that have made other groups before.
            group_desc: for people.
        """
        if self.rank() not in new_ranks:
            return None
        collectives = self._collectives.of_some(new_ranks)
        options = c10d_core._DistributedBackendOptions()
        options.store = c10d.PrefixStore(f"{group_name}/", self._store)
        options.group_rank, options.group_size = list(new_ranks).index(self.rank()), len(new_ranks)
        options.global_ranks_in_group = list(collectives.ranks)
        options.timeout = timeout or timedelta(seconds=self._seconds)
        made = BpsProcessGroup(options, collectives, leaves=False, cuda=self.cuda_backend)
        made._set_group_name(group_name)
        made._set_group_desc(group_desc or "undefined")
        return made

    def shutdown(self) -> None:
        """Called by destroy_process_group(); a default group that has joined the job leaves it, waiting for nobody.

        The others go on: what they need of this process stays until they have left, too.
        """
        report_unseen()
        super().shutdown()
        if self._leaves:
            self._leaves = False
            job.depart(with_it=self._store)

    # ---- Names before torch 2.13

    alltoall_base = GroupMessages.all_to_all_single
    _allgather_base = Moves.all_gather_single
    _reduce_scatter_base = Sums.reduce_scatter_single
    allgather_into_tensor_coalesced = Moves.all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = Sums.reduce_scatter_single_coalesced
