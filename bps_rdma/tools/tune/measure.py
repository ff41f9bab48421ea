# SPDX-License-Identifier: Apache-2.0
"""One rank's part of `bps tune`. Every rank of the job runs all of it, in the same order.

Times are those of the slowest rank. Sizes that are compared take turns, so that other work on the machine disturbs all
of them alike. Every result is checked.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

import bps_rdma as bps
from bps_rdma import _core, job
from bps_rdma.errors import TransportError
from bps_rdma.tools.bench.pattern import WrongResultError
from bps_rdma.tools.tune.copies import Copies, measure_copies
from bps_rdma.tools.tune.model import Costs, fit, neighbours

Tell = Callable[[str, float], None]

_SIZES = tuple(1 << power for power in range(10, 25))  # 1 KiB to 16 MiB
_PARTITIONS = tuple(1 << power for power in range(16, 23))  # 64 KiB to 4 MiB
_CYCLES = 5
_WARM_UP = 2
_FEWEST, _MOST = 3, 200  # rounds of one turn
_SECONDS_OF_COPIES = 1.0
_NOISE = 1.02
_NAME = "bps-tune"


@dataclass(frozen=True)
class Trial:
    """One of several sizes that were compared."""

    nbytes: int | None  # None: the default, which depends on the job
    seconds: float  # the median
    lower: float  # and the quartiles
    upper: float


@dataclass(frozen=True)
class Pair:
    """A size of partitions (None: the default) with one of buckets, and what shows of a step with both."""

    partition: int | None
    bucket: int
    seconds: float  # the median
    lower: float  # and the quartiles
    upper: float


@dataclass
class Found:
    """The results of a measurement.

    Attributes:
        workers: ranks of the job.
        routes: how this rank reaches the servers.
        nbytes: of all gradients.
        costs: of an operation with the best partitions.
        points: bytes and seconds of single operations, to which the costs are fitted.
        partitions: push_pull of `nbytes` with each size of partitions; empty where it could not be changed.
        partition: the best one; None: the default.
        buckets: what shows of a step with each size of buckets, and the partitions that were best for `nbytes`.
        pairs: the best of both tried together, because buckets want other partitions than all gradients at once; empty
            where partitions could not be changed.
        bucket: the best one.
        backward_s: how long the backward pass of a step takes.
        links: Gbit/s of the link of each host of the job, as its members know them; empty on one host.
        copies: of this rank's GPU; None: it has none.
    """

    workers: int
    routes: list[str]
    nbytes: int
    costs: Costs
    points: list[tuple[int, float]]
    partitions: list[Trial] = field(default_factory=list)
    partition: int | None = None
    buckets: list[Trial] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    bucket: int = 0
    backward_s: float = 0.0
    links: list[float] = field(default_factory=list)
    copies: Copies | None = None


def measure(nbytes: int, seconds: float, backward_s: float | None, tell: Tell) -> Found:
    """Measures in the job that the environment of this process describes. Collective; init() must not be done.

    Args:
        nbytes: of all gradients of a step.
        seconds: how long it may take, roughly.
        backward_s: how long the backward pass of a step takes; None: as long as sending all gradients.
        tell: called with what is being measured, and the share that is done.
    """
    partitions = [] if has_servers_of_its_own() else _compare_partitions(nbytes, 0.25 * seconds, tell)
    partition = _best(partitions)
    _join(partition)
    try:
        points = _single_operations(nbytes, 0.15 * seconds, tell)
        costs = fit([size for size, _ in points], [time for _, time in points])
        found = Found(bps.size(), bps.metrics()["transports"], nbytes, costs, points, partitions, partition)
        found.links = links_of_job()
        tell("copies of a GPU", 0.4)
        found.copies = copies_of(job.current().config.text("BPS_CUDA_LIB"), bps.local_rank())
        found.backward_s = costs.seconds(nbytes) if backward_s is None else backward_s
        candidates = neighbours(costs.best_bucket(nbytes), nbytes, (1 << 20, 25 << 20))
        found.buckets = _compare_buckets(found, candidates, 0.25 * seconds, tell)
        found.bucket = _best(found.buckets) or nbytes
    finally:
        bps.shutdown()
    if partitions:
        found.pairs = _compare_pairs(found, 0.35 * seconds, tell)
        found.partition, found.bucket = best_pair(found.pairs)
    return found


def copies_of(library: str, local_rank: int) -> Copies | None:
    """Those of this rank's GPU. The other ranks wait for this one, so a GPU that is full or hangs counts as none."""
    try:
        return measure_copies(library, local_rank, _SECONDS_OF_COPIES)
    except TransportError as error:
        _core.log_warning(f"copies of a GPU are not measured: {error}")
        return None


