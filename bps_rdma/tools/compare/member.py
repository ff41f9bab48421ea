# SPDX-License-Identifier: Apache-2.0
"""One rank of a comparison, as a separate process that serves the requests of launch.py."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from typing import Any, TextIO

import torch
import torch.distributed as dist

import bps_rdma.torch as bps
from bps_rdma.errors import BpsError
from bps_rdma.tools.compare.baselines import SYNCS, TrainingMethod, step_of
from bps_rdma.tools.compare.models import make_batch, make_model
from bps_rdma.torch.backend import Options

CHANNEL = "BPS_COMPARE_CHANNEL"  # descriptor of the socket to the launcher
PLAN = "BPS_COMPARE_PLAN"  # the plan as JSON: model, samples, length, threads, kinds, device


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
            self._groups["bps"] = dist.new_group(backend="bps", pg_options=Options(stage_gpu=self._on_gpu))
        self._model = make_model(plan["model"])
        self._batch = make_batch(plan["model"], plan["samples"], plan["length"], dist.get_rank())
        self._start = [p.detach().clone() for p in self._model.parameters()]
        self.parameters = sum(p.numel() for p in self._model.parameters())

    def turn(self, method: TrainingMethod, steps: int, warmup: int) -> dict[str, Any]:
        """Train from the initial weights: `warmup` steps, then `steps` timed ones.

        Returns:
            seconds: time of each step on this rank. digest: sums and norms of the weights afterwards.
        """
        with torch.no_grad():
            for parameter, start in zip(self._model.parameters(), self._start, strict=True):
                parameter.copy_(start)
                parameter.grad = None
        step = step_of(method, self._model, self._batch, self._groups)
        for _ in range(warmup):
            step()
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
        del step
        gc.collect()  # wrappers and modules form reference cycles
        digest = [] if method.kind in SYNCS.values() else self._digest()
        return {"seconds": seconds, "digest": digest}

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
        _answer(answers, **member.turn(method, request["steps"], request["warmup"]))
    dist.destroy_process_group()
    bps.shutdown()
    _answer(answers, ended=True)


def _answer(answers: TextIO, **values: Any) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()
