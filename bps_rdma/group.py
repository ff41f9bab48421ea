# SPDX-License-Identifier: Apache-2.0
"""A group of workers, as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Group:
    """Worker ranks that synchronise among themselves.

    When a job goes on without a lost member (RoundAbortedError), its groups change with it: a group that you hold then
    has the ranks that are left, under the numbers of the next view.

    Attributes:
        id: the number under which all members know it; 0 is the world.
        ranks: worker ranks, ascending.
    """

    id: int
    ranks: tuple[int, ...]

    _own_rank: ClassVar[Callable[[], int]]  # of this worker; the module job, which knows groups, gives it

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
        return self.ranks.index(Group._own_rank())

    def __hash__(self) -> int:
        """The same for all groups: a group changes, and must be found again where it was put before."""
        return hash(Group)

    def __deepcopy__(self, _: object) -> Group:
        """The group itself, which goes with the job."""
        return self

    def _become(self, other: Group) -> None:
        """Takes the values of the group that stands in its place in the next view."""
        object.__setattr__(self, "id", other.id)
        object.__setattr__(self, "ranks", other.ranks)
