# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of what compression remembers of gradients between steps; see docs/compression.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bps_rdma import job
from bps_rdma.arrays import core_dtype
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.group import Group
from bps_rdma.operations.feedback import feedback_state, load_feedback_state
from bps_rdma.operations.restored_feedback import SAVED_BY
from bps_rdma.torch import transfer
from bps_rdma.torch.plan import Unit
from bps_rdma.torch.units import Bucket, IndexedParameter, Sent
from bps_rdma.uncompressed import COMPRESSIBLE, remembers

State = Mapping[str, Mapping[str, torch.Tensor]]  # the pieces of a tensor, by what their names add to its own


def of_tensor(name: str, like: torch.Tensor, wanted: str | None, group: Group | None) -> State:
    """Returns the feedback of push_pulls of this name and this tensor; {} for a method that keeps none.

    A collective call. A tensor that is staged is sent in pieces, each with a name and a memory of its own.

    Args:
        name, like, wanted: as they were declared; see Unit.declaration().

    Returns:
        feedback_state() of each piece, as torch tensors, which torch.save() and torch.load(weights_only=True) take.
    """
    return {
        piece.removeprefix(name): {
            key: torch.from_numpy(value)
            for key, value in feedback_state(_piece_of(like.dtype, elements), piece, group=group).items()
        }
        for piece, _, elements in _pieces_that_remember(name, like, wanted)
    }


def check_tensor(state: State, name: str, like: torch.Tensor, wanted: str | None) -> None:
    """Raises InvalidArgumentError if load_tensor() would find a state of something else. Not collective."""
    ours = {piece.removeprefix(name) for piece, _, _ in _pieces_that_remember(name, like, wanted)}
    if ours != set(state):
        raise InvalidArgumentError(
            f"the state is not one of {name!r}: it has {len(state)} pieces, and there are {len(ours)}",
            "use the compression, the device, BPS_GPU_CHUNK_BYTES and BPS_MIN_COMPRESS_BYTES that it was saved with",
        )


def load_tensor(state: State, name: str, like: torch.Tensor, wanted: str | None, group: Group | None) -> None:
    """Makes further push_pulls go on from what of_tensor() gave; from nothing, where that is {}. A collective call."""
    for piece, _, elements in _pieces_that_remember(name, like, wanted):
        arrays = {part: value.numpy() for part, value in state.get(piece.removeprefix(name), {}).items()}
        load_feedback_state(_piece_of(like.dtype, elements), piece, arrays, group=group)


def save(units: Sequence[Unit], sent: Sent, generation: int) -> dict[str, Any]:
    """{"generation", "order": names of the parameters in the order of the units, "units": name -> of_tensor()}."""
    states = {_short(unit, sent): of_tensor(*unit.declaration(), sent.group) for unit in units}
    return {
        "generation": generation,
        "order": [entry.name for unit in units for entry in unit.entries],
        "units": {name: state for name, state in states.items() if state},
    }


class Place(NamedTuple):
    """Where the elements of a parameter lie in a unit: [begin, end), in the order of the entry's strides."""

    begin: int
    end: int
    entry: IndexedParameter | None  # None: one row after the other

    def is_like(self, other: Place) -> bool:
        """Whether the same element comes at the same place."""
        ours, theirs = (None if one.entry is None else one.entry.strides for one in (self, other))
        return self.end - self.begin == other.end - other.begin and ours == theirs


class Kept(NamedTuple):
    """Where a unit remembers something of its parameters, as it was declared: they may have other shapes later.

    Attributes:
        dtype, elements: of what is sent.
        pieces: name, first element and elements of each operation that remembers something.
        places: of each parameter, by its id.
    """

    dtype: torch.dtype
    elements: int
    pieces: list[tuple[str, int, int]]
    places: dict[int, Place]

    @classmethod
    def of(cls, unit: Unit) -> Kept:
        """That of a unit which is about to be declared."""
        name, like, wanted = unit.declaration()
        places = {
            id(entry.parameter): Place(begin, end, entry if isinstance(unit, Bucket) else None)
            for entry, (begin, end) in unit.places.items()
        }
        return cls(like.dtype, like.numel(), _pieces_that_remember(name, like, wanted), places)


def carry(before: Sequence[Kept], now: Sequence[Kept], group: Group | None) -> None:
    """Gives other units of the same parameters what the ones before remember of each. A collective call."""
    remembered: dict[int, tuple[Place, dict[str, npt.NDArray[Any]]]] = {}
    for unit in before:
        flat: dict[str, npt.NDArray[Any]] = {}
        for piece, begin, elements in unit.pieces:
            state = feedback_state(_piece_of(unit.dtype, elements), piece, group=group)
            for key in set(state) - {SAVED_BY}:
                flat.setdefault(key, np.zeros(unit.elements, np.float32))[begin : begin + elements] = state[key]
        for parameter, place in unit.places.items():
            remembered[parameter] = place, {key: value[place.begin : place.end] for key, value in flat.items()}
    for unit in now:
        flat = {}
        for parameter, place in unit.places.items():
            known, values = remembered.get(parameter, (place, {}))
            if known.is_like(place):  # otherwise it has another shape or memory format now
                for key, value in values.items():
                    flat.setdefault(key, np.zeros(unit.elements, np.float32))[place.begin : place.end] = value
        for piece, begin, elements in unit.pieces:
            part = {key: value[begin : begin + elements] for key, value in flat.items()}
            load_feedback_state(_piece_of(unit.dtype, elements), piece, part, group=group)


def order(state: Mapping[str, Any], entries: Sequence[IndexedParameter]) -> list[IndexedParameter]:
    """The parameters in the order that they had in the units.

    Raises:
        InvalidArgumentError: they are others.
    """
    by_name = {entry.name: entry for entry in entries}
    if sorted(state["order"]) != sorted(by_name):
        raise InvalidArgumentError(
            f"the state is one of {len(state['order'])} parameters, which are not the {len(entries)} that there are",
            "load what was saved of the same model",
        )
    return [by_name[name] for name in state["order"]]


def load(state: Mapping[str, Any], units: Sequence[Unit], sent: Sent) -> None:
    """Makes units go on from what save() gave.

    Raises:
        InvalidArgumentError: they are not the same units.
    """
    ours = {_short(unit, sent): unit for unit in units}
    if not set(state["units"]) <= set(ours):
        raise InvalidArgumentError(
            "the state is one of other buckets, or of another compression",
            "use the strategy, bucket_mb, compression and BPS_MIN_COMPRESS_BYTES that it was saved with",
        )
    for name, unit in ours.items():
        check_tensor(state["units"].get(name, {}), *unit.declaration())
    for name, unit in ours.items():
        load_tensor(state["units"].get(name, {}), *unit.declaration(), sent.group)


def _piece_of(dtype: torch.dtype, elements: int) -> torch.Tensor:
    return torch.empty(elements, dtype=dtype, device="cpu")


def _pieces_that_remember(name: str, like: torch.Tensor, wanted: str | None) -> list[tuple[str, int, int]]:
    # Name, first element and elements of each. The declaration decides, because it is the same on all ranks; the use by
    # this rank in this view may differ.
    dtype = core_dtype(like.dtype)
    if dtype not in COMPRESSIBLE:
        return []
    found, begin = [], 0
    for piece, elements in transfer.core_operations(name, like):
        if remembers(job.current().compression(dtype, elements, wanted)):
            found.append((piece, begin, elements))
        begin += elements
    return found


def _short(unit: Unit, sent: Sent) -> str:
    return unit.name.removeprefix(sent.prefix)
