"""The flags on Megatron's own command line."""

from __future__ import annotations

import functools
from typing import Any

FLAGS = {
    "--use-dpu-reduce": "synchronise gradients by push/pull (bps_rdma)",
    "--use-dpu-tp-reduce": "tensor parallelism's collectives by bps_rdma, too",
}


def add_flags(parser: Any) -> Any:
    """Adds the flags to a parser of Megatron's; also fits `extra_args_provider`, for versions before 0.17."""
    group = parser.add_argument_group(title="bps_rdma")
    for flag, text in FLAGS.items():
        group.add_argument(flag, action="store_true", help=text)
    return parser


def extend_parser() -> bool:
    """Makes Megatron's parser know the flags. False where this Megatron has none (megatron.training is missing)."""
    try:
        from megatron.training import arguments
    except ImportError:
        return False
    add = arguments.add_megatron_arguments

    @functools.wraps(add)
    def add_and_extend(parser: Any, *args: Any, **options: Any) -> Any:
        return add_flags(add(parser, *args, **options))

    arguments.add_megatron_arguments = add_and_extend
    return True
