# SPDX-License-Identifier: Apache-2.0
"""Which nodes do not answer, although Ray may take them to be alive for another minute."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import ray
import ray.util.client

from bps_rdma.ray.errors import JobFailedError, Kind
from bps_rdma.ray.group import Actor

_NODE_ANSWERS_S = 2.0
# How a connection of HTTP/2 begins: the preface, and an empty frame of settings. A server answers with its settings.
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


def silent_nodes(actors: Iterable[Actor], error: JobFailedError | None) -> set[str]:
    """Nodes of the job whose raylet does not answer.

    The raylet is asked itself, by the port through which drivers get workers from it: a task would need a new process
    there, which takes seconds where it is busy. A driver outside the cluster (ray://) cannot ask.

    Args:
        actors: of the attempt that failed.
        error: how; nodes of which a member has just raised by itself are not asked. None: all are.
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
    """Whether the node of an actor is alive, as far as can be known."""
    known = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return actor.node in known and not silent_nodes([actor], None)


def _answers(address: tuple[str, int]) -> bool:
    """Whether a raylet is there and runs. One that wants TLS closes the connection, which is an answer, too."""
    try:
        with socket.create_connection(address, _NODE_ANSWERS_S) as connection:
            connection.settimeout(_NODE_ANSWERS_S)
            connection.sendall(_GREETING)
            connection.recv(1)
    except OSError:
        return False
    return True
