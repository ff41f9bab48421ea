# SPDX-License-Identifier: Apache-2.0
"""All-reduce of tensors on a GPU, staged through the host: beside gloo, and beside its two halves.

    python bench/gpu_staging.py                       # two ranks, which share the GPU if there is only one
    python bench/gpu_staging.py --ranks 4 --chunks 1,4,16 --json FILE

    bps     all_reduce of bps_rdma on the GPU's tensor
    core    push_pull of it by the route of the core (BPS_DEVICE_ROUTE)
    gloo    torch.distributed.all_reduce of the same tensor on gloo, which copies it to the host, too
    copies  to pinned memory of the host and back, without any communication
    host    push_pull of an array of that size in the host's memory, without any copies of the GPU

Methods take turns in the same processes. A round begins and ends with an idle GPU and takes as long as its slowest
rank; figures are medians, ratios those of neighbouring rounds, with quartiles. Every sum is checked. NCCL is left out:
it refuses ranks that share a GPU, and where they do not it uses NVLink, which this is not meant to replace.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from side_by_side import quartiles, ratios, said_by_ranks, slowest

from bps_rdma.launch.environment import LocalJob

METHODS = ("bps", "core", "gloo", "copies", "host")
RANK = "GPU_STAGING_RANK"


def rank_main(sizes: list[int], rounds: int) -> None:
    import torch
    import torch.distributed as dist

    import bps_rdma
    import bps_rdma.torch
    from bps_rdma.operations import OperationOptions, ReduceOp
    from bps_rdma.torch import transfer

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo")
    bps_rdma.torch.init()
    found: dict[int, dict[str, list[float]]] = {}
    for nbytes in sizes:
        count = nbytes // 4
        on_gpu = torch.empty(count, device="cuda")
        pinned = torch.empty(count, pin_memory=True)
        on_host = torch.from_numpy(bps_rdma.empty(count))

        def bps(tensor: Any = on_gpu) -> None:
            transfer.all_reduce(tensor, OperationOptions(ReduceOp.sum, f"staged {tensor.numel()}")).wait()

        def core(tensor: Any = on_gpu) -> None:
            bps_rdma.push_pull_inplace(tensor, average=False, name=f"core {tensor.numel()}")

        def gloo(tensor: Any = on_gpu) -> None:
            dist.all_reduce(tensor)

        def copies(tensor: Any = on_gpu, through: Any = pinned) -> None:
            through.copy_(tensor, non_blocking=True)
            tensor.copy_(through, non_blocking=True)

        def host(tensor: Any = on_host) -> None:
            bps_rdma.push_pull_inplace(tensor, average=False, name=f"host {tensor.numel()}")

        calls = max(1, min(32, (16 << 20) // nbytes))
        times: dict[str, list[float]] = {name: [] for name in METHODS}
        for number in range(rounds + 2):
            for name, call in zip(METHODS, (bps, core, gloo, copies, host), strict=True):
                tensor = on_host if name == "host" else on_gpu
                tensor.fill_(1)
                torch.cuda.synchronize()
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(calls):
                    call()
                torch.cuda.synchronize()
                seconds = (time.perf_counter() - begin) / calls
                expected = torch.full_like(tensor, 1.0 if name == "copies" else float(world) ** calls)
                assert torch.allclose(tensor, expected, rtol=1e-5), f"{name}: wrong"
                if number >= 2:
                    times[name].append(seconds)
        found[nbytes] = times
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace, chunk_mib: str) -> dict[str, dict[str, list[float]]]:
    """Seconds per call of the slowest rank: size -> method -> round."""
    said = said_by_ranks(
        LocalJob(workers=arguments.ranks, transport=arguments.transport),
        sys.argv[1:],
        **{RANK: "1", "BPS_DEVICE_ROUTE": "1", "BPS_GPU_CHUNK_BYTES": str(int(float(chunk_mib) * 2**20))},
    )
    return {size: slowest([one[size] for one in said]) for size in said[0]}


def quotient(above: list[float], below: list[float]) -> str:
    return quartiles(ratios(above, below))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", default="1,4,16,64,256", help="MiB; 0.0625 is 64 KiB")
    parser.add_argument("--chunks", default="4", help="MiB, values of BPS_GPU_CHUNK_BYTES to try")
    parser.add_argument("--transport", default="shm")
    parser.add_argument("--rounds", type=int, default=11, help="2 at least")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sizes = [int(float(size) * 2**20) for size in arguments.sizes.split(",")]
    if RANK in os.environ:
        return rank_main(sizes, arguments.rounds)
    found = {}
    for chunk in arguments.chunks.split(","):
        print(f"{arguments.ranks} ranks over {arguments.transport}, chunks of {chunk} MiB")
        found[chunk] = measure(arguments, chunk)
        for size, times in found[chunk].items():
            ms = "  ".join(f"{name} {statistics.median(times[name]) * 1e3:8.3f}" for name in METHODS)
            print(
                f"  {int(size) / 2**20:8.3f} MiB: {ms} ms; rate beside gloo {quotient(times['gloo'], times['bps'])}, "
                f"time beside copies {quotient(times['bps'], times['copies'])} "
                f"and {quotient(times['core'], times['copies'])} (core), "
                f"beside host {quotient(times['bps'], times['host'])}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(found) + "\n")
    return None


if __name__ == "__main__":
    main()
