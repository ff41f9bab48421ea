# SPDX-License-Identifier: Apache-2.0
"""The actors of one attempt: starts them, gives them their identity, and ends them.

All actors exist before any of them is told who it is: the addresses in the identity are theirs.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
import ray.util.client
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bps_rdma.ray.actors import HelperActor, RankActor, Whereabouts
from bps_rdma.ray.errors import Failure, JobFailedError, Kind, StartError
from bps_rdma.ray.placement import Address, Identity, JobShape, MemberPlace, Placement, addresses


@dataclass
class Actor:
    """The driver's side of one member."""

    label: str
    node: str
    handle: Any
    at: Whereabouts | None = None

    @property
    def where(self) -> str:
        """The process and host of the actor, for messages."""
        if self.at is None:
            return f"on {addresses().get(self.node, 'a lost node')}"
        return f"pid {self.at.pid} on {self.at.host}"


class Members:
    """The members of one attempt; use as `with Members(...) as members:`, at whose end all of them are killed."""

    def __init__(self, shape: JobShape, placement: Placement, env: Mapping[str, str], runtime_env: Any) -> None:
        """Start the actors. `env` is there before their interpreters start."""
        self._placement = placement
        self._shape = shape
        inherited = dict(runtime_env or {})
        variables = {**inherited.get("env_vars", {}), **env}
        self.runtime_env = {**inherited, "env_vars": variables} if variables else inherited or None
        # With BPS_SCHEDULER_PATIENCE=0 members end with their scheduler: see placement.adopt().
        self.waits_for_schedulers = variables.get("BPS_SCHEDULER_PATIENCE", "30").strip() not in ("0", "0.0")
        self.ranks: list[Actor] = []
        self.servers: list[Actor] = []
        self.scheduler: Actor | None = None
        self._identity: Identity | None = None
        self._run_of_scheduler: Any = None  # the future of what another scheduler must know
        try:
            for place in placement.ranks:
                self.ranks.append(self._start(RankActor, f"rank {place.rank}", place, shape.rank_resources))
            for number, one in enumerate(placement.servers):
                self.servers.append(self._start(HelperActor, f"server {number}", one, shape.server_resources))
            if shape.has_scheduler:
                beside = [*placement.servers, *placement.ranks][0]
                self.scheduler = self._start(HelperActor, "scheduler", beside, {})
        except BaseException:
            self.kill()
            raise

    def _start(self, kind: type, label: str, place: MemberPlace, resources: Mapping[str, float]) -> Actor:
        rest = dict(resources)
        options: dict[str, Any] = {
            "num_cpus": rest.pop("CPU", 0), "num_gpus": rest.pop("GPU", 0), "resources": rest or None,
            "max_restarts": 0, "max_task_retries": 0, "runtime_env": self.runtime_env,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._placement.group, place.bundle),
        }  # fmt: skip
        return Actor(label, place.node, ray.remote(**options)(kind).remote(label))

    @property
    def helpers(self) -> list[Actor]:
        """Members that are no ranks."""
        return [*self.servers, *([self.scheduler] if self.scheduler else [])]

    @property
    def actors(self) -> list[Actor]:
        """All members."""
        return [*self.ranks, *self.helpers]

    def identify(self, deadline: float, attempt: int) -> None:
        """Wait until all actors run, and tell them who they are.

        Raises:
            StartError: some did not in time; names them.
        """
        found = _gather({actor.label: actor for actor in self.actors}, "whereabouts", {}, deadline)
        for actor in self.actors:
            actor.at = found[actor.label]
        first, scheduler = found["rank 0"], found.get("scheduler")
        identity = Identity(
            self._shape.workers, len(self.servers), Address(first.host, first.port),
            Address(scheduler.host, scheduler.port) if scheduler else None, attempt, self._shape.least,
        )  # fmt: skip
        self._identity = identity
        variables = {actor.label: identity.server() for actor in self.helpers}
        variables |= {f"rank {place.rank}": identity.rank(place) for place in self._placement.ranks}
        _gather({actor.label: actor for actor in self.actors}, "adopt", variables, deadline)

    def begin(self, pickled: Any) -> tuple[dict[Any, Actor], dict[Any, Actor]]:
        """Start the servers, then the function on all ranks; the futures of ranks and those of the others."""
        serving = {self._serve(actor): actor for actor in self.helpers}
        return {actor.handle.run.remote(pickled): actor for actor in self.ranks}, serving

    def _serve(self, actor: Actor) -> Any:
        if actor is not self.scheduler:
            return actor.handle.serve.remote("server")
        known = None
        with contextlib.suppress(Exception):  # there is none, or it ended before it had told
            known = ray.get(self._run_of_scheduler, timeout=0)
        self._run_of_scheduler = actor.handle.start_scheduler.remote(known)
        return actor.handle.serve.remote("scheduler")

    def start_again(self, lost: Actor, pickled: Any) -> tuple[Any, Actor]:
        """Start an actor in the place of a lost member, which enters the running job; its future, and itself.

        It does not wait. Where the node has gone, too, Ray first has to find room for the bundle elsewhere.
        """
        assert self._identity is not None
        with contextlib.suppress(Exception):
            ray.kill(lost.handle, no_restart=True)  # its process lives on if its function has raised
        if lost in self.ranks:
            number = self.ranks.index(lost)
            place = self._placement.ranks[number]
            actor = self._start(RankActor, lost.label, place, self._shape.rank_resources)
            actor.handle.adopt.remote(self._identity.rank(place))
            self.ranks[number] = actor
            return actor.handle.run.remote(pickled), actor
        if lost is self.scheduler:
            beside = [*self._placement.servers, *self._placement.ranks][0]
            self.scheduler = self._start(HelperActor, lost.label, beside, {})
            self.scheduler.handle.adopt.remote(self._identity.server())
            return self._serve(self.scheduler), self.scheduler
        number = self.servers.index(lost)
        actor = self._start(HelperActor, lost.label, self._placement.servers[number], self._shape.server_resources)
        actor.handle.adopt.remote(self._identity.server())
        self.servers[number] = actor
        return self._serve(actor), actor

    def kill(self) -> None:
        """End all members now, and give their resources back."""
        for actor in self.actors:
            with contextlib.suppress(Exception):
                ray.kill(actor.handle, no_restart=True)
        self._placement.release()

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.kill()


