# SPDX-License-Identifier: Apache-2.0
"""bps_rdma for Megatron-LM (megatron-core 0.14 or later), without changes to its files.

import bps_rdma.megatron

bps_rdma.megatron.enable()  # once, before the model is built

or, for an unchanged script: `torchrun ... -m bps_rdma.megatron pretrain_gpt.py ... --use-bps`.
"""

from bps_rdma.megatron.adapter import attach, disable, enable, enabled
from bps_rdma.megatron.arguments import add_flags
from bps_rdma.megatron.lora import let_embeddings_pass_gradients, warn_of_untrained
from bps_rdma.megatron.lora_files import load_lora, lora_state, save_lora
from bps_rdma.megatron.lora_layers import adapters, add_lora, merge_lora
from bps_rdma.megatron.order import register_in_order_of_use

__all__ = [
    "adapters", "add_flags", "add_lora", "attach", "disable", "enable", "enabled", "let_embeddings_pass_gradients",
    "load_lora", "lora_state", "merge_lora", "register_in_order_of_use", "save_lora", "warn_of_untrained",
]  # fmt: skip