def links_of_job() -> list[float]:
    """Gbit/s of each host's link; empty on one host, or where a speed is not known. Collective."""
    places = bps.all_gather(np.array([bps.local_rank()], np.int64), name=f"{_NAME}/places")
    speeds = {member["rank"]: float(member["link_gbps"]) for member in bps.dump()["members"]}
    links = [speeds[rank] for rank, place in enumerate(np.asarray(places).ravel()) if place == 0]
    return links if len(links) > 1 and min(links) > 0 else []


def has_servers_of_its_own() -> bool:
    """Returns whether the job ends with its first shutdown(). Then nothing can be tried that init() decides."""
    return any(os.environ.get(name) for name in ("DMLC_ROLE", "BPS_ROLE", "BPS_NUM_SERVERS", "DMLC_NUM_SERVER"))


def _join(partition: int | None) -> None:
    settings = {} if partition is None else {"partition_bytes": partition}
    job.join(settings, resumes=False)


def _best(trials: Sequence[Trial]) -> int | None:
    """The size with the shortest time. The default is not given up for what may be noise."""
    if not trials:
        return None
    best = min(trials, key=lambda trial: trial.seconds)
    default = next((trial for trial in trials if trial.nbytes is None), None)
    return None if default is not None and default.seconds < _NOISE * best.seconds else best.nbytes


def _compare_partitions(nbytes: int, seconds: float, tell: Tell) -> list[Trial]:
    candidates: list[int | None] = [None, *(size for size in _PARTITIONS if size <= nbytes)]
    times: dict[int | None, list[float]] = {candidate: [] for candidate in candidates}
    turn = seconds / _CYCLES / len(candidates)
    for cycle in range(_CYCLES):
        # Backwards every other time: what comes first finds other caches, and another machine.
        for candidate in candidates if cycle % 2 == 0 else candidates[::-1]:
            tell("partitions", 0.25 * cycle / _CYCLES)
            _join(candidate)
            try:
                times[candidate] += _rounds(_Whole(nbytes), turn)
            finally:
                bps.shutdown()
    return [_trial(candidate, measured) for candidate, measured in times.items()]


def _single_operations(nbytes: int, seconds: float, tell: Tell) -> list[tuple[int, float]]:
    sizes = [size for size in _SIZES if size <= nbytes]
    if len(sizes) < 2:
        sizes = [1 << 10, 1 << 12]
    tell("operations", 0.25)
    # The lower quartile: other work on the machine only ever adds to a time.
    return [(size, statistics.quantiles(_rounds(_Whole(size), seconds / len(sizes)), n=4)[0]) for size in sizes]


def _compare_buckets(found: Found, candidates: Sequence[int], seconds: float, tell: Tell) -> list[Trial]:
    steps = [_Step(found.nbytes, bucket, found.backward_s) for bucket in candidates]
    times: dict[int, list[float]] = {bucket: [] for bucket in candidates}
    for cycle in range(_CYCLES):
        tell("buckets", 0.4 + 0.25 * cycle / _CYCLES)
        for step in steps if cycle % 2 == 0 else steps[::-1]:
            times[step.bucket] += _rounds(step, seconds / _CYCLES / len(candidates))
    return [_trial(bucket, measured) for bucket, measured in times.items()]


def _compare_pairs(found: Found, seconds: float, tell: Tell) -> list[Pair]:
    def best(trials: Sequence[Trial], most: int) -> list[int | None]:
        return [trial.nbytes for trial in sorted(trials, key=lambda trial: trial.seconds)[:most]]

    partitions = list(dict.fromkeys([None, *best(found.partitions, 3)]))
    buckets = [bucket or found.nbytes for bucket in best(found.buckets, 3)]
    times: dict[tuple[int | None, int], list[float]] = {(one, other): [] for one in partitions for other in buckets}
    for cycle in range(_CYCLES):
        tell("both together", 0.65 + 0.35 * cycle / _CYCLES)
        for partition in partitions if cycle % 2 == 0 else partitions[::-1]:
            _join(partition)
            try:
                for bucket in buckets if cycle % 2 == 0 else buckets[::-1]:
                    step = _Step(found.nbytes, bucket, found.backward_s)
                    times[partition, bucket] += _rounds(step, seconds / _CYCLES / len(times))
            finally:
                bps.shutdown()
    trials = {pair: _trial(pair[1], measured) for pair, measured in times.items()}
    return [Pair(*pair, trial.seconds, trial.lower, trial.upper) for pair, trial in trials.items()]