def _gather(actors: Mapping[str, Actor], method: str, arguments: Mapping[str, Any], deadline: float) -> dict[str, Any]:
    """Call a method of all actors; their results by label. Ends at the first failure."""
    waiting = {
        getattr(actor.handle, method).remote(*([arguments[label]] if label in arguments else [])): actor
        for label, actor in actors.items()
    }
    begun = time.monotonic()
    found: dict[str, Any] = {}
    while waiting:
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            missing = ", ".join(f"{actor.label} ({actor.where})" for actor in waiting.values())
            raise StartError(
                f"no answer from {missing} within {time.monotonic() - begun:.0f} s",
                "their nodes are too busy, do not answer, or still prepare the runtime_env: see their logs in "
                "/tmp/ray/session_latest/logs, or raise start_timeout",
            )
        actor = waiting.pop(done[0])
        try:
            found[actor.label] = ray.get(done[0])
        except Exception as error:
            failure = Failure(actor.label, actor.where, error)
            reason, hint = _reason(failure.cause)
            raise StartError(f"{actor.label} ({actor.where}) did not start: {reason}", hint) from error
    return found


def _reason(error: BaseException) -> tuple[str, str]:
    """The line of Ray's text that tells most, which is the last one of a traceback; and what to do."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error:" in line and not line.startswith("File ")]
    because = [line for line in lines if " because " in line]
    if because and not named:
        hint = "killed, often for lack of memory, or crashed: see there `dmesg` and /tmp/ray/session_latest/logs"
        return because[0].partition(". ")[0], hint
    hint = "bps_rdma and what it needs must be importable by the Python of every node"
    return (named or lines or [type(error).__name__])[-1], hint


_NODE_ANSWERS_S = 2.0
# A connection of HTTP/2 begins with the preface and an empty frame of settings. A server answers with its settings.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


def silent_nodes(actors: Iterable[Actor], error: JobFailedError | None) -> set[str]:
    """Nodes of the job whose raylet does not answer.

    The raylet is asked itself, by the port through which drivers get workers from it: a task would need a new process
    there, which takes seconds where it is busy. A driver outside the cluster (ray://) cannot ask.

    Args:
        actors: of the attempt that failed.
        error: the failure. Nodes with a member that has just raised by itself are not asked. None: all are asked.
    """
    if ray.util.client.ray.is_connected():
        return set()
    spoke = (
        {failure.member for failure in error.failures if failure.kind is not Kind.DIED} if error is not None else set()
    )
    answered = {actor.node for actor in actors if actor.label in spoke} | {ray.get_runtime_context().get_node_id()}
    asked = {actor.node for actor in actors} - answered
    ports = {
        node["NodeID"]: (str(node["NodeManagerAddress"]), int(node["NodeManagerPort"]))
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] in asked
    }
    if not ports:
        return set()
    with ThreadPoolExecutor(len(ports)) as pool:
        found = list(pool.map(_answers, ports.values()))
    return {node for node, answers in zip(ports, found, strict=True) if not answers}


def answers(actor: Actor) -> bool:
    """Returns whether the node of an actor is alive, as far as can be known."""
    known = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return actor.node in known and not silent_nodes([actor], None)


def _answers(address: tuple[str, int]) -> bool:
    """Returns whether a raylet runs there. One that wants TLS closes the connection, which is an answer, too."""
    try:
        with socket.create_connection(address, _NODE_ANSWERS_S) as connection:
            connection.settimeout(_NODE_ANSWERS_S)
            connection.sendall(_GREETING)
            connection.recv(1)
    except OSError:
        return False
    return True
