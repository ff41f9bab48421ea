# SPDX-License-Identifier: Apache-2.0
"""The training program of bench/endurance.py: a small network in numpy, whose ranks may come and go.

Each step uses the same samples whoever is there: the ranks divide them. So with and without faults the same step has
the same gradients, but for rounding. Rank 0 writes a line for each committed step: when, which, how many ranks, and now
and then the loss on samples that are not trained on.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

import bps_rdma as bps

Array = np.ndarray[Any, np.dtype[np.float32]]

SIZES = (64, 512, 512, 10)
HELD_OUT, BATCH = 1024, 256
RATE, MOMENTUM = 0.02, 0.9
EVALUATED = 50  # steps


class Network:
    """Layers with tanh between them, and the mean cross-entropy."""

    def __init__(self, generator: np.random.Generator) -> None:
        pairs = itertools.pairwise(SIZES)
        self.weights = [(generator.standard_normal(pair) / pair[0] ** 0.5).astype(np.float32) for pair in pairs]

    def _outputs(self, inputs: Array) -> list[Array]:
        outputs = [inputs]
        for number, weight in enumerate(self.weights):
            product = outputs[-1] @ weight
            outputs.append(np.tanh(product) if number < len(self.weights) - 1 else product)
        return outputs

    def classify(self, inputs: Array) -> Any:
        return self._outputs(inputs)[-1].argmax(axis=1)

    def loss(self, inputs: Array, classes: Any) -> float:
        return float(-np.log(_shares(self._outputs(inputs)[-1])[np.arange(len(classes)), classes] + 1e-12).mean())

    def gradients(self, inputs: Array, classes: Any, into: list[Array]) -> None:
        """Of the sum over these samples, divided by the size of a whole batch."""
        outputs = self._outputs(inputs)
        error = _shares(outputs[-1])
        error[np.arange(len(classes)), classes] -= 1
        error /= BATCH
        for number in reversed(range(len(self.weights))):
            np.matmul(outputs[number].T, error, out=into[number])
            if number:
                error = (error @ self.weights[number].T) * (1 - outputs[number] ** 2)


def _shares(outputs: Array) -> Array:
    powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


class Training:
    """All that a rank which enters must take over: weights, momentum, and the number of the step."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        generator = np.random.default_rng([seed, 0])
        self.teacher = Network(generator)
        self.held_out = self.samples(generator, HELD_OUT, slice(None))
        self.network = Network(generator)
        self.momentum = [np.zeros_like(weight) for weight in self.network.weights]
        self.gradients = [np.empty_like(weight) for weight in self.network.weights]
        self.step = 0
        self.log = os.open(folder / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def samples(self, generator: np.random.Generator, count: int, mine: slice) -> tuple[Array, Any]:
        """Some of `count` samples, which the generator decides, and their classes; one of ten has a wrong one."""
        inputs = generator.standard_normal((count, SIZES[0]), np.float32)[mine]
        swapped, others = generator.random(count)[mine] < 0.1, generator.integers(SIZES[-1], size=count)[mine]
        return inputs, np.where(swapped, others, self.teacher.classify(inputs))

    def sync(self) -> None:
        """Everybody gets what rank 0 has, which has trained for as long as any: new processes get the last ranks."""
        number = np.int64([self.step])
        kept = [number, *self.network.weights, *self.momentum]
        handles = [bps.broadcast_async(array, root=0, name=f"state {i}") for i, array in enumerate(kept)]
        for handle in handles:
            handle.wait()
        self.step = int(number[0])

    def make_step(self) -> bool:
        """One step of all ranks. False: it was the last one."""
        rank, size = bps.rank(), bps.size()
        of_step = np.random.default_rng([self.seed, 1, self.step])
        self.network.gradients(*self.samples(of_step, BATCH, slice(rank, None, size)), self.gradients)
        ends = np.float32([(self.folder / "stop").exists()])
        handles = [
            bps.push_pull_async_inplace(array, name=f"gradient {i}", average=False)
            for i, array in enumerate([ends, *self.gradients])
        ]
        for handle in handles:
            handle.wait()
        bps.commit()
        for number, gradient in enumerate(self.gradients):
            self.momentum[number] *= MOMENTUM
            self.momentum[number] += gradient
            self.network.weights[number] -= np.float32(RATE) * self.momentum[number]
        self.step += 1
        if rank == 0:
            loss = f" {self.network.loss(*self.held_out):.6f}" if self.step % EVALUATED == 0 else ""
            os.write(self.log, f"{time.monotonic():.4f} {self.step} {size}{loss}\n".encode())
        return bool(ends[0] == 0)

    def checksum(self) -> int:
        """Of all that ranks must agree on."""
        found = self.step
        for array in [*self.network.weights, *self.momentum]:
            found = zlib.crc32(array.data, found)
        return found


def main() -> None:
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    training = Training(folder, seed)
    bps.init()
    is_new, goes_on = True, True
    while goes_on:
        try:
            if is_new:
                training.sync()
                is_new = False
            goes_on = training.make_step()
        except bps.RoundAbortedError as error:
            sys.stderr.write(f"{error}\n")
            is_new = True
    (folder / f"end-{os.getpid()}").write_text(f"{training.step} {training.checksum()}")
    bps.shutdown()


if __name__ == "__main__":
    main()
