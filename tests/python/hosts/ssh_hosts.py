# SPDX-License-Identifier: Apache-2.0
"""Hosts with a real sshd, each a set of namespaces: network (as in harness.network), processes, mounts and its name.

The launcher has a network of its own as well. Keys, known hosts and names are those of the test alone. What a host has
on its disk is what this machine has, except for what a test puts over it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import harness
from harness import network

HOSTS = ["host1", "host2", "host3"]
LAUNCHER = "launcher"
_BUSY = {"sshd", "sh", "sleep"}  # processes of a host that belong to no job

_HOST = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/sshd
mount -t tmpfs tmpfs /dev/shm
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/nsswitch.conf /etc/nsswitch.conf
hostname {name}
echo up
mkdir {folder}/scratch/{name}
/usr/sbin/sshd -D -e -f {folder}/sshd_config -o SetEnv=TMPDIR={folder}/scratch/{name} 2> {folder}/{name}.log
"""


def why_not() -> str:
    """Why this machine cannot make such hosts; empty: it can."""
    for program in ("sshd", "ssh", "ssh-keygen"):
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None:
            return f"{program} is not installed (ci/setup --dev installs it)"
    return network.why_not()


class Hosts:
    """The hosts and the launcher's network; they live as long as the `with` block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self.network = network.Network([LAUNCHER, *HOSTS])
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        try:
            self._write_files()
            for host in HOSTS:
                self.boot(host)
        except BaseException:
            self.close()
            raise

    def _write_files(self) -> None:
        for name in ("host_key", "user_key"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(keygen, check=True, timeout=60)
        public = (self.folder / "host_key.pub").read_text().split()[:2]
        (self.folder / "known_hosts").write_text("".join(f"{host} {' '.join(public)}\n" for host in HOSTS))
        names = [f"{self.network.address(name, 'control')} {name}" for name in self.network.members]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(names) + "\n")
        # Nobody answers questions about other names here, and to wait for that takes seconds.
        (self.folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        (self.folder / "sshd_config").write_text(
            f"HostKey {self.folder}/host_key\nAuthorizedKeysFile {self.folder}/user_key.pub\nStrictModes no\n"
            "PidFile none\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nMaxStartups 100\n"
        )

    @property
    def rsh(self) -> str:
        """For BPS_RSH."""
        return (
            f"ssh -F none -i {self.folder}/user_key -o IdentitiesOnly=yes -o StrictHostKeyChecking=yes "
            f"-o UserKnownHostsFile={self.folder}/known_hosts"
        )

    def boot(self, host: str) -> None:
        """Starts a host that does not run."""
        script = _HOST.format(folder=self.folder, name=host)
        unshare = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        process = subprocess.Popen(
            [*self.network.inside(host), *unshare, "sh", "-c", script], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, start_new_session=True, env=harness.clean_env(),
        )  # fmt: skip
        self._running[host] = process
        assert process.stdout
        assert process.stdout.readline() == b"up\n", f"{host} does not start"
        harness.eventually(lambda: "listening" in self._log(host), what=f"the sshd of {host}: {self._log(host)}")

    def _log(self, host: str) -> str:
        log = self.folder / f"{host}.log"
        return log.read_text() if log.exists() else ""

    def kill(self, host: str) -> None:
        """Ends every process of a host at once."""
        process = self._running.pop(host)
        process.kill()
        process.communicate()
        (self.folder / f"{host}.log").unlink()
        shutil.rmtree(self.scratch / host)

    def restore(self) -> None:
        """Heals the network, and starts every host anew that is dead, or that a test has changed."""
        for plane in network.PLANES:
            self.network.mend(plane)
        for host in HOSTS:
            if host not in self._running:
                self.boot(host)

    def first_process(self, host: str) -> int:
        """The number, on this machine, of the host's first process."""
        children = Path(f"/proc/{self._running[host].pid}/task/{self._running[host].pid}/children")
        return int(children.read_text().split()[0])

    def run_on(self, host: str, *command: str) -> str:
        """What a command prints that runs on a host."""
        inside = ["nsenter", f"--target={self.first_process(host)}", "--mount", "--pid", "--net", "--uts"]
        done = subprocess.run(
            [*inside, *command], capture_output=True, text=True, check=False, timeout=60 * harness.PATIENCE
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def put_over(self, host: str, path: Path, source: Path) -> None:
        """Lets a host see `source` where others see `path`, until the host is started again."""
        self.run_on(host, "mount", "--bind", str(source), str(path))

    def jobs_on(self, host: str) -> list[str]:
        """The processes of a host that belong to a job."""
        found = []
        for line in self.run_on(host, "sh", "-c", "cat /proc/[0-9]*/stat 2> /dev/null || :").splitlines():
            match = re.match(r"\d+ \((.*)\) (\S)", line)
            if match and match[2] != "Z" and match[1] not in _BUSY | {"cat", "nsenter"}:
                found.append(match[1])
        return found

    def listening(self, host: str) -> list[int]:
        """Ports of a host at which other hosts may call, but for sshd's."""
        lines = self.run_on(host, "ss", "-ltnH").splitlines()
        at = [line.split()[3].rpartition(":") for line in lines]
        return sorted(
            int(port) for address, _, port in at if not address.startswith(("127.", "[::1]")) and port != "22"
        )

    def clean(self) -> None:
        """Fails unless the processes of jobs end on every host, and their folders are gone."""
        for host in self._running:
            harness.eventually(lambda host=host: not self.jobs_on(host), what=f"the end of jobs on {host}: {host}")  # type: ignore[misc]

        harness.eventually(
            lambda: not list(self.scratch.glob("*/bps-run-*")), what="the removal of the folders of jobs"
        )

    def inside_launcher(self, *words: str) -> list[str]:
        """A command in the launcher's network, which knows the names of the hosts."""
        mounts = " && ".join(f"mount --bind {self.folder}/{name} /etc/{name}" for name in ("hosts", "nsswitch.conf"))
        return [
            *self.network.inside(LAUNCHER),
            "unshare",
            "--mount",
            "sh",
            "-c",
            f'{mounts} && exec "$@"',
            "sh",
            *words,
        ]

    def environment(self) -> dict[str, str]:
        """That of the launcher."""
        return harness.clean_env(BPS_RSH=self.rsh, BPS_TRANSPORT="tcp", BPS_TIMEOUT="60")

    def bps(self, *words: str, cwd: Path, env: Mapping[str, str] | None = None) -> harness.Command:
        """`bps words...` on the launcher."""
        log = self.folder / f"launcher-{len(list(self.folder.glob('launcher-*')))}.log"
        inside = self.inside_launcher()
        return harness.Command(
            [harness.binary("bps"), *words], self.environment() | dict(env or {}), log, inside=inside, cwd=cwd
        )

    def ended(self, *words: str, cwd: Path, env: Mapping[str, str] | None = None) -> tuple[int, str]:
        """How `bps words...` ends on the launcher: the status and what it has printed."""
        command = self.bps(*words, cwd=cwd, env=env)
        status = command.wait(60 * harness.PATIENCE)
        if status is None:
            command.kill(signal.SIGINT)
            command.wait(10)
        assert status is not None, f"it does not end: {command.output()}"
        return status, command.output()

    def close(self) -> None:
        for host in list(self._running):
            self.kill(host)
        self.network.close()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def await_files(folder: Path, pattern: str, count: int, command: harness.Command) -> None:
    """Files of a job that this command has started."""
    harness.eventually(
        lambda: len(list(folder.glob(pattern))) >= count,
        what=f"{count} files {pattern}; the launcher has said {command.output()}",
        hopeless=lambda: "" if command.status is None else f"it has ended: {command.output()}",
    )


def lines_of(text: str, beginning: str) -> Sequence[str]:
    """Sorted lines that begin so."""
    return sorted(line for line in text.splitlines() if line.startswith(beginning))
