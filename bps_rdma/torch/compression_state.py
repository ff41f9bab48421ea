# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of what compression remembers of gradients between steps; see docs/compression.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bps_rdma import job
from bps_rdma.compression import Codec
from bps_rdma.errors import InvalidArgumentError
from bps_rdma.operations import feedback_state, load_feedback_state
from bps_rdma.operations.compressed import EXACT, NONE
from bps_rdma.torch import transfer
from bps_rdma.torch.units import Place, Sent, Unit


def save(units: Sequence[Unit], sent: Sent, generation: int) -> dict[str, Any]:
    """{"generation", "order": names of the parameters in the order of the units, "units": name -> feedback_state()}.

    Arrays are torch tensors, which torch.save() and torch.load(weights_only=True) take.

    Raises:
        InvalidArgumentError: the gradients are on a device.
    """
    states = {}
    for unit in _remembering(units, sent):
        name, like, _ = unit.declaration()
        state = feedback_state(like, name, sent.group)
        states[_short(name, sent)] = {key: torch.from_numpy(value) for key, value in state.items()}
    return {"generation": generation, "order": [p.name for unit in units for p in unit.places], "units": states}


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
        InvalidArgumentError: they are not the same units, or the gradients are on a device.
    """
    ours = {_short(unit.declaration()[0], sent): unit for unit in _remembering(units, sent)}
    if set(ours) != set(state["units"]):
        raise InvalidArgumentError(
            "the state is one of other buckets, or of another compression",
            "use the strategy, bucket_mb, compression and BPS_MIN_COMPRESS_BYTES that it was saved with",
        )
    for key, unit in ours.items():
        name, like, _ = unit.declaration()
        arrays = {part: value.numpy() for part, value in state["units"][key].items()}
        load_feedback_state(like, name, arrays, sent.group)


def _remembering(units: Sequence[Unit], sent: Sent) -> list[Unit]:
    found = []
    tensors, members = job.current().tensors, transfer.members_of(sent.group).id
    for unit in units:
        # As the job knows it: it may be that of BPS_COMPRESSION.
        tensor = tensors.get((members, unit.name))
        text = "" if tensor is None else tensor.compression
        if text in ("", NONE, EXACT):
            continue
        codec = Codec(text)
        if not codec.feedback and codec.momentum == 0:
            continue
        if transfer.device_of(unit.places[0].parameter) is not None:
            raise InvalidArgumentError(
                "what is remembered of gradients on a device cannot be saved", "call it for a model on the CPU"
            )
        found.append(unit)
    return found


def _short(name: str, sent: Sent) -> str:
    return name.removeprefix(sent.prefix)
