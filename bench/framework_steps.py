# SPDX-License-Identifier: Apache-2.0
"""Models that frameworks train, for bench/parallel_training.py: each is made and trained inside default_group().

The frameworks are those of ci/frameworks.txt. Each function takes the name of the backend and a width, and returns a
function that makes the steps of some numbers and returns their losses.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Turn = Callable[[range], list[float]]


@contextlib.contextmanager
def default_group(group: Any) -> Iterator[None]:
    """Frameworks take the default group, and a process has one: inside this it is another one."""
    before = dist.group.WORLD
    dist.distributed_c10d._update_default_pg(group)
    try:
        yield
    finally:
        dist.distributed_c10d._update_default_pg(before)


def accelerate(backend: str, width: int) -> Turn:
    """DDP by Hugging Face's Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = layers(width)
    model, optimizer = accelerator.prepare(model, adam(model))
    return by_steps(model, accelerator.backward, optimizer.step, optimizer.zero_grad)


def fabric(backend: str, width: int) -> Turn:
    """DDP by Lightning's Fabric; on bps with the communication hook of our strategy."""
    import lightning
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    from bps_rdma.torch.lightning import BpsFabricStrategy

    environment = TorchElasticEnvironment()
    strategy = (
        BpsFabricStrategy(cluster_environment=environment)
        if backend == "bps"
        else DDPStrategy(process_group_backend=backend, cluster_environment=environment)
    )
    trained = lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    trained.launch()
    model = layers(width)
    model, optimizer = trained.setup(model, adam(model))
    return by_steps(model, trained.backward, optimizer.step, optimizer.zero_grad)


def zero(stage: int) -> Callable[[str, int], Turn]:
    """DeepSpeed's ZeRO of a stage."""

    def make(backend: str, width: int) -> Turn:
        import deepspeed

        deepspeed.init_distributed(dist_backend=backend, verbose=False)
        deepspeed.utils.groups._WORLD_GROUP = None  # it would keep to that of the first backend
        model = layers(width)
        options = {
            "train_micro_batch_size_per_gpu": 32,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=options)
        return by_steps(engine, engine.backward, engine.step, lambda: None)

    return make


def trainer(backend: str, width: int) -> Turn:
    """A language model in the Trainer of transformers. Its turn begins and ends as a whole training does."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 1024

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            words = (torch.arange(16) + index) % 64
            return {"input_ids": words, "labels": words}

    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_positions=16, n_embd=width // 2, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )

    def turn(numbers: range) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            options = TrainingArguments(
                folder, use_cpu=True, max_steps=len(numbers), per_device_train_batch_size=8, logging_steps=1,
                save_strategy="no", report_to=[], disable_tqdm=True, seed=numbers.start, log_level="error",
            )  # fmt: skip
            trained = Trainer(model, options, train_dataset=Words())
            trained.train()
        return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]

    return turn


def layers(width: int) -> nn.Module:
    """Four wide ones."""
    torch.manual_seed(1)
    wide = [part for _ in range(4) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, width), *wide, nn.Linear(width, 2))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def by_steps(model: Any, backward: Callable[[Any], Any], step: Callable[[], Any], zero_grad: Callable[[], Any]) -> Turn:
    """A turn that is a loop of such steps, with inputs of this rank."""

    def turn(numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            generator = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
            inputs, targets = torch.randn(32, 8, generator=generator), torch.randn(32, 2, generator=generator)
            loss = nn.functional.mse_loss(model(inputs), targets)
            backward(loss)
            step()
            zero_grad()
            losses.append(loss.item())
        return losses

    return turn


MAKERS: dict[str, Callable[[str, int], Turn]] = {
    "trainer": trainer, "accelerate": accelerate, "fabric": fabric,
    "zero-1": zero(1), "zero-2": zero(2), "zero-3": zero(3),
}  # fmt: skip