def best_pair(pairs: Sequence[Pair]) -> tuple[int | None, int]:
    """Partition and bucket with the shortest time. The default partition is not given up for what may be noise."""
    best = min(pairs, key=lambda pair: pair.seconds)
    default = min((pair for pair in pairs if pair.partition is None), key=lambda pair: pair.seconds)
    chosen = default if default.seconds < _NOISE * best.seconds else best
    return chosen.partition, chosen.bucket


def _trial(nbytes: int | None, seconds: Sequence[float]) -> Trial:
    lower, middle, upper = statistics.quantiles(seconds, n=4)
    return Trial(nbytes, middle, lower, upper)


class _Whole:
    """One push_pull of everything."""

    def __init__(self, nbytes: int) -> None:
        self._array = np.empty(max(nbytes // 4, 1), np.float32)
        self._name = f"{_NAME}/{nbytes}"

    def prepare(self) -> None:
        self._array.fill(bps.rank() + 1)

    def run(self) -> float:
        begin = time.perf_counter()
        bps.push_pull_inplace(self._array, average=False, name=self._name)
        return time.perf_counter() - begin

    def check(self) -> None:
        _check(self._array)


class _Step:
    """A backward pass that makes a bucket of gradients after the other, and waits for all of them at its end.

    The pass itself is time that goes by, as on a GPU: it needs no core.
    """

    def __init__(self, nbytes: int, bucket: int, backward_s: float) -> None:
        self.bucket = bucket
        self._array = np.empty(nbytes // 4, np.float32)
        count = max(round(nbytes / bucket), 1)
        self._parts = np.array_split(self._array, count)
        self._names = [f"{_NAME}/{nbytes}/{count}/{index}" for index in range(count)]
        self._backward_s = backward_s

    def prepare(self) -> None:
        self._array.fill(bps.rank() + 1)

    def run(self) -> float:
        """Seconds beyond the backward pass."""
        begin = time.perf_counter()
        handles = []
        for index, (part, name) in enumerate(zip(self._parts, self._names, strict=True)):
            ready = begin + self._backward_s * (index + 1) / len(self._parts)
            if (left := ready - time.perf_counter()) > 0:
                time.sleep(left)
            handles.append(bps.push_pull_async_inplace(part, average=False, name=name))
        for handle in handles:
            bps.synchronize(handle)
        return time.perf_counter() - begin - self._backward_s

    def check(self) -> None:
        _check(self._array)


def _rounds(what: _Whole | _Step, seconds: float) -> list[float]:
    """Times of rounds of the slowest rank, as many as fit into this time."""
    took = 0.0
    for _ in range(_WARM_UP):
        what.prepare()
        begin = time.perf_counter()
        what.run()
        took = time.perf_counter() - begin
        what.check()
    count = _agreed(min(max(int(seconds / max(took, 1e-6)), _FEWEST), _MOST))
    times = np.empty(count, np.float64)
    for index in range(count):
        what.prepare()
        times[index] = what.run()
        what.check()
    return [float(slowest) for slowest in _slowest(times)]


def _agreed(count: int) -> int:
    """Returns what rank 0 says."""
    return int(bps.broadcast(np.array([count], np.int64), f"{_NAME}/count")[0])


def _slowest(times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    gathered = bps.all_gather(times, name=f"{_NAME}/times/{len(times)}")
    slowest: npt.NDArray[np.float64] = np.asarray(gathered).reshape(bps.size(), -1).max(axis=0)
    return slowest


def _check(array: npt.NDArray[np.float32]) -> None:
    wanted = bps.size() * (bps.size() + 1) / 2
    if not (array == wanted).all():
        raise WrongResultError(
            f"a sum is wrong: {array[array != wanted][0]} instead of {wanted}",
            "report this as a bug, with `bps config`",
        )
