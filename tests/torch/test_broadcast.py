# SPDX-License-Identifier: Apache-2.0
"""Parameters, optimizer states and objects of one rank on all ranks, and what happens when ranks do not agree."""

import copy
import time
from typing import Any

import harness
import pytest
import torch
from bodies.losses import SOON_S, check_the_others_are_told, without_rank_1
from harness import await_mark, mark

import bps_rdma.torch as bps_torch

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.int16, torch.uint16, torch.uint32, torch.complex64, torch.complex128, torch.bool, torch.float8_e4m3fn,
]  # fmt: skip


def bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bytes, NaNs and infinities among them; for bool 0 and 1."""
    count = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    copies = [torch.empty(one.shape, dtype=one.dtype).copy_(one.detach()).view(-1) for one in (left, right)]
    return torch.equal(*(copy.view(torch.uint8) for copy in copies))


# ---- Parameters


def all_kinds(seed: int) -> dict[str, torch.Tensor]:
    shapes: list[tuple[int, ...]] = [(3, 5), (), (0, 4), (1000,)]
    found = {f"{dtype}{shape}": bits(dtype, shape, seed) for dtype in DTYPES for shape in shapes}
    found["transposed"] = bits(torch.float32, (6, 7), seed).t()
    found["strided"] = bits(torch.int16, (20,), seed)[::2]
    found["one of many"] = bits(torch.float32, (6, 8), seed)[::6, ::8]  # contiguous, with odd strides
    found["channels last"] = bits(torch.float32, (2, 3, 4, 5), seed).to(memory_format=torch.channels_last)
    found["conjugate"] = bits(torch.complex64, (4,), seed).conj()
    found["wide"] = bits(torch.bfloat16, (3_000_001,), seed)
    found["parameter"] = torch.nn.Parameter(bits(torch.float32, (33,), seed))
    return found


KINDS = [(1, 0, False), (2, 1, False), (3, 0, True)]
MORE_KINDS = [(1, 0, True), (2, 1, True), (3, 0, False), (4, 2, False), (4, 2, True)]


@pytest.mark.parametrize(
    ("workers", "root", "as_pairs"), [*KINDS, *(pytest.param(*one, marks=pytest.mark.long) for one in MORE_KINDS)]
)
@harness.on_ranks("workers")
def test_every_kind_of_tensor_arrives_bit_by_bit(bps: Any, root: int, as_pairs: bool) -> None:
    for seed in (0, 100):
        mine = all_kinds(seed + bps.rank())
        places = {name: tensor.data_ptr() for name, tensor in mine.items()}
        if as_pairs:
            pairs = list(mine.items())
            bps_torch.broadcast_parameters(reversed(pairs) if bps.rank() else iter(pairs), root_rank=root)
        else:
            bps_torch.broadcast_parameters({**mine, "none": None}, root_rank=root, prefix="model.")
        wanted = all_kinds(seed + root)
        for name, tensor in mine.items():
            assert same_bits(tensor, wanted[name]), name
            assert tensor.data_ptr() == places[name], f"{name} has moved"
        assert mine["transposed"].stride() == wanted["transposed"].stride()
        assert mine["parameter"].requires_grad


@harness.on_ranks(workers=2)
def test_models_that_share_names_and_not_shapes_and_tied_weights(bps: Any) -> None:
    for width in (8, 16, 8):
        torch.manual_seed(bps.rank())
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, width, 3), torch.nn.BatchNorm2d(width), torch.nn.Linear(width, width, bias=False)
        )
        model[2].weight = torch.nn.Parameter(model[2].weight.detach().t())
        tied = {**model.state_dict(), "again": model.state_dict()["0.weight"]}
        before = model[0].weight._version
        bps_torch.broadcast_parameters(tied)
        assert bps.rank() == 0 or model[0].weight._version > before
        torch.manual_seed(0)
        wanted = torch.nn.Conv2d(3, width, 3)
        assert torch.equal(model[0].weight, wanted.weight)


@harness.on_ranks(workers=3)
def test_groups_of_ours_and_of_torch(bps: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ours = bps.new_group([1, 2]) if bps.rank() in (1, 2) else None
    theirs = dist.new_group([0, 2])
    for group, members in ((ours, (1, 2)), (theirs, (0, 2))):
        tensor = torch.full((5,), float(bps.rank()))
        if bps.rank() in members:
            bps_torch.broadcast_parameters({"x": tensor}, root_rank=members[-1], group=group)
            assert bps_torch.broadcast_object(bps.rank(), root_rank=members[-1], group=group) == 2
        assert tensor[0] == (members[-1] if bps.rank() in members else bps.rank())


# ---- Ranks that do not agree


@pytest.mark.parametrize(
    ("how", "kinds", "names"),
    [
        ("shape", {"MismatchError"}, "b.weight"),
        ("dtype", {"MismatchError"}, "b.weight"),
        ("name", {"MismatchError"}, "b.bias"),
        ("missing", {"MismatchError"}, "c.weight"),
        ("root", {"MismatchError"}, "root 1"),
        ("unknown root", {"InvalidArgumentError"}, "root_rank=3"),
        ("sparse", {"InvalidTensorError", "InvalidArgumentError"}, "b.weight"),
        ("expanded", {"InvalidTensorError", "InvalidArgumentError"}, "b.weight"),
        ("lazy", {"InvalidTensorError", "InvalidArgumentError"}, "b.weight"),
        ("no tensor", {"InvalidArgumentError"}, "b.weight"),
        ("twice", {"InvalidArgumentError"}, "b.weight"),
        ("bare", {"InvalidArgumentError"}, "named_parameters"),
    ],
)
@harness.on_ranks(workers=3)
def test_ranks_that_do_not_agree_are_told_everywhere(bps: Any, how: str, kinds: Any, names: Any) -> None:
    odd = bps.rank() == bps.size() - 1
    tensors: dict[str, Any] = {name: torch.zeros(3, 4) for name in ("a.weight", "b.weight", "c.weight")}
    call: Any = bps_torch.broadcast_parameters
    options: dict[str, Any] = {}
    if how == "unknown root":
        options["root_rank"] = bps.size()
    elif not odd:
        pass
    elif how == "shape":
        tensors["b.weight"] = torch.zeros(4, 3)
    elif how == "dtype":
        tensors["b.weight"] = torch.zeros(3, 4, dtype=torch.int32)
    elif how == "name":
        tensors["b.bias"] = tensors.pop("b.weight")
    elif how == "missing":
        del tensors["c.weight"]
    elif how == "root":
        options["root_rank"] = 1
    elif how == "sparse":
        tensors["b.weight"] = torch.zeros(3, 4).to_sparse()
    elif how == "expanded":
        tensors["b.weight"] = torch.zeros(1, 4).expand(3, 4)
    elif how == "lazy":
        tensors["b.weight"] = torch.nn.LazyLinear(3).weight
    elif how == "no tensor":
        tensors["b.weight"] = "text"
    given: Any = tensors
    if how == "bare" and odd:
        given = tensors.values()
    if how == "twice" and odd:
        given = [*tensors.items(), ("b.weight", torch.zeros(3, 4))]
    begin = time.monotonic()
    with pytest.raises(bps.BpsError) as raised:
        call(given, **options)
    assert raised.value.hint
    assert time.monotonic() - begin < SOON_S
    right = {"x": torch.full((2,), float(bps.rank()))}
    call(right)  # the job goes on
    assert not right["x"].any()
    kind = raised.type.__name__
    text = str(raised.value)
    assert kind in kinds, text
    assert names in text


@harness.on_ranks(workers=2, env={"BPS_TIMEOUT": "2"})
def test_a_rank_that_does_not_call_is_named_at_the_deadline(bps: Any) -> None:
    if bps.rank() == 1:
        await_mark("told", 0)
        return
    with pytest.raises(bps.DeadlineError, match=r"rank.*1") as raised:
        bps_torch.broadcast_parameters({"x": torch.zeros(3)})
    mark("told")
    assert "broadcast_parameters" in str(raised.value)


# ---- Optimizers

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
    "lbfgs": (torch.optim.LBFGS, {"lr": 0.1, "history_size": 4}),
}


def small_model(seed: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3)).to(dtype)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step)).to(dtype)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def resumes(bps: Any, which: str, root: int, others: str, dtype: torch.dtype) -> None:
    cls, options = OPTIMIZERS[which]
    reference = small_model(7, dtype)
    theirs = cls(reference.parameters(), **options)
    train(reference, theirs, 3)
    theirs.param_groups[0]["lr"] = 0.05
    if bps.rank() == root:
        model, optimizer = copy.deepcopy(reference), None
        optimizer = cls(model.parameters(), **options)
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    else:
        model = small_model(100 + bps.rank(), dtype)
        optimizer = cls(model.parameters(), **{**options, "lr": 0.5})
        if others == "stale":
            train(model, optimizer, 2)
    bps_torch.broadcast_parameters(model.state_dict(), root_rank=root)
    bps_torch.broadcast_optimizer_state(optimizer, root_rank=root)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert torch.optim.Optimizer.state_dict(optimizer).keys() == theirs.state_dict().keys()
    train(reference, theirs, 3, first=3)
    train(model, optimizer, 3, first=3)
    for ours, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert same_bits(ours.detach(), wanted.detach())


@pytest.mark.parametrize(
    ("which", "others"),
    [
        *((which, "fresh") for which in OPTIMIZERS),
        *(pytest.param(which, "stale", marks=() if which == "adam" else pytest.mark.long) for which in OPTIMIZERS),
    ],
)
def test_a_resumed_optimizer_goes_on_alike_on_all_ranks(which, others):
    harness.run(resumes, which, 1, others, torch.float32, workers=3)


def test_a_resumed_optimizer_of_bfloat16_parameters():
    harness.run(resumes, "adam", 0, "fresh", torch.bfloat16, workers=2)


@harness.on_ranks(workers=2)
def test_where_the_root_has_no_state_nobody_has(bps: Any) -> None:
    model = small_model(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if bps.rank() != 0:
        train(model, optimizer, 1)
    bps_torch.broadcast_optimizer_state(optimizer)
    assert not optimizer.state_dict()["state"]


def optimizers_that_differ(bps: Any, how: str) -> str:
    model = small_model(1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if bps.rank() == 1:
        if how == "class":
            optimizer = torch.optim.Adam(model.parameters())
        elif how == "parameters":
            optimizer = torch.optim.SGD(list(model.parameters())[:-1], lr=0.1)
        elif how == "groups":
            optimizer = torch.optim.SGD([{"params": [param]} for param in model.parameters()], lr=0.1)
        elif how == "none":
            optimizer = model
    elif how == "pickle" and bps.rank() == 0:
        optimizer.param_groups[0]["schedule"] = lambda step: step
    try:
        bps_torch.broadcast_optimizer_state(optimizer)
    except bps.BpsError as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("class", "Adam"),
        ("parameters", "group 0 parameter 3"),
        ("groups", "group 1 parameter 0"),
        ("none", "is not an optimizer"),
        ("pickle", "worker 0"),
    ],
)
def test_optimizers_that_differ_are_told_everywhere(how, says):
    for text in harness.run(optimizers_that_differ, how, workers=2):
        assert says in text


# ---- Objects


class Remark:
    def __init__(self, text: str) -> None:
        self.text = text


@pytest.mark.parametrize(("workers", "root"), [(1, 0), (2, 1), (4, 3)])
@harness.on_ranks("workers")
def test_objects(bps: Any, root: int) -> None:
    is_root = bps.rank() == root
    objects = [None, 0, "", {"a": [1, (2, 3)], "b": torch.arange(4)}, b"x" * 100_001, list(range(50_000)), Remark("r")]
    for obj in objects:
        found = bps_torch.broadcast_object(
            obj if is_root else "other", root_rank=root, name="thing", allow_pickle=isinstance(obj, Remark)
        )
        if isinstance(obj, Remark):
            assert found.text == obj.text
        elif isinstance(obj, dict):
            assert found["a"] == obj["a"]
            assert torch.equal(found["b"], obj["b"])
        else:
            assert found == obj
            assert type(found) is type(obj)


@harness.on_ranks(workers=2)
def test_an_object_of_77_mb(bps: Any) -> None:
    found = bps_torch.broadcast_object(bytes(range(256)) * 300_000 if bps.rank() == 0 else None)
    assert found == bytes(range(256)) * 300_000


class Unpicklable:
    """Says itself why it cannot be pickled: what pickle says of a lambda differs between versions of Python."""

    def __reduce__(self) -> str:
        raise TypeError("this one stays at home")


@pytest.mark.parametrize("allow_pickle", [False, True])
@harness.on_ranks(workers=3)
def test_what_cannot_be_sent_is_told_everywhere(bps: Any, allow_pickle: bool) -> None:
    begin = time.monotonic()
    with pytest.raises(bps.InvalidArgumentError) as raised:
        bps_torch.broadcast_object(Unpicklable() if bps.rank() == 1 else None, root_rank=1, allow_pickle=allow_pickle)
    assert time.monotonic() - begin < SOON_S
    assert (raised.value.__cause__ is not None) == (bps.rank() == 1)
    assert bps_torch.broadcast_object("next", root_rank=1) == "next"
    text = str(raised.value)
    assert "worker 1" in text
    assert ("this one stays at home" in text) if allow_pickle else (".Unpicklable cannot be sent" in text)


@harness.on_ranks(workers=2)
def test_ranks_that_name_different_roots(bps: Any) -> None:
    with pytest.raises(bps.MismatchError, match="root_rank"):
        bps_torch.broadcast_object(1, root_rank=bps.rank())


# ---- A rank is lost


def blocked(bps: Any) -> tuple[str, float]:
    model = {"x": torch.zeros(1000)}
    bps_torch.broadcast_parameters(model)
    return without_rank_1(bps, lambda: bps_torch.broadcast_parameters(model))


def test_a_killed_rank_is_named_soon():
    check_the_others_are_told(blocked)
