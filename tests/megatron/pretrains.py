# SPDX-License-Identifier: Apache-2.0
"""What users write on Megatron's pretrain(), which wheels have from 0.17 on: a GPT, generated samples, a loss.

Megatron's own pretrain_gpt.py does this as well, and is in no wheel.
"""

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets import utils as helpers
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from bps_rdma.megatron.communicator import counts


class Samples(torch.utils.data.Dataset):
    """Sequences of words, each of which follows from the one before."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        args = get_args()
        words = (torch.arange(args.seq_length + 1) * (1 + number % 5) + number) % args.vocab_size
        return {"tokens": words[:-1], "labels": words[1:]}


def datasets(_: Any) -> tuple[Any, None, None]:
    return Samples(), None, None


datasets.is_distributed = False  # type: ignore[attr-defined]


def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    found = losses.float().mean()
    averaged = found.detach().clone()
    torch.distributed.all_reduce(averaged, torch.distributed.ReduceOp.AVG, parallel_state.get_data_parallel_group())
    if torch.distributed.get_rank() == 0:
        print(f"loss {averaged.item().hex()}", flush=True)
    return found, {"lm loss": averaged}


def forward(iterator: Any, model: Any) -> Any:
    batch = next(iterator)
    tokens, labels = batch["tokens"], batch["labels"]
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)[None, None]
    return model(tokens, places, mask, labels=labels), partial(mean)


if __name__ == "__main__":
    helpers.compile_helpers = lambda: None  # the wheel has them compiled, and no Makefile
    arguments = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward)
    if torch.distributed.get_rank() == 0:
        print(f"{sum(counts.values())} buckets over bps_rdma", flush=True)
