"""Adapters (LoRA) that silently never train, and the cure.

Full recomputation checkpoints a layer by an autograd function whose output needs a gradient only if a tensor input
does. With a frozen embedding the first stage's input does not, so the layer's trained parameters get no gradient, and
nobody says so; at any pipeline size, for the first stage.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch


def let_embeddings_pass_gradients(model: torch.nn.Module) -> int:
    """The cure: makes the outputs of frozen embeddings need a gradient while training.

    Args:
        model: a model or chunk of Megatron's, wrapped or not.

    Returns:
        How many embeddings have been changed.
    """

    def need_gradient(module: torch.nn.Module, _: Any, output: Any) -> Any:
        wanted = module.training and torch.is_grad_enabled() and isinstance(output, torch.Tensor)
        return output.requires_grad_(True) if wanted and not output.requires_grad else output

    changed = 0
    for name, module in model.named_modules():
        # Megatron's GPTModel.embedding; it has parameters on the first stage only.
        parameters = list(module.parameters())
        if name.rsplit(".", 1)[-1] == "embedding" and parameters and not any(p.requires_grad for p in parameters):
            module.register_forward_hook(need_gradient)
            changed += 1
    return changed


def warn_of_untrained(models: Iterable[torch.nn.Module]) -> list[str]:
    """Looks at the gradients of a step, before the optimizer uses them; warns of trained parameters that got none.

    Args:
        models: model chunks, as train_step() has them.

    Returns:
        The names of the parameters whose gradient is zero throughout, or missing.
    """
    missing = []
    for model in models:
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            gradient = getattr(parameter, "main_grad", None)
            if gradient is None:
                gradient = parameter.grad
            if gradient is None or not bool(gradient.any()):
                missing.append(name)
    if missing:
        warnings.warn(
            f"{len(missing)} trained parameters got no gradient in this step, {missing[0]} among them. With full "
            "recomputation and a frozen embedding they never will: call "
            "bps_rdma.megatron.let_embeddings_pass_gradients(model), or recompute selectively.",
            stacklevel=2,
        )
    return missing
