# SPDX-License-Identifier: Apache-2.0
"""One trial in progress: starts its processes, talks to its workers, and collects what it violates."""

import contextlib
import json
import secrets
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from tests.shared.harness import PATIENCE, JobFailedError, Members, clean_env, free_port, over
from tests.shared.harness.network import Network
from tests.shared.harness.ports import LOOPBACK


class Trial(Protocol):
    """What all trials have."""

    @property
    def number(self) -> int: ...
    @property
    def transport(self) -> str: ...
    @property
    def members(self) -> list[str]: ...
    @property
    def needs_network(self) -> bool: ...
    def describe(self) -> str: ...


class TrialRun(Members):
    """A trial in progress. `folder` is for its logs; it may stay, everything else may not.

    A subclass says what happens: start(), play(), finish().
    """

    def __init__(self, trial: Trial, folder: Path) -> None:
        (folder / "tmp").mkdir(parents=True)
        super().__init__(folder)
        self.violations: list[str] = []
        self.network: Network | None = None
        self.port = free_port()
        self._drawn = trial
        self._secret = secrets.token_hex(16)
        self._reports: dict[int, _Lines] = {}

    def __call__(self) -> list[str]:
        """What the trial violated."""
        try:
            with ExitStack() as stack:
                if self._drawn.needs_network:
                    self.network = stack.enter_context(Network(self._drawn.members))
                stack.callback(self.end)
                self.start()
                self.play()
                self.finish()
        except JobFailedError as hang:
            self.violations.append(str(hang))
        left = [*self.left(within=0), *(str(path) for path in (self.folder / "tmp").rglob("*") if not path.is_dir())]
        self.violations += [f"left behind: {what}" for what in left]
        return self.violations

    def start(self) -> None:
        """Starts the processes, and returns when all of them are at work."""
        raise NotImplementedError

    def play(self) -> None:
        """Lets it happen, and judges what follows."""
        raise NotImplementedError

    def finish(self) -> None:
        """Everybody ends by himself."""
        raise NotImplementedError

    # ---- Processes

    def address(self, member: str) -> str:
        """Where the member is reached by the scheduler's connections."""
        return LOOPBACK if self.network is None else self.network.address(member, "control")

    def spawn(self, member: str, words: list[str], env: dict[str, str]) -> None:
        """Starts a member, with these variables beside those that all have."""
        env = clean_env(
            BPS_SECRET=self._secret, BPS_JOB_ID=self._secret[:8], TMPDIR=str(self.folder / "tmp"),
            PYTHONFAULTHANDLER="1", PYTHONDONTWRITEBYTECODE="1",
        ) | env | ({} if self._drawn.transport == "auto" else over(self._drawn.transport))  # fmt: skip
        inside: list[str] = []
        if self.network is not None:
            env["BPS_NODE_HOST"] = self.network.address(member, "data")
            inside = self.network.inside(member)
        self.command(member, words, env, inside=inside, cwd=self.folder / "tmp", told=True)

    def spawn_worker(self, rank: int, script: str, spec: dict[str, Any], env: dict[str, str]) -> None:
        """Starts a worker that runs `script`, of this folder."""
        env = {"CHAOS_SPEC": json.dumps(spec), "CHAOS_REPORT": str(self._report_of(rank))} | env
        self.spawn(f"worker {rank}", [sys.executable, str(Path(__file__).with_name(script))], env)

    def wait_for_end(self, member: str, seconds: float) -> int | None:
        """The status with which a member ends; None: it does not."""
        status: int | None = self.processes[member].wait(seconds * PATIENCE)
        if status is None:
            self.violations.append(f"{member} does not end; {self.report()}")
        return status

    def judge_reports(self, workers: int, survivors: list[int]) -> None:
        """Takes over what workers have found themselves; those that are left have checked their arrays at the end."""
        for rank in range(workers):
            for line in self.lines(rank, "violation"):
                self.violations.append(f"worker {rank}: {line['text']}")
            if rank in survivors and not self.said(rank, "checked"):
                self.violations.append(f"worker {rank} could not check its arrays")

    # ---- Talking to workers

    def _report_of(self, rank: int) -> Path:
        return self.folder / f"worker-{rank}.jsonl"

    def lines(self, rank: int, what: str) -> list[dict[str, Any]]:
        """What a worker has reported."""
        if rank not in self._reports:
            self._reports[rank] = _Lines(self._report_of(rank))
        return [line for line in self._reports[rank].read() if line["what"] == what]

    def said(self, rank: int, what: str) -> bool:
        return bool(self.lines(rank, what))

    def tell(self, member: str, word: str) -> None:
        """Gives a worker a command; one that has ended is looked at elsewhere."""
        self.processes[member].tell(word)

    def await_all(
        self, ranks: Collection[int], condition: Callable[[int], bool], seconds: float, what: str, alive: bool = False
    ) -> None:
        """Waits until each of these workers fulfils a condition.

        Raises JobFailedError when one does not, or cannot because a member failed; alive: because it has ended itself.
        """
        for rank in ranks:
            self.eventually(
                lambda rank=rank: condition(rank), seconds, f"worker {rank}: {what}",  # type: ignore[misc]
                of=[f"worker {rank}"] if alive else None,
            )  # fmt: skip

    def report(self) -> str:
        """Who has ended. Leaves a file that tells a process that hangs from one that gets no processor time."""
        fields = ("comm", "stat", "wchan", "syscall")
        with (self.folder / "threads").open("a") as out:
            print("load", Path("/proc/loadavg").read_text().strip(), file=out)
            for member, process in self.processes.items():
                for task in sorted(Path(f"/proc/{process.pid}/task").glob("*")):
                    with contextlib.suppress(OSError):  # it has ended meanwhile
                        print(member, *((task / field).read_text().strip() for field in fields), sep="; ", file=out)
        return f"ended are { {name: one.status for name, one in self.processes.items() if one.status is not None} }"


class _Lines:
    """The lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._lines: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._offset += len(whole) + 1
                self._lines += [json.loads(line) for line in whole.splitlines()]
        return self._lines


def describe_status(status: int) -> str:
    """How a process ended."""
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
