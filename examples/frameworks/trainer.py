# SPDX-License-Identifier: Apache-2.0
"""A small language model in the Trainer of Hugging Face's transformers, which knows nothing of bps_rdma.

torchrun --nproc-per-node 2 -m bps_rdma.torch.run examples/frameworks/trainer.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Words(torch.utils.data.Dataset):
    """Sequences of 16 numbers, each the one before plus one."""

    def __len__(self) -> int:
        """How many there are."""
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One of them; the model itself shifts the labels."""
        words = (torch.arange(16) + index) % 64
        return {"input_ids": words, "labels": words}


torch.manual_seed(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
with tempfile.TemporaryDirectory() as folder:
    options = TrainingArguments(
        folder, use_cpu=True, max_steps=8, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, seed=1,
    )  # fmt: skip
    trainer = Trainer(model, options, train_dataset=Words())
    trainer.train()
if trainer.is_world_process_zero():
    print("losses:", *(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
    print("weights:", sum(one.detach().double().sum().item() for one in model.parameters()).hex())
    print("backend:", torch.distributed.get_backend())
