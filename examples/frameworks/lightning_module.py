# SPDX-License-Identifier: Apache-2.0
"""A training with Lightning, whose gradients bps_rdma averages; or on one of torch's backends alone.

torchrun --nproc-per-node 2 examples/frameworks/lightning_module.py [bps|gloo]
"""

import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from bps_rdma.torch.lightning import BpsStrategy


class Regression(lightning.LightningModule):
    """Predicts two numbers from eight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 2))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """The loss of a batch."""
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """How it learns."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(1)
data = torch.utils.data.TensorDataset(torch.randn(128, 8), torch.randn(128, 2))
model = Regression()
others = [DDPStrategy(process_group_backend=name) for name in sys.argv[1:]]  # to compare with
trainer = lightning.Trainer(
    strategy=others[0] if others else BpsStrategy(),
    accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, gradient_clip_val=1.0,
)  # fmt: skip
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
if trainer.is_global_zero:
    print("losses:", *model.losses)
    print("weights:", sum(one.detach().double().sum().item() for one in model.parameters()).hex())
    print("backend:", torch.distributed.get_backend())
