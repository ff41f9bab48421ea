# SPDX-License-Identifier: Apache-2.0
"""One host of the lab: a user-mode kernel, its network cards, and what can happen to it."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from .process import Process

REPOSITORY = Path(__file__).resolve().parents[2]
MTU = 9000  # as in training clusters; a card has it from its start, or never
MEMORY = "1G"  # taken as it is used: 55 MB by an idle host, 225 MB with a worker
_BOOT_S = 60


class HostError(RuntimeError):
    """A host did not come up, or a command failed on it; the text shows why."""


def management_address(index: int) -> str:
    """Where host number `index` is told what to run."""
    return f"10.96.0.{index + 1}"


class Host:
    """Host number `index`: named h<index>, at `management`, and at `rails[r]` on rail r by the device rxe<r>."""

    def __init__(self, index: int, rails: int, scratch: Path) -> None:
        self.index = index
        self.name = f"h{index}"
        self.management = management_address(index)
        self.rails = [f"10.98.{rail}.{index + 1}" for rail in range(rails)]
        self.frozen = False
        self._kernel: subprocess.Popen[bytes] | None = None
        self._folder = scratch / self.name
        self._folder.mkdir()

    def boot(self) -> None:
        """Start the kernel; await_ready() must follow."""
        cards = []
        for n, port in enumerate(self.ports()):
            address = f"02:00:00:00:{n:02x}:{self.index + 1:02x}"
            cards.append(f"vec{n}:transport=tap,ifname={port},mac={address},mtu={MTU},depth=128,gro=1")
        command = [
            os.environ["BPS_LAB_KERNEL"], f"mem={MEMORY}", "root=/dev/root", "rootfstype=hostfs", "hostfs=/", "ro",
            f"init={REPOSITORY}/ci/lab/guest", f"lab_repository={REPOSITORY}", f"lab_host={self.index}",
            f"lab_rails={len(self.rails)}", "panic=-1", "console=tty1", "con=fd:2", "con0=fd:1",
            f"uml_dir={self._folder}/", *cards,
        ]  # fmt: skip
        self.frozen = False
        with (self._folder / "kernel.log").open("wb") as log:
            self._kernel = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                env=os.environ | {"TMPDIR": str(self._folder)},
            )  # fmt: skip

    def ports(self) -> list[str]:
        """Names of the switch's ends of our cables: management, then rails."""
        return [f"{self.name}m", *(f"{self.name}r{rail}" for rail in range(len(self.rails)))]

    def await_ready(self) -> None:
        """Raises HostError when the host has not come up within a minute."""
        assert self._kernel is not None
        assert self._kernel.stdout is not None
        deadline = time.monotonic() + _BOOT_S
        said = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._kernel.stdout, selectors.EVENT_READ)
            while b"ready" not in said:
                left = deadline - time.monotonic()
                more = os.read(self._kernel.stdout.fileno(), 4096) if left > 0 and selector.select(left) else b""
                if not more:
                    text = said.decode(errors="replace") + self.kernel_log()
                    raise HostError(f"{self.name} did not come up: {text}")
                said += more

    @property
    def alive(self) -> bool:
        """Whether its kernel runs."""
        return self._kernel is not None and self._kernel.poll() is None

    def kernel_log(self) -> str:
        """The kernel's messages since it was booted."""
        return (self._folder / "kernel.log").read_text(errors="replace")

    def start(self, *argv: str, env: Mapping[str, str] | None = None) -> Process:
        """A process on this host, in a session of its own, with this environment on top of a bare one."""
        return Process(self.management, argv, env or {})

    def run(self, command: str, timeout: float = 30) -> str:
        """What a shell command wrote; raises HostError when it fails."""
        process = self.start("bash", "-c", command)
        if process.wait(timeout) != 0:
            process.abandon()
            raise HostError(f"{self.name}: {command}: status {process.status}: {process.text()}")
        return process.text()

    def kill(self) -> float:
        """A power cut: no process of the host says good-bye, nor does its kernel. Returns the moment."""
        assert self._kernel is not None
        moment = time.monotonic()
        os.killpg(self._kernel.pid, signal.SIGKILL)  # each process of the host is one of this machine, too
        self._kernel.wait()
        return moment

    def freeze(self) -> float:
        """Stops the kernel, and with it everything that needs it. Returns the moment."""
        assert self._kernel is not None
        self.frozen = True
        self._kernel.send_signal(signal.SIGSTOP)
        return time.monotonic()
