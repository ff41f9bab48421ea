# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of what compression remembers of gradients between steps; see docs/compression.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from bps_rdma import job
from bps_rdma.compression import Codec
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.group import Group
from bps_rdma.operations import feedback_state, load_feedback_state
from bps_rdma.operations.compressed import EXACT, NONE
from bps_rdma.torch import transfer
from bps_rdma.torch.units import Place, Sent, Unit


def of_tensor(name: str, like: torch.Tensor, group: Group | None) -> dict[str, dict[str, torch.Tensor]]:
    """What push_pulls of this name and this float32 tensor remember; {} for a method that remembers nothing.

    A collective call. A tensor on a device is sent in pieces, each with a name and a memory of its own.

    Returns:
        name -> feedback_state(), as torch tensors, which torch.save() and torch.load(weights_only=True) take.
    """
    return {
        piece: {
            key: torch.from_numpy(value)
            for key, value in feedback_state(np.empty(elements, np.float32), piece, group).items()
        }
        for piece, elements in transfer.pieces(name, like)
        if _remembers(piece, group)
    }


def load_tensor(
    state: Mapping[str, Mapping[str, torch.Tensor]], name: str, like: torch.Tensor, group: Group | None
) -> None:
    """Makes further push_pulls go on from what of_tensor() gave. A collective call.

    Raises:
        InvalidArgumentError: it was another tensor, or compressed in another way.
    """
    ours = {piece: elements for piece, elements in transfer.pieces(name, like) if _remembers(piece, group)}
    if set(ours) != set(state):
        raise InvalidArgumentError(
            f"the state is not one of {name!r}: it has {len(state)} pieces, and there are {len(ours)}",
            "use the compression, the device, BPS_GPU_CHUNK_BYTES and BPS_MIN_COMPRESS_BYTES that it was saved with",
        )
    for piece, elements in ours.items():
        arrays = {part: value.numpy() for part, value in state[piece].items()}
        load_feedback_state(np.empty(elements, np.float32), piece, arrays, group)


def save(units: Sequence[Unit], sent: Sent, generation: int) -> dict[str, Any]:
    """{"generation", "order": names of the parameters in the order of the units, "units": name -> of_tensor()}."""
    states = {_short(unit, sent): of_tensor(*unit.declaration()[:2], sent.group) for unit in units}
    return {
        "generation": generation,
        "order": [place.name for unit in units for place in unit.places],
        "units": {
            unit: {piece.removeprefix(sent.prefix): one for piece, one in state.items()}
            for unit, state in states.items()
            if state
        },
    }


def order(state: Mapping[str, Any], places: Sequence[Place]) -> list[Place]:
    """The parameters in the order that they had in the units.

    Raises:
        InvalidArgumentError: they are others.
    """
    by_name = {place.name: place for place in places}
    if sorted(state["order"]) != sorted(by_name):
        raise InvalidArgumentError(
            f"the state is one of {len(state['order'])} parameters, which are not the {len(places)} that there are",
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
        saved = {f"{sent.prefix}{piece}": one for piece, one in state["units"].get(name, {}).items()}
        load_tensor(saved, *unit.declaration()[:2], sent.group)


def _remembers(name: str, group: Group | None) -> bool:
    # As the job knows it: it may be that of BPS_COMPRESSION.
    tensor = job.current().tensors.get((transfer.members_of(group).id, name))
    text = "" if tensor is None else tensor.compression
    if text in ("", NONE, EXACT):
        return False
    codec = Codec(text)
    return codec.feedback or codec.momentum != 0


def _short(unit: Unit, sent: Sent) -> str:
    return unit.name.removeprefix(sent.prefix)
