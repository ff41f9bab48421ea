# SPDX-License-Identifier: Apache-2.0
"""A cluster of two nodes that is stopped while a job trains on it: `ray stop`, which ends every Ray process it sees.

Run in a process namespace of its own (`unshare --fork --pid --mount-proc`), where that is this cluster alone:

    python ray_stop.py FOLDER [--force]

Prints JSON: after how many seconds the first member of the job had ended, the driver knew, and everybody had ended; and
what was left.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness

_OPTIONS = ["--num-cpus", "2", "--object-store-memory", "80000000", "--disable-usage-stats"]
_PORT = 26379


def trains(folder: str) -> None:
    """Steps until somebody ends it."""
    import numpy as np

    import bps_rdma

    bps_rdma.init()
    while True:
        bps_rdma.push_pull_inplace(np.ones(1000), name="x", timeout=60)
        Path(folder, f"trains-{bps_rdma.rank()}").touch()


def members() -> list[str]:
    """What runs of the job in this namespace."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = process.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text.startswith(("ray::Rank", "ray::Helper", "bps-")) or "/bps-" in text.split(" ")[0]:
            found.append(text.strip()[:100])
    return found


def drive(folder: str) -> None:
    """The driver. Ray ends its process, too, when it notices that the cluster has gone."""
    import ray

    import bps_rdma.ray

    ray.init(f"127.0.0.1:{_PORT}", log_to_driver=False)
    try:
        bps_rdma.ray.run(trains, folder, hosts=2, servers=1)
    except Exception as error:  # whatever it is: the test looks at it
        print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(1)


def main() -> None:
    """Starts the cluster and the job, stops the cluster, and tells what became of it."""
    folder, force = sys.argv[1], sys.argv[2:]
    ray = str(Path(sys.executable).with_name("ray"))
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stdin": subprocess.DEVNULL, "timeout": 120}
    head = ["--head", "--port", str(_PORT), "--temp-dir", folder, "--include-dashboard", "false", "--node-ip-address"]
    subprocess.run([ray, "start", *head, "127.0.0.1", *_OPTIONS], check=True, **quiet)
    subprocess.run([ray, "start", "--address", f"127.0.0.1:{_PORT}", *_OPTIONS], check=True, **quiet)
    segments = {path.name for path in Path("/dev/shm").glob("bps*")}
    driver = subprocess.Popen(
        [sys.executable, "-P", __file__, folder, "--drive"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None

    def text_at_end() -> str:
        return driver.stdout.read() if driver.stdout and driver.poll() is not None else ""

    harness.eventually(
        lambda: all(Path(folder, f"trains-{rank}").exists() for rank in range(2)), 120, "training", text_at_end
    )
    stopped = time.monotonic()
    stopper = subprocess.Popen([ray, "stop", *force], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    count = len(members())
    after: dict[str, float] = {}  # `ray stop` itself takes seconds before it ends anything

    def all_has_happened() -> bool:
        running, now = len(members()), time.monotonic() - stopped
        for what, is_so in (("begun", running < count), ("knew", driver.poll() is not None), ("gone", running == 0)):
            if is_so:
                after.setdefault(what, now)
        return len(after) == 3

    with contextlib.suppress(harness.WaitedInVainError):  # what the test looks at says more
        harness.eventually(all_has_happened)
    stopper.wait(60)
    left = members() + sorted({path.name for path in Path("/dev/shm").glob("bps*")} - segments)
    print(json.dumps(after | {"left": left, "error": text_at_end() or "the driver still runs"}), flush=True)


if __name__ == "__main__":
    if "--drive" in sys.argv:
        drive(sys.argv[1])
    main()
