# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of what compression remembers of gradients between steps; see docs/compression.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bps_rdma import job
from bps_rdma.arrays import core_dtype
from bps_rdma.compression import Codec
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.group import Group
from bps_rdma.operations.feedback import feedback_state, load_feedback_state
from bps_rdma.operations.options import EXACT
from bps_rdma.torch import transfer
from bps_rdma.torch.plan import Unit
from bps_rdma.torch.units import IndexedParameter, Sent
from bps_rdma.uncompressed import COMPRESSIBLE

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
            for key, value in feedback_state(_piece_of(like, elements), piece, group=group).items()
        }
        for piece, elements in _pieces_that_remember(name, like, wanted)
    }


def check_tensor(state: State, name: str, like: torch.Tensor, wanted: str | None) -> None:
    """Raises InvalidArgumentError if load_tensor() would find a state of something else. Not collective."""
    ours = {piece.removeprefix(name) for piece, _ in _pieces_that_remember(name, like, wanted)}
    if ours != set(state):
        raise InvalidArgumentError(
            f"the state is not one of {name!r}: it has {len(state)} pieces, and there are {len(ours)}",
            "use the compression, the device, BPS_GPU_CHUNK_BYTES and BPS_MIN_COMPRESS_BYTES that it was saved with",
        )


def load_tensor(state: State, name: str, like: torch.Tensor, wanted: str | None, group: Group | None) -> None:
    """Makes further push_pulls go on from what of_tensor() gave; from nothing, where that is {}. A collective call."""
    for piece, elements in _pieces_that_remember(name, like, wanted):
        arrays = {part: value.numpy() for part, value in state.get(piece.removeprefix(name), {}).items()}
        load_feedback_state(_piece_of(like, elements), piece, arrays, group=group)


def save(units: Sequence[Unit], sent: Sent, generation: int) -> dict[str, Any]:
    """{"generation", "order": names of the parameters in the order of the units, "units": name -> of_tensor()}."""
    states = {_short(unit, sent): of_tensor(*unit.declaration(), sent.group) for unit in units}
    return {
        "generation": generation,
        "order": [entry.name for unit in units for entry in unit.entries],
        "units": {name: state for name, state in states.items() if state},
    }


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


def _piece_of(like: torch.Tensor, elements: int) -> torch.Tensor:
    return torch.empty(elements, dtype=like.dtype, device="cpu")


def _pieces_that_remember(name: str, like: torch.Tensor, wanted: str | None) -> list[tuple[str, int]]:
    # The declaration decides, because it is the same on all ranks; the use by this rank in this view may differ.
    dtype = core_dtype(like.dtype)
    if dtype not in COMPRESSIBLE:
        return []

    def remembers(elements: int) -> bool:
        text = job.current().compression(dtype, elements, wanted)
        if text in ("", EXACT):
            return False
        codec = Codec(text)
        return codec.feedback or codec.momentum != 0

    return [(piece, elements) for piece, elements in transfer.core_operations(name, like) if remembers(elements)]


def _short(unit: Unit, sent: Sent) -> str:
    return unit.name.removeprefix(sent.prefix)
