# SPDX-License-Identifier: Apache-2.0
"""Runs a script of a Megatron-LM checkout without a GPU, through `bps_rdma.megatron`, and so with its flags.

    torchrun --nproc-per-node 2 examples/megatron/on_cpu.py Megatron-LM/pretrain_gpt.py [its arguments] --use-bps

Adds the arguments that a CPU requires (gloo, no fused kernels). Without a flag of bps_rdma this is stock Megatron.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # it would query the GPU
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron requires it with tensor parallelism

ARGUMENTS = [
    "--distributed-backend", "gloo", "--use-cpu-initialization", "--transformer-impl", "local",
    "--attention-backend", "unfused", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion", "--no-rope-fusion", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm",
]  # fmt: skip


def main() -> None:
    """Entry point."""
    arguments = sys.argv[1:]
    if arguments and Path(arguments[0]).is_file():
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))  # use the Megatron of the checkout
        import cpu

        cpu.install()
        cpu.pretend_a_gpu()
        arguments += ARGUMENTS
    from bps_rdma.megatron import __main__

    __main__.main(arguments)


if __name__ == "__main__":
    main()
