# SPDX-License-Identifier: Apache-2.0
"""The flags on Megatron's own command line, and the versions and options of Megatron that are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from bps_rdma.errors import InvalidArgumentError

FLAGS = {
    "--use-dpu-reduce": "synchronise gradients by push/pull (bps_rdma)",
    "--use-dpu-tp-reduce": "run the collectives of tensor parallelism through bps_rdma, too",
    "--use-bps-pp": "run what pipeline stages send each other through bps_rdma, too; of two stages without batched "
    "messages only activations",
}
# The names that users type, who need no DPU; those above come from forks of Megatron.
ALIASES = {"--use-dpu-reduce": "--use-bps", "--use-dpu-tp-reduce": "--use-bps-tp"}
_NO_CURE = "--no-cure-frozen-embeddings"


def add_flags(parser: Any) -> Any:
    """Adds the flags to a parser of Megatron's; can be passed as `extra_args_provider` to versions before 0.17."""
    group = parser.add_argument_group(title="bps_rdma")
    for flag, text in FLAGS.items():
        # A script may add some itself, and be run by `-m bps_rdma.megatron`.
        names = [name for name in _names_of(flag) if name not in parser._option_string_actions]
        if names:
            group.add_argument(*names, dest=name_of(flag), action="store_true", help=text)
    if _NO_CURE not in parser._option_string_actions:
        group.add_argument(
            _NO_CURE, dest="cure_frozen_embeddings", action="store_false",
            help="let full recomputation over a frozen embedding train nothing in the first stage, as stock Megatron",
        )  # fmt: skip
    return parser


def _names_of(flag: str) -> list[str]:
    """The names of a flag on the command line."""
    return [ALIASES[flag], flag] if flag in ALIASES else [flag]


def name_of(flag: str) -> str:
    """The name of the attribute that holds a flag."""
    return flag.removeprefix("--").replace("-", "_")


def is_set(options: Any, flag: str, *, otherwise: bool = False) -> bool:
    """Whether Megatron's arguments, or a DistributedDataParallelConfig, ask for a flag under either of its names."""
    found = [getattr(options, name_of(name)) for name in _names_of(flag) if hasattr(options, name_of(name))]
    return any(found) if found else otherwise


def canonical(word: str) -> str:
    """The flag that a word of the command line is another name of, or the word."""
    return next((flag for flag, alias in ALIASES.items() if word == alias), word)


def extend_parser(then: Callable[[Any], None]) -> bool:
    """Adds the flags to Megatron's parser, and calls `then` with the parsed arguments before Megatron uses them.

    Returns:
        False if there is no such parser: megatron.training is missing, or cannot be imported.
    """
    try:
        from megatron.training import arguments
    except ImportError:
        return False
    add = arguments.add_megatron_arguments

    @functools.wraps(add)
    def add_and_extend(parser: Any, *args: Any, **options: Any) -> Any:
        parser = add_flags(add(parser, *args, **options))
        parse = parser.parse_known_args  # parse_args() calls this one, too

        def parse_and_look(*args: Any, **options: Any) -> tuple[Any, list[str]]:
            found, rest = parse(*args, **options)
            then(found)
            return found, rest

        parser.parse_known_args = parse_and_look
        return parser

    arguments.add_megatron_arguments = add_and_extend
    return True


def extend_yaml(then: Callable[[Any], None]) -> None:
    """The same for `--yaml-cfg`: the contents of that file replace the whole command line."""
    from megatron.training import yaml_arguments

    load = yaml_arguments.load_yaml

    @functools.wraps(load)
    def load_and_look(*args: Any, **options: Any) -> Any:
        found = load(*args, **options)
        then(found)
        return found

    yaml_arguments.load_yaml = load_and_look


OLDEST = (0, 14)

_ALL_TO_ALL = "it sends gradients by all_to_all; servers sum in float32 in any case"

# Options of DistributedDataParallelConfig or of the command line -> why they are refused.
_REFUSED = {
    "use_megatron_fsdp": "Megatron-FSDP has a gradient path of its own",
    "use_custom_fsdp": "Megatron-FSDP has a gradient path of its own",
    "use_torch_fsdp2": "torch's FSDP has a gradient path of its own",
    "reduce_scatter_with_fp32_accumulation": _ALL_TO_ALL,
    "ddp_reduce_scatter_with_fp32_accumulation": _ALL_TO_ALL,
}


def check_version(version: str) -> None:
    """Refuses a version of Megatron that is older than the oldest supported one.

    Raises:
        InvalidArgumentError: the version is too old.
    """
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < OLDEST:
        raise InvalidArgumentError(
            f"megatron-core {version} is older than {'.'.join(map(str, OLDEST))}", "install a newer megatron-core"
        )


def check_options(options: Any) -> None:
    """Refuses options with which gradients would not use push/pull.

    Args:
        options: Megatron's arguments, or a DistributedDataParallelConfig.

    Raises:
        InvalidArgumentError: an option is not supported; names it and the reason.
    """
    for name, reason in _REFUSED.items():
        if getattr(options, name, False):
            raise InvalidArgumentError(f"{name} cannot be combined with use_bps: {reason}", "leave out one of the two")
    # The command line asks for it by an optimizer and --use-distributed-optimizer, which the model's config lacks.
    shards = getattr(options, "use_distributed_optimizer", False)
    layer_wise = not shards or getattr(options, "optimizer", "adam") not in ("adam", "sgd")
    if getattr(options, "overlap_param_gather", False) and layer_wise:
        raise InvalidArgumentError(
            "overlap_param_gather with the layer-wise optimizer cannot be combined with use_bps: it gathers "
            "parts of unequal size",
            "leave out one of the two, or use --use-distributed-optimizer with adam or sgd",
        )
