# SPDX-License-Identifier: Apache-2.0
"""A group of workers, as a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar


class Group:
    """Worker ranks that synchronise among themselves.

    When a job goes on without a lost member (RoundAbortedError), its groups change with it: a group that you hold then
    has the ranks that are left, under the numbers of the next view. Reading them takes this process into that view, as
    calling rank() and size() of bps_rdma does.
    """

    __slots__ = ("__weakref__", "_id", "_ranks")
    # The module job, which knows views, gives these.
    _go_on: ClassVar[Callable[[], None]]  # into the next view, if it is time
    _own_rank: ClassVar[Callable[[], int]]  # of this worker

    def __init__(self, id: int, ranks: tuple[int, ...]) -> None:  # noqa: A002  as printed
        self._id = id
        self._ranks = ranks

    @property
    def id(self) -> int:
        """The number under which all members know it; 0 is the world."""
        Group._go_on()
        return self._id

    @property
    def ranks(self) -> tuple[int, ...]:
        """Worker ranks, ascending."""
        Group._go_on()
        return self._ranks

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """The place of this worker among the ranks, from 0.

        Raises:
            NotInitializedError: this process is in no job. ValueError: this worker is not in the group.
        """
        own = Group._own_rank()  # first: it may take this process into the next view
        return self._ranks.index(own)

    def __eq__(self, other: object) -> bool:
        """Whether they have the same number and ranks."""
        return isinstance(other, Group) and (self._id, self._ranks) == (other._id, other._ranks)

    def __hash__(self) -> int:
        """The same for all groups: a group changes, and must be found again where it was put before."""
        return hash(Group)

    def __repr__(self) -> str:
        """Its number and ranks in the present view."""
        return f"Group(id={self._id}, ranks={self._ranks})"

    def __deepcopy__(self, _: object) -> Group:
        """The group itself, which goes with the job."""
        return self

    def _become(self, other: Group) -> None:
        """Takes the values of the group that stands in its place in the next view."""
        self._id, self._ranks = other._id, other._ranks
