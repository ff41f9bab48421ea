# SPDX-License-Identifier: Apache-2.0
"""Compares push_pull over RDMA with perftest on the same device: goodput, latency, registered memory, idle load.

    ci/vm/run .venv/bin/python bench/rdma_figures.py          or, with a card: BPS_TEST_HCA=mlx5_0 python bench/...
    ci/vm/run .venv/bin/python bench/rdma_figures.py --partitions 65536,131072,524288 --windows 4,16

One worker and one server. Rounds of both alternate. Results are medians, with the quartiles of the rounds' ratios. With
--partitions or --windows there is a job for each combination, all jobs take their turns in the same rounds, and
nothing but goodput is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import side_by_side
from side_by_side import quartiles, ratios

from bps_rdma.launch.environment import LocalJob

HCA = os.environ.get("BPS_TEST_HCA", "rxe0")
WRITE_BYTES = 524_288  # of a write of perftest: the largest partition that is chosen by itself
ROUNDS = 7
IDLE_S = 10.0
PERFTEST_PORT = 18515  # its default
WRITES = 100  # of WRITE_BYTES each, in both directions; in perftest's shorter run
LATENCY_WRITES = 20


# ---- The worker: answers each line with one line of JSON


def worker() -> None:
    """Commands: {"bytes": n, "times": k} -> seconds of each push_pull."""
    import bps_rdma as bps

    bps.init()
    print(json.dumps("ready"), flush=True)
    arrays: dict[int, np.ndarray] = {}
    for line in sys.stdin:
        command = json.loads(line)
        nbytes, found = command["bytes"], []
        if nbytes not in arrays:
            arrays[nbytes] = np.arange(nbytes, dtype=np.uint8)
            bps.push_pull_inplace(arrays[nbytes], average=False, name=str(nbytes))
        for _ in range(command["times"]):
            begin = time.perf_counter()
            bps.push_pull_inplace(arrays[nbytes], average=False, name=str(nbytes))
            found.append(time.perf_counter() - begin)
        arrived = bps.push_pull(arrays[nbytes], average=False, name=str(nbytes))  # in place it changes nothing
        assert np.array_equal(arrived, arrays[nbytes]), "wrong result"
        print(json.dumps(found), flush=True)
    bps.shutdown()


class Job(side_by_side.Job):
    """One worker and one server."""

    def __init__(self, **settings: str) -> None:
        more = {"BPS_RDMA_HCA": f"={HCA}", "BPS_TIMEOUT": "60"} | settings
        super().__init__(LocalJob(workers=1, servers=1, transport="rdma"), ["worker"], more)
        self.pids = {"worker": self.workers[0].pid, "server": self.others[1].pid}

    def push_pull(self, nbytes: int, times: int) -> float:
        """Median seconds of one push_pull."""
        return statistics.median(self.ask({"bytes": nbytes, "times": times})[0])


# ---- perftest, and what the kernel knows


def perftest(tool: str, iterations: int, *options: str) -> float:
    """Seconds per iteration by this program's clock, from a long and a short run.

    perftest's own results depend on a clock rate that it measures, and that measurement fails where both ends spin on
    one processor, as in the VM.
    """
    return (_wall(tool, 10 * iterations, *options) - _wall(tool, iterations, *options)) / (9 * iterations)


def _listens() -> bool:
    """Whether a server of perftest waits for its client."""
    tables = [path.read_text() for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists()]
    sockets = [line.split() for table in tables for line in table.splitlines()[1:]]
    return any(fields[1].endswith(f":{PERFTEST_PORT:04X}") and fields[3] == "0A" for fields in sockets)


def _wall(tool: str, iterations: int, *options: str) -> float:
    args = [tool, "-F", "-d", HCA, "-n", str(iterations), *options]
    server = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _listens():
            if server.poll() is not None:
                raise RuntimeError(f"{' '.join(args)} ended with {server.returncode} before its client came")
            time.sleep(0.01)
        begin = time.perf_counter()
        done = subprocess.run([*args, "127.0.0.1"], capture_output=True, text=True, timeout=120, check=False)
        seconds = time.perf_counter() - begin
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(args)}: {done.stdout}{done.stderr}")
        server.wait(120)
    finally:
        server.kill()
    return seconds


def write_bandwidth(size: int) -> float:
    """GB/s per direction of ib_write_bw, in both directions at the same time."""
    return size / perftest("ib_write_bw", max(WRITES * WRITE_BYTES // size, 5), "-b", "-s", str(size)) / 1e9


def write_latency() -> float:
    """One-way latency of ib_write_lat in seconds; an iteration is a round trip."""
    return perftest("ib_write_lat", LATENCY_WRITES, "-s", "8") / 2


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def regions(pids: dict[str, int]) -> dict[str, list[int]]:
    """Bytes of each memory region of each process."""
    shown = subprocess.run(["rdma", "-j", "resource", "show", "mr"], capture_output=True, text=True, check=True)
    process_of = {int(task.name): name for name, pid in pids.items() for task in Path(f"/proc/{pid}/task").iterdir()}
    found: dict[str, list[int]] = defaultdict(list)
    for region in json.loads(shown.stdout or "[]"):
        if region.get("pid") in process_of:
            found[process_of[region["pid"]]].append(int(region["mrlen"]))
    return found


def measure_goodput(jobs: dict[str, Job], sizes: list[int], rounds: int, *, whole: bool) -> None:
    """Every job's push_pull beside ib_write_bw, in alternating rounds; `whole`: with writes as large as the tensor."""
    for mib in sizes:
        write_bytes = mib << 20 if whole else WRITE_BYTES
        nbytes, theirs = mib << 20, []
        ours: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(rounds):
            for name, job in jobs.items():
                ours[name].append(nbytes / job.push_pull(nbytes, max(3, 64 // mib)) / 1e9)
            theirs.append(write_bandwidth(write_bytes))
        for name, found in ours.items():
            print(
                f"{mib} MiB{name}: push_pull {statistics.median(found):.3f} GB/s per direction, ib_write_bw -b of "
                f"{write_bytes} bytes {statistics.median(theirs):.3f}; ratio {quartiles(ratios(found, theirs))}",
                flush=True,
            )


def processor_times() -> dict[str, float]:
    """Seconds of the only processor since its start: programs, the kernel, and nothing."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]]
    user, nice, system, idle, waits, interrupts, deferred = (field / os.sysconf("SC_CLK_TCK") for field in fields)
    return {"user": user + nice, "kernel": system + interrupts + deferred, "idle": idle + waits}


def measure_processor(job: Job, rounds: int) -> None:
    """Where the processor's time goes while as many bytes go both ways: ours, and ib_write_bw's."""
    mib = 16
    times = 25
    nbytes = mib << 20

    def per_gigabyte(work: Callable[[], object], gigabytes: float) -> dict[str, float]:
        before = processor_times()
        work()
        return {name: (now - before[name]) / gigabytes for name, now in processor_times().items()}

    found: dict[str, list[dict[str, float]]] = {"push_pull": [], "ib_write_bw": []}
    job.push_pull(nbytes, 3)
    writes = times * nbytes // WRITE_BYTES
    for _ in range(rounds):
        found["push_pull"].append(per_gigabyte(lambda: job.push_pull(nbytes, times), times * nbytes / 1e9))
        start = per_gigabyte(lambda: _wall("ib_write_bw", 5, "-b", "-s", str(WRITE_BYTES)), times * nbytes / 1e9)
        whole = per_gigabyte(lambda: _wall("ib_write_bw", writes, "-b", "-s", str(WRITE_BYTES)), times * nbytes / 1e9)
        found["ib_write_bw"].append({name: whole[name] - start[name] for name in whole})
    for name, each in found.items():
        parts = (f"{part} {statistics.median(one[part] for one in each):.3f}" for part in each[0])
        print(f"{name}: processor seconds per GB in each direction: {', '.join(parts)}", flush=True)


def measure_latency(job: Job) -> None:
    """Of 8 bytes."""
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(job.push_pull(8, 500) * 1e6)
        theirs.append(write_latency() * 1e6)
    print(
        f"8 bytes: push_pull {statistics.median(ours):.1f} us, ib_write_lat {statistics.median(theirs):.1f} us; "
        f"push_pull / (2 x one way): {quartiles(each / 2 for each in ratios(ours, theirs))}"
    )


def measure_idleness(job: Job) -> None:
    """Registered memory and processor time of a job that does nothing."""
    for name, sizes in sorted(regions(job.pids).items()):
        print(f"{name}: {len(sizes)} regions before the first tensor, bytes: {sorted(sizes, reverse=True)}")
    job.push_pull(8, 10)
    before = {name: cpu_seconds(pid) for name, pid in job.pids.items()}
    time.sleep(IDLE_S)
    for name, pid in job.pids.items():
        print(f"{name}: idle, {(cpu_seconds(pid) - before[name]) / IDLE_S * 100:.2f} % of a core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", help="BYTEPS_PARTITION_BYTES; several: 65536,131072")
    parser.add_argument("--windows", help="BPS_SERVER_WINDOW; several: 4,16")
    parser.add_argument("--sizes", default="1,4,16,64", help="MiB")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--whole", action="store_true", help="perftest writes as many bytes at once as the tensor has")
    parser.add_argument("--processor", action="store_true", help="only where the processor's time goes")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    if options.processor:
        job = Job()
        measure_processor(job, options.rounds)
        job.end()
        return
    if not options.partitions and not options.windows:
        job = Job()
        measure_idleness(job)
        measure_goodput({"": job}, sizes, options.rounds, whole=options.whole)
        measure_latency(job)
        job.end()
        return
    jobs = {
        f" in pieces of {partition or 'any size'}, window {window or 'by default'}": Job(
            **({"BYTEPS_PARTITION_BYTES": partition, "BPS_MIN_PARTITION_BYTES": partition} if partition else {}),
            **({"BPS_SERVER_WINDOW": window} if window else {}),
        )
        for partition in (options.partitions or "").split(",")
        for window in (options.windows or "").split(",")
    }
    measure_goodput(jobs, sizes, options.rounds, whole=options.whole)
    for job in jobs.values():
        job.end()


if __name__ == "__main__":
    worker() if sys.argv[1:] == ["worker"] else main()
