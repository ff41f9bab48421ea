"""Runs a script of a Megatron-LM checkout without a GPU, by `-m bps_rdma.megatron`, so with its flags.

    torchrun --nproc-per-node 2 examples/megatron/on_cpu.py Megatron-LM/pretrain_gpt.py [its arguments] --use-dpu-reduce

Arguments that a CPU asks for (gloo, nothing fused) are added. Without a flag of bps_rdma's this is stock Megatron.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # it would ask for properties of the GPU
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron insists, with tensor parallelism

ARGUMENTS = [
    "--distributed-backend", "gloo", "--use-cpu-initialization", "--transformer-impl", "local",
    "--attention-backend", "unfused", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion", "--no-rope-fusion", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm",
]  # fmt: skip


def main() -> None:
    """Entry point."""
    arguments = sys.argv[1:]
    if arguments and Path(arguments[0]).is_file():
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))  # its Megatron, not one that is installed
        import cpu

        cpu.install()
        cpu.pretend_a_gpu()
        arguments += ARGUMENTS
    from bps_rdma.megatron import __main__

    __main__.main(arguments)


if __name__ == "__main__":
    main()
