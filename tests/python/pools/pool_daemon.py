# SPDX-License-Identifier: Apache-2.0
"""A pool of servers for tests, and jobs that ask it."""

import json
import os
import signal
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness
from harness.ports import LOOPBACK

KEYS = {name: f"{name}-{'0123456789abcdef' * 3}" for name in ("alice", "bob", "operator")}

# Sums, on the pool's server alone, until there is a file `over`; writes what it has seen.
STEPS = """
import os, pathlib, sys, time
import numpy as np
import bps_rdma as bps
from bps_rdma import job
folder = pathlib.Path(sys.argv[1])
bps.init()
steps = 0
while True:
    over = bps.push_pull(np.full(1000, float((folder / "over").exists()), np.float32), average=False, name="over")
    total = bps.push_pull(np.full(300_000, bps.rank() + 1, np.float32), average=False, name="x")
    assert (total == sum(range(1, bps.size() + 1))).all()
    steps += 1
    (folder / f"steps-{bps.rank()}").write_text(str(steps))
    if over[0]:
        break
print(f"rank {bps.rank()} has summed with {job.current().process.servers} servers", flush=True)
bps.shutdown()
"""


class Daemon:
    """`bps-server --pool`. Its jobs end with the test."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        self.port = harness.free_ports(16)
        self.name = f"{LOOPBACK}:{self.port}"
        self._keys = folder / "keys"
        self.write_keys(*KEYS)
        for user, key in KEYS.items():
            write_private(folder / f"key-of-{user}", f"{user} {key}\n")
        self._env = {"BPS_POOL_CORES": "4", "BPS_POOL_MEMORY": str(1 << 30), "BPS_LOG_LEVEL": "INFO"} | env
        self._logs = 0
        self.start()

    def write_keys(self, *users: str) -> None:
        """Who may ask from now on, if it is told."""
        write_private(self._keys, "".join(f"{user} {KEYS[user]}\n" for user in users))

    def start(self) -> None:
        self._logs += 1
        env = {
            "BPS_POOL_KEY_FILE": str(self._keys), "BPS_POOL_PORT": str(self.port), "BPS_POOL_HOST": LOOPBACK,
        }  # fmt: skip
        log = self.folder / f"pool-{self._logs}.log"
        words = [harness.binary("bps-server"), "--pool"]
        self.command = harness.Command(words, harness.clean_env(**env, **self._env), log)
        harness.eventually(
            lambda: "bps-server: pool on port" in self.command.output(), what="the start of the pool",
            hopeless=lambda: "" if self.command.status is None else self.command.output(),
        )  # fmt: skip

    def end(self, signum: signal.Signals) -> int | None:
        """Ends the pool, and says with which status."""
        self.command.kill(signum)
        return self.command.wait(20 * harness.PATIENCE)

    def servers(self) -> list[int]:
        """The processes of its servers, also of those that an earlier pool has started."""
        return [pid for process in Path("/proc").glob("[0-9]*") if self._is_server(pid := int(process.name))]

    def _is_server(self, pid: int) -> bool:
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            return False
        return any(one.startswith(f"_BPS_POOLED={self.port}@{LOOPBACK}@".encode()) for one in variables)

    def close(self) -> None:
        self.command.end()
        for pid in self.servers():
            os.kill(pid, signal.SIGKILL)

    def as_user(self, user: str, **env: str) -> dict[str, str]:
        """The environment of a job of a user."""
        key = str(self.folder / f"key-of-{user}")
        return harness.clean_env(BPS_POOL=self.name, BPS_POOL_KEY_FILE=key, BPS_PLACEMENT="dedicated", **env)

    def shown_to(self, user: str) -> dict[str, Any]:
        """What `bps pool --json` says."""
        done = harness.run_command([harness.binary("bps"), "pool", "--json"], env=self.as_user(user))
        assert done.returncode == 0, done.stderr
        (one,) = json.loads(done.stdout)
        assert isinstance(one, dict)
        return one


class PooledJob:
    """`bps run` of two ranks that sum until they are told to end."""

    def __init__(self, pool: Daemon, user: str, *options: str, env: Mapping[str, str] | None = None) -> None:
        self.folder = pool.folder / f"job-{len(list(pool.folder.glob('job-*')))}"
        self.folder.mkdir()
        script = self.folder / "steps.py"
        script.write_text(STEPS)
        words = [harness.binary("bps"), "run", "-np", "2", *options, str(script), str(self.folder)]
        self.command = harness.Command(
            words, pool.as_user(user) | dict(env or {}), self.folder / "log", cwd=self.folder
        )

    def steps(self) -> int:
        """How many steps rank 0 has made."""
        try:
            return int((self.folder / "steps-0").read_text() or 0)
        except FileNotFoundError:
            return 0

    def await_steps(self, more: int = 3) -> None:
        """Returns when it has made that many more steps."""
        before = self.steps()
        harness.eventually(
            lambda: self.steps() >= before + more, what=f"{more} steps; the job has said {self.output()}",
            hopeless=lambda: "" if self.command.status is None else f"it has ended: {self.output()}",
        )  # fmt: skip

    def output(self) -> str:
        return self.command.output()

    def finish(self) -> str:
        """Tells it to end, which it has to do well; returns what it has printed."""
        (self.folder / "over").touch()
        status = self.command.wait(60 * harness.PATIENCE)
        assert status == 0, self.output()
        return self.output()

    def end(self) -> None:
        if self.command.status is None:
            self.command.kill(signal.SIGTERM)
            self.command.wait(20 * harness.PATIENCE)
        self.command.end()


def write_private(path: Path, text: str) -> None:
    path.touch(0o600)
    path.write_text(text)


def await_no_server(pool: Daemon, within: float = 60) -> float:
    """Returns when the pool has no server, which it may not have heard of yet, and after how many seconds."""
    begin = time.monotonic()
    harness.eventually(lambda: not pool.servers(), within, f"the end of servers; {pool.command.output()}")
    return time.monotonic() - begin


def scrape(port: int) -> str:
    """The metrics that are served at a port."""
    with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=30) as answer:
        return str(answer.read().decode())
