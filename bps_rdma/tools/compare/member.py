# SPDX-License-Identifier: Apache-2.0
"""One rank of a comparison, as a separate process that serves the requests of launch.py."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import bps_rdma.torch as bps
from bps_rdma.errors import BpsError
from bps_rdma.tools.compare.baselines import SYNCS, Training, TrainingMethod, training_of
from bps_rdma.tools.compare.memory import held_by, peaks_on_gpu
from bps_rdma.tools.compare.models import make_batch, make_model

CHANNEL = "BPS_COMPARE_CHANNEL"  # descriptor of the socket to the launcher
PLAN = "BPS_COMPARE_PLAN"  # the plan as JSON: model, samples, length, threads, kinds, device, optimizer


class RankOfComparison:
    """The model, data and groups of one rank."""

    def __init__(self, plan: dict[str, Any]) -> None:
        torch.set_num_threads(int(plan["threads"]))
        self._on_gpu = plan["device"] == "cuda"
        if self._on_gpu:
            torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
            torch.set_default_device("cuda")
        dist.init_process_group("gloo")
        bps.init()
        self._groups: dict[str, Any] = {"gloo": dist.group.WORLD}
        if "ddp-bps" in plan["kinds"]:
            self._groups["bps"] = dist.new_group(backend="bps")
        self._model = make_model(plan["model"])
        self._batch = make_batch(plan["model"], plan["samples"], plan["length"], dist.get_rank())
        self._optimizer = str(plan["optimizer"])
        # On the CPU, so that it does not count in what a training holds on a GPU.
        self._start = [p.detach().to("cpu", copy=True) for p in self._model.parameters()]
        self.parameters = sum(p.numel() for p in self._model.parameters())

    def turn(self, method: TrainingMethod, steps: int, warmup: int) -> dict[str, Any]:
        """Train from the initial weights: `warmup` steps, then `steps` timed ones.

        Returns:
            seconds: time of each step on this rank. digest: sums and norms of the weights afterwards. memory: see
            memory.py.
        """
        training = self._begin(method)
        step, memory = training.step, {}
        for number in range(warmup):
            if number == 0 and self._on_gpu and training.optimizer is not None:
                memory = peaks_on_gpu(step, training.optimizer)
            else:
                step()
        if training.optimizer is not None:
            memory |= held_by(self._model, training.optimizer)
        if self._on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            step()
            if self._on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        del step, training
        gc.collect()  # wrappers and modules form reference cycles
        digest = [] if method.kind in SYNCS.values() else self._digest()
        return {"seconds": seconds, "digest": digest, "memory": memory}

    def record(self, method: TrainingMethod, steps: int, warmup: int, path: Path) -> None:
        """Train like turn(), and write the trace of the last `steps` steps by torch's profiler into `path`."""
        training = self._begin(method)
        for _ in range(warmup):
            training.step()
        dist.barrier()
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._on_gpu else [])
        with profile(activities=activities) as recorded:
            for _ in range(steps):
                training.step()
                recorded.step()
        recorded.export_chrome_trace(str(path))
        del training
        gc.collect()

    def _begin(self, method: TrainingMethod) -> Training:
        with torch.no_grad():
            for parameter, start in zip(self._model.parameters(), self._start, strict=True):
                parameter.copy_(start)
                parameter.grad = None
        return training_of(method, self._model, self._batch, self._groups, self._optimizer)

    def _digest(self) -> list[float]:
        with torch.no_grad():
            return [float(f(p.double())) for p in self._model.parameters() for f in (torch.sum, torch.norm)]


def main() -> None:
    """Serve the launcher until it sends `end` or has gone."""
    channel = socket.socket(fileno=int(os.environ[CHANNEL]))
    with channel, channel.makefile("r") as requests, channel.makefile("w") as answers:
        try:
            _serve(json.loads(os.environ[PLAN]), requests, answers)
        except BpsError as error:
            _answer(answers, error=error.message, hint=error.hint, kind=type(error).__name__)
            sys.exit(1)
        except Exception as error:
            _answer(answers, error=f"{type(error).__name__}: {error}", hint="", kind=type(error).__name__)
            sys.exit(1)


def _serve(plan: dict[str, Any], requests: TextIO, answers: TextIO) -> None:
    member = RankOfComparison(plan)
    _answer(answers, parameters=member.parameters)
    for line in requests:
        request = json.loads(line)
        if request["do"] == "end":
            break
        method = TrainingMethod(request["kind"], request["bucket_mb"])
        if request["do"] == "record":
            path = Path(f"{request['stem']}.rank{dist.get_rank()}.json")
            member.record(method, request["steps"], request["warmup"], path)
            _answer(answers, path=str(path))
        else:
            _answer(answers, **member.turn(method, request["steps"], request["warmup"]))
    dist.destroy_process_group()
    bps.shutdown()
    _answer(answers, ended=True)


def _answer(answers: TextIO, **values: Any) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()
