# SPDX-License-Identifier: Apache-2.0
"""Steps under torch's GradScaler of ranks that train alone: one that finds an infinity makes an empty step.

The scaler leaves the step of an ordinary optimizer out. Ranks that count their steps would then meet in different ones.
An optimizer with `_step_supports_amp_scaling` is called instead, and finds `grad_scale` and `found_inf` among its
attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def scaled_step(asked: Any, step: Callable[[], Any], parameters: Iterable[torch.Tensor]) -> Any:
    """Makes the step, of gradients without their scale; none where an infinity was found.

    Args:
        asked: what the scaler called.
        step: makes the step.
        parameters: whose gradients are used.
    """
    found, scale = getattr(asked, "found_inf", None), getattr(asked, "grad_scale", None)
    if found is not None and bool(found):
        return None
    if scale is not None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(scale.to(parameter.grad.device))
        asked.grad_scale = None  # not once more, by an optimizer that knows of scales
    return step()
