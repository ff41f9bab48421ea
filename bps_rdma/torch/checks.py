# SPDX-License-Identifier: Apache-2.0
"""Arguments of the torch face that are of a wrong kind, refused in the words of the caller."""

from __future__ import annotations

import gc
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bps_rdma import arrays
from bps_rdma.argument_types import whole
from bps_rdma.errors import InvalidArgumentError, InvalidTensorError
from bps_rdma.torch.transfer import device_of

if TYPE_CHECKING:
    from bps_rdma.torch.units import IndexedParameter


def check_tensor(value: object) -> None:
    """Raises InvalidTensorError for what is no dense tensor of torch."""
    if not isinstance(value, torch.Tensor):
        raise InvalidTensorError(
            f"{type(value).__name__} is not a torch.Tensor", "pass a tensor; bps_rdma.push_pull() takes arrays, too"
        )
    if value.layout is not torch.strided:
        raise InvalidTensorError(
            f"the tensor of shape {tuple(value.shape)} is not dense: its layout is {value.layout}",
            "pass tensor.to_dense(), or make the layer with sparse=False",
        )


def check_module(value: object) -> None:
    """Raises InvalidArgumentError for what is no torch.nn.Module."""
    if not isinstance(value, torch.nn.Module):
        raise InvalidArgumentError(f"{type(value).__name__} is not a torch.nn.Module", "pass the model")


def check_layers(module: torch.nn.Module, ranks: int) -> None:
    """Raises InvalidArgumentError for a layer with which several ranks would not train as one; names it.

    SyncBatchNorm finds the other ranks by torch.distributed alone. Where that is not initialised it uses the statistics
    of its own rank, in silence. An embedding with `max_norm` changes the rows that a batch uses: others on each rank.
    """
    if ranks > 1:
        for name, each in module.named_modules():
            _check_layer(each, f"{name or 'the module'!r} is")


def check_layers_of(named: Iterable[tuple[str, torch.nn.Parameter]], ranks: int) -> None:
    """The same for those who have the parameters only, which do not know their layers."""
    if ranks == 1:
        return
    names = {id(parameter): name for name, parameter in named}
    for each in _all_of(torch.nn.SyncBatchNorm, torch.nn.Embedding, torch.nn.EmbeddingBag):
        for parameter in each.__dict__.get("_parameters", {}).values():  # of one whose __init__() failed there are none
            if id(parameter) in names:
                _check_layer(each, f"{names[id(parameter)]!r} is a parameter of")


def _check_layer(layer: torch.nn.Module, what: str) -> None:
    if isinstance(layer, torch.nn.SyncBatchNorm) and not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgumentError(
            f"{what} a SyncBatchNorm, which would synchronise nothing: it uses torch.distributed, which is not "
            "initialised",
            'call init_process_group("bps") first, or use BatchNorm',
        )
    if not isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag):
        return
    max_norm, weight = (getattr(layer, name, None) for name in ("max_norm", "weight"))  # a script's class may lack them
    if max_norm is not None and getattr(weight, "requires_grad", False):
        raise InvalidArgumentError(
            f"{what} an {type(layer).__name__} with max_norm, which changes its weight in forward: on each rank those "
            "rows that its batch uses",
            f"leave max_norm out; after step() call weight.data.renorm_({layer.norm_type:g}, 0, {max_norm:g})",
        )


def _all_of(*kinds: type[torch.nn.Module]) -> Iterator[Any]:
    """All objects of these classes. The garbage collector knows them; it may have a million others."""
    known: dict[int, bool] = {}  # by id of a class
    for each in gc.get_objects():
        kind = type(each)  # isinstance() would run the code of proxies
        found = known.get(id(kind))
        if found is None:
            found = known[id(kind)] = issubclass(kind, kinds)
        if found:
            yield each


def check_not_averaged(named: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
    """Raises InvalidArgumentError for a parameter whose gradients torch's DistributedDataParallel averages; names it.

    It would read a gradient while that is being averaged here.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    names = {id(parameter): name for name, parameter in named if parameter.requires_grad}
    if _averaged_by_torch(names) is None:
        return
    gc.collect()  # a wrapper that the script has dropped refers to itself
    name = _averaged_by_torch(names)
    if name is not None:
        raise InvalidArgumentError(
            f"torch's DistributedDataParallel averages the gradients of {name!r} already",
            "wrap the model or its optimizer, not both",
        )


def _averaged_by_torch(names: Mapping[int, str]) -> str | None:
    """The first of these parameters that one of torch's wrappers has."""
    for each in _all_of(torch.nn.parallel.DistributedDataParallel):
        for parameter in each.parameters():
            if id(parameter) in names:
                return names[id(parameter)]
    return None


def check_optimizer(value: object) -> None:
    """Raises InvalidArgumentError for what is no torch.optim.Optimizer."""
    if not isinstance(value, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"{type(value).__name__} is not a torch.optim.Optimizer", "pass one, such as torch.optim.SGD(...)"
        )


def check_count(name: str, value: object, least: int) -> None:
    """Raises InvalidArgumentError for what is no whole number of at least `least`."""
    number = whole(value)
    if number is None or number < least:
        raise InvalidArgumentError(
            f"{name}={value!r} is not a whole number from {least}", f"pass {name}={least} or more"
        )


def check_number(name: str, value: object, least: float, most: float = float("inf")) -> None:
    """Raises InvalidArgumentError for what is no number from `least` to `most`."""
    if isinstance(value, str) or not hasattr(value, "__float__") or not least <= float(value) <= most:
        bounds = f"from {least:g}" if most == float("inf") else f"from {least:g} to {most:g}"
        raise InvalidArgumentError(f"{name}={value!r} is not a number {bounds}", f"pass a number {bounds}")


def check_parameter(name: str, parameter: torch.nn.Parameter) -> None:
    """Raises InvalidTensorError for a parameter whose gradient cannot be synchronised; names it."""
    try:
        device_of(parameter)
    except InvalidTensorError as error:
        raise InvalidTensorError(
            f"parameter {name!r} is on {parameter.device}", "move the model to the CPU, or to a CUDA device"
        ) from error
    if getattr(parameter, "grad_dtype", parameter.dtype) is not parameter.dtype:
        raise InvalidTensorError(
            f"parameter {name!r} is {parameter.dtype} and may have gradients of another dtype: its grad_dtype is "
            f"{parameter.grad_dtype}",
            "leave grad_dtype alone, or make the parameter of that dtype",
        )
    if parameter.is_complex() and parameter.dtype.to_real() in (torch.float32, torch.float64):
        return
    if str(parameter.dtype).removeprefix("torch.") not in arrays.NUMPY_DTYPES:
        raise InvalidTensorError(
            f"parameter {name!r} has dtype {parameter.dtype}, which is not supported",
            f"use one of {', '.join(arrays.NUMPY_DTYPES)}, complex64 or complex128",
        )


def inexact(name: str, kind: str) -> InvalidTensorError:
    """The error for gradients of this kind, sparse or complex, whose means are to be exact."""
    return InvalidTensorError(
        f"gradients of {name} are {kind}, and means of these cannot be exact",
        "pass exact=False; or make the layer with sparse=False, or with a real parameter",
    )


def check_exact(entries: Iterable[IndexedParameter], sparse: Container[str]) -> None:
    """Raises InvalidTensorError for the first parameter whose gradients have no exact mean; names it."""
    for entry in entries:
        kind = "sparse" if entry.name in sparse else "complex" if entry.parameter.is_complex() else None
        if kind is not None:
            raise inexact(repr(entry.name), kind)
