# SPDX-License-Identifier: Apache-2.0
"""A group of workers, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Worker ranks that synchronise among themselves.

    Attributes:
        id: the number under which all members know it; 0 is the world.
        ranks: worker ranks, ascending.
    """

    id: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)
