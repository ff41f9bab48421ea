# SPDX-License-Identifier: Apache-2.0
"""Finds and cures adapters (LoRA) that get no gradients.

Full recomputation checkpoints a layer by an autograd function whose output needs a gradient only if a tensor input
does. With a frozen embedding the input of the first stage does not, so the trained parameters of that stage get no
gradient, without an error, at any pipeline size.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

_log = logging.getLogger(__name__)
_cured = "_bps_rdma_passes_gradients"  # attribute of an embedding
_said = False


def cure_frozen_embedding(model: torch.nn.Module, config: Any) -> int:
    """let_embeddings_pass_gradients() where it is needed: full recomputation, and some trained parameters.

    Says so once in the log of rank 0.
    """
    global _said
    if getattr(config, "recompute_granularity", None) != "full":
        return 0
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return 0
    changed = let_embeddings_pass_gradients(model)
    if changed and not _said and not (dist.is_initialized() and dist.get_rank()):  # rank 0 has an embedding
        _said = True
        _log.warning(
            "the embedding is frozen and activations are recomputed in full, so trained parameters of the first stage "
            "would get no gradient: its output now requires one (cure_frozen_embeddings=False leaves it)"
        )
    return changed


def let_embeddings_pass_gradients(model: torch.nn.Module) -> int:
    """Makes the outputs of frozen embeddings require a gradient during training, so that adapters get theirs.

    Args:
        model: a model or chunk of Megatron's, wrapped or not.

    Returns:
        The number of embeddings that have been changed.
    """

    def need_gradient(module: torch.nn.Module, _: Any, output: Any) -> Any:
        wanted = module.training and torch.is_grad_enabled() and isinstance(output, torch.Tensor)
        return output.requires_grad_(True) if wanted and not output.requires_grad else output

    changed = 0
    for name, module in model.named_modules():
        # Megatron's GPTModel.embedding; it has parameters on the first stage only.
        parameters = list(module.parameters())
        if hasattr(module, _cured):
            continue
        if name.rsplit(".", 1)[-1] == "embedding" and parameters and not any(p.requires_grad for p in parameters):
            module.register_forward_hook(need_gradient)
            setattr(module, _cured, True)
            changed += 1
    return changed


def watch_first_step(ddp: Any) -> None:
    """Warns after the first backward of trained parameters that it did not reach. Later steps are not checked.

    This uses hooks of autograd and reads nothing from a GPU. A gradient of zeros, as the A matrices of LoRA have at
    first, counts as a gradient.

    Args:
        ddp: a DistributedDataParallel of Megatron's.
    """
    waiting: dict[str, Any] = {}  # name -> the handle of its hook
    delayed = getattr(ddp.ddp_config, "delay_wgrad_compute", False)
    for name, parameter in ddp.module.named_parameters():
        # Some gradients are computed after backward, without hooks.
        if parameter.requires_grad and not (delayed and getattr(parameter, "skip_backward_post_hook", False)):
            waiting[name] = parameter.register_hook(_reached(waiting, name))
    finish = ddp.finish_grad_sync

    @functools.wraps(finish)
    def look_and_finish(*args: Any, **options: Any) -> Any:
        del ddp.finish_grad_sync
        missing = list(waiting)
        for handle in waiting.values():
            handle.remove()
        waiting.clear()
        if missing and ddp.intra_dp_cp_group.rank() == 0:  # the same on all ranks of that group
            _warn(missing)
        return finish(*args, **options)

    ddp.finish_grad_sync = look_and_finish


def _reached(waiting: dict[str, Any], name: str) -> Any:
    def hook(_: torch.Tensor) -> None:
        handle = waiting.pop(name, None)
        if handle is not None:
            handle.remove()

    return hook


def warn_of_untrained(models: Iterable[torch.nn.Module]) -> list[str]:
    """Warns of trained parameters without a gradient. Call it after backward, before the optimizer uses the gradients.

    Models that are made with bps_rdma.megatron enabled are checked in their first step anyway. This function checks the
    values in any step: the A matrices of LoRA have a gradient of zeros as long as the B matrices are zero.

    Args:
        models: model chunks, as train_step() has them.

    Returns:
        The names of the parameters whose gradient is zero throughout, or missing.
    """
    trained = [
        (name, _gradient_of(parameter))
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    found = [gradient.any() for _, gradient in trained if gradient is not None]
    flags = iter(torch.stack(found).tolist() if found else [])  # waits for a GPU only once
    missing = [name for name, gradient in trained if gradient is None or not next(flags)]
    if missing:
        _warn(missing)
    return missing


def _gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    gradient: torch.Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if gradient is None else gradient


def _warn(missing: list[str]) -> None:
    warnings.warn(
        f"{len(missing)} trained parameters got no gradient in this step, {missing[0]} among them. With full "
        "recomputation and a frozen embedding they never get one: call "
        "bps_rdma.megatron.let_embeddings_pass_gradients(model), or recompute selectively.",
        stacklevel=3,
    )
