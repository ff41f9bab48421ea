# SPDX-License-Identifier: Apache-2.0
"""The flags on Megatron's own command line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

FLAGS = {
    "--use-dpu-reduce": "synchronise gradients by push/pull (bps_rdma)",
    "--use-dpu-tp-reduce": "run the collectives of tensor parallelism through bps_rdma, too",
}
_NO_CURE = "--no-cure-frozen-embeddings"


def add_flags(parser: Any) -> Any:
    """Adds the flags to a parser of Megatron's; can be passed as `extra_args_provider` to versions before 0.17."""
    group = parser.add_argument_group(title="bps_rdma")
    for flag, text in FLAGS.items():
        if flag in parser._option_string_actions:
            continue  # a script that adds them itself, run by `-m bps_rdma.megatron`
        group.add_argument(flag, action="store_true", help=text)
    if _NO_CURE not in parser._option_string_actions:
        group.add_argument(
            _NO_CURE, dest="cure_frozen_embeddings", action="store_false",
            help="let full recomputation over a frozen embedding train nothing in the first stage, as stock Megatron",
        )  # fmt: skip
    return parser


def name_of(flag: str) -> str:
    """The name of the attribute that holds a flag."""
    return flag.removeprefix("--").replace("-", "_")


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
        parse = parser.parse_known_args  # which parse_args() calls too

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
