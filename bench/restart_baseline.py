# SPDX-License-Identifier: Apache-2.0
"""Measures what the loss of a rank costs a job that starts again from its last checkpoint: torchrun with gloo.

    python bench/restart_baseline.py --trials 20 --ranks 4

The peer of bench/recovery.py: the same tensors, the same kill, and the same question, from the kill to the next right
sum on every rank. torchrun notices the end of the rank, ends the others, and starts all of them again; they load the
checkpoint that rank 0 writes every ten steps, and repeat the steps since then. Every sum is verified. Also prints the
time until the job is where it was. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from recovery import COUNT, TENSORS, await_files, in_words
from rich.progress import track

from bps_rdma.launch.process import Children

STEPS_BEFORE = 15  # of which five have to be repeated
CHECKPOINT_EVERY = 10


def rank(folder: Path) -> None:
    """A rank: sums until the driver has killed one of them and the job is where it was."""
    import torch
    import torch.distributed as dist

    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    me, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A store for each attempt: in that of torchrun's agent gloo finds the addresses of the attempt before.
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{attempt}", rank=me, world_size=size)
    again = attempt > 0
    checkpoint = folder / "checkpoint"
    step = torch.load(checkpoint)["step"] if checkpoint.exists() else 0
    arrays = [torch.empty(COUNT) for _ in range(TENSORS)]
    first = True
    while True:
        for number, array in enumerate(arrays):
            array.fill_(1 + me + number * step)
        for work in [dist.all_reduce(array, async_op=True) for array in arrays]:
            work.wait()
        for number, array in enumerate(arrays):
            expected = size * (size + 1) / 2 + size * number * step
            if array.min() != array.max() or array[0] != expected:
                sys.exit(f"rank {me}: wrong sum {array[0]} of {expected}")
        step += 1
        if again and first:
            (folder / f"again-{me}").write_text(repr(time.monotonic()))
            first = False
        if me == 0 and step % CHECKPOINT_EVERY == 0:
            torch.save({"step": step, "arrays": arrays}, folder / "next")
            (folder / "next").rename(checkpoint)
        if not again:
            (folder / f"reached-{me}").write_text(str(step))
        if not again and step == STEPS_BEFORE:
            (folder / f"pid-{me}").write_text(str(os.getpid()))
            (folder / f"pid-{me}").rename(folder / f"running-{me}")  # never seen half written
        if again:
            before = max(int(path.read_text() or 0) for path in folder.glob("reached-*"))
            over = torch.tensor([step >= before])
            dist.broadcast(over, 0)
            if over:
                break
    (folder / f"caught-{me}").write_text(repr(time.monotonic()))
    dist.barrier()
    dist.destroy_process_group()


def trial(options: argparse.Namespace, draw: random.Random) -> tuple[float, float]:
    """Seconds from the kill to the last rank's first right sum, and until the job is where it was."""
    with tempfile.TemporaryDirectory() as name, Children() as children:
        folder = Path(name)
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks),
                 "--max-restarts", "1", "--standalone", __file__, "--rank", name]  # fmt: skip
        children.spawn("torchrun", words, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
        ranks = range(options.ranks)
        await_files(folder, "running", ranks, children, options.patience)
        time.sleep(draw.uniform(0, 0.05))
        victim = int((folder / f"running-{draw.randrange(options.ranks)}").read_text())
        begin = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        await_files(folder, "caught", ranks, children, options.patience)
        while children.running:  # or torchrun's ranks would outlive it
            children.wait(0.05)
        return tuple(max(float((folder / f"{kind}-{i}").read_text()) for i in ranks) - begin
                     for kind in ("again", "caught"))  # type: ignore[return-value]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=120, help="seconds after which a trial counts as a hang")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank)
        return
    draw = random.Random(options.seed)  # noqa: S311  # not a secret
    shown = track(range(options.trials), description="losses", disable=not sys.stderr.isatty() or options.json)
    found = [trial(options, draw) for _ in shown]
    what = f"SIGKILL to a rank of {options.ranks}, torchrun with a checkpoint every ten steps"
    values, caught = ([one[i] for one in found] for i in (0, 1))
    if options.json:
        print(json.dumps({"what": what, "seconds": values, "caught_up": caught}))
        return
    for name, times in (("next right sum on every rank", values), ("as far as before", caught)):
        print(f"{options.trials} times {what}: {name}: {in_words(times)}")


if __name__ == "__main__":
    main()
