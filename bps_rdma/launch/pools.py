# SPDX-License-Identifier: Apache-2.0
"""Servers that pools lend to a job (`bps-server --pool`)."""

from __future__ import annotations

import dataclasses
import getpass
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address

from bps_rdma import _core
from bps_rdma.errors import BpsError, InvalidArgumentError
from bps_rdma.launch.environment import LocalJob
from bps_rdma.launch.remote.host import free_ports, port_range

_ASK_S = 5.0
_END_S = 1.0  # a job is over within three seconds
# For the questions before the job is known.
_LATER_KNOWN = {"BPS_NUM_WORKERS": "1", "BPS_NUM_SERVERS": "1", "BPS_ROOT_URI": "localhost", "BPS_ROOT_PORT": "1"}
# These ends of a server are no news: it has ended with its job.
_WITH_THE_JOB = "ended with status "


@dataclass(frozen=True)
class PoolName:
    """Where a pool is."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_pools(text: str) -> list[PoolName]:
    """The pools of `dpu1,dpu2:9031,[fd00::1]:9030`, each once.

    Raises:
        InvalidArgumentError: a word is no host, or no port.
    """
    usual = _core.Config().integer("BPS_POOL_PORT")
    found = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        host, colon, port = word.rpartition(":") if not word.endswith("]") else (word, "", "")
        if not colon or (":" in host and not host.endswith("]")):  # an IPv6 address without a port
            host, port = word, str(usual)
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise InvalidArgumentError(f"{word!r} is not a pool", "write a host, or a host and a port, as in dpu1:9030")
        found.append(PoolName(host, int(port)))
    return list(dict.fromkeys(found))


def pools_of(job: LocalJob, option: str | None) -> list[PoolName]:
    """The pools that a job asks whose ranks all run here: those of the option `--pool`, else of BPS_POOL.

    Raises:
        InvalidArgumentError: the job is a part of one on several hosts, which has no place for them.
    """
    if type(job) is LocalJob:
        return parse_pools(_core.Config().text("BPS_POOL") if option is None else option)
    if option:
        raise InvalidArgumentError(
            "--pool is for a bps run that starts all ranks of its job", "name the hosts with -H, or leave it out"
        )
    return []


def connect(name: PoolName, timeout: float = _ASK_S) -> _core.PoolClient:
    """A connection to a pool, as the user whose key BPS_POOL_KEY_FILE has.

    Raises:
        BpsError: there is no pool, or it does not know this user.
    """
    user, key = _core.read_pool_key(_core.Config().text("BPS_POOL_KEY_FILE"), _user_name())
    return _core.PoolClient(name.host, name.port, user, key, timeout)


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may have a user without a name
        return str(os.getuid())


@dataclass
class _Reserved:
    name: PoolName
    client: _core.PoolClient
    lease: int


@dataclass
class Lent:
    """The servers that pools have reserved for a job, one of each pool that had room.

    Attributes:
        job: its name.
    """

    job: str
    _reserved: list[_Reserved] = field(default_factory=list)
    _begun: list[PoolName] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many servers there are."""
        return len(self._reserved)

    def ask(self, names: Sequence[PoolName], env: Mapping[str, str]) -> None:
        """Ask each pool for a server. Says on standard error of those that have none why.

        Args:
            names: the pools.
            env: the variables of all members of the job.
        """
        config = _core.Config()
        variables = dict(env) | _LATER_KNOWN

        def wanted(setting: str) -> int:
            return 0 if config.source(setting) == "default" else config.integer(setting)

        for name in names:
            try:
                client = connect(name)
                lease, cores, memory = client.reserve(
                    self.job, wanted("BPS_SERVER_ENGINE_THREAD"), wanted("BPS_SERVER_MEMORY"), variables
                )
            except BpsError as error:
                print(f"note: no server of {name}: {error.message} ({error.hint})", file=sys.stderr)
                continue
            self._reserved.append(_Reserved(name, client, lease))
            shown = "1 core" if cores == 1 else f"{cores} cores"
            print(f"a server of {name} has {shown} and {memory >> 20} MiB for this job", file=sys.stderr)
        if names and not self._reserved:
            print("note: the job goes on without servers of pools", file=sys.stderr)

    @property
    def address(self) -> str:
        """At which the pools reach this host. One on this host does so at any of its addresses."""
        return min((one.client.address for one in self._reserved), key=lambda one: ip_address(one).is_loopback)

    def given_to(self, job: LocalJob) -> LocalJob:
        """The job with these servers. Its scheduler is then at an address that the pools reach, in BPS_PORTS.

        Raises:
            PortTakenError: too few of BPS_PORTS are free.
        """
        if not self.count:
            return job
        port = free_ports(2 + job.workers, port_range(os.environ.get("BPS_PORTS", "")))[0]
        return dataclasses.replace(job, lent=self.count, address=self.address, scheduler_port=port)

    def begin(self, job: LocalJob, env: Mapping[str, str]) -> None:
        """Start them for a job whose members have the variables `env`, and those of the job.

        Raises:
            BpsError: a pool cannot start its server; the job has to be started again.
        """
        for one in self._reserved:
            one.client.begin(one.lease, dict(env) | job.role("server 0"), job.secret)
            self._begun.append(one.name)
        self._reserved = []  # closes the connections

    def end(self) -> None:
        """End those that run still. Says of those that were ended before why."""
        for name in self._begun:
            try:
                why = connect(name, _END_S).end(self.job)
            except BpsError:  # the pool is gone, or knows nothing of the job: its server ends with the scheduler
                continue
            if why and not why.startswith(_WITH_THE_JOB):
                print(f"note: the server of {name} {why}", file=sys.stderr)


@contextmanager
def lent_to(job: str, names: Sequence[PoolName], env: Mapping[str, str]) -> Iterator[Lent]:
    """The servers that pools lend to a job. They end with the job, or here if the block does not return."""
    lent = Lent(job)
    lent.ask(names, env)
    try:
        yield lent
    except BaseException:
        lent.end()
        raise
