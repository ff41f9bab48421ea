# SPDX-License-Identifier: Apache-2.0
"""The modes of torch that hold where a forward runs, and must not hold for an update that is made in it."""

from __future__ import annotations

import contextlib

import torch


def as_in_step(default: torch.device) -> contextlib.ExitStack:
    """A context in which an optimizer steps as it does outside of a forward.

    State that it makes in inference mode could not be changed later. Under autocast products would be rounded, and
    under another default device counters of steps would lie there.

    Args:
        default: the default device that held when the script called step().
    """
    stack = contextlib.ExitStack()
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    if torch.get_default_device() != default:
        stack.enter_context(default)
    return stack
