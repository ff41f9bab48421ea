# SPDX-License-Identifier: Apache-2.0
"""The start line of every container, run as a process with the variables that the kubelet would set.

All pods are on this machine, so names of pods become the loopback address, and ports free ones. The RayJob is left out:
the operator starts its containers with a line of its own; tests/ray runs that of its driver.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import manifests
import pytest

RANK = str(Path(__file__).parents[1] / "slurm" / "rank.py")


@dataclass
class Pod:
    """One pod: the container that it has, and the variables that its controller adds to it."""

    spec: dict[str, Any]
    name: str
    labels: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)

    @property
    def container(self) -> dict[str, Any]:
        assert len(self.spec["containers"]) == 1
        return dict(self.spec["containers"][0])

    def env(self, maps: dict[str, dict[str, str]]) -> dict[str, str]:
        """As the kubelet makes it: maps first, then the container's own, which may refer to earlier ones."""
        found = dict(self.added)
        for source in self.container.get("envFrom", []):
            found |= maps[source["configMapRef"]["name"]]
        for variable in self.container.get("env", []):
            value = variable["value"] if "value" in variable else self._value_from(variable["valueFrom"])
            found[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], value)
        # Not the kubelet's: that they are different hosts.
        return harness.clean_env(**found, BPS_HOST_ID=self.name)

    def _value_from(self, source: dict[str, Any]) -> str:
        if "secretKeyRef" in source:
            return "5a" * 32
        path = source["fieldRef"]["fieldPath"]
        if path == "status.podIP":
            return "127.0.0.1"
        match = re.fullmatch(r"metadata\.labels\['(.*)'\]", path)
        assert match is not None
        return self.labels[match[1]]


def pods_of(document: dict[str, Any]) -> Iterator[Pod]:
    """What the controller of this object would make."""
    kind, spec, name = document["kind"], document.get("spec", {}), document["metadata"]["name"]
    if kind == "Job":
        yield from _indexed(spec, name, {})
    elif kind == "JobSet":
        for group in spec["replicatedJobs"]:
            labels = {"jobset.sigs.k8s.io/restart-attempt": "0"}
            yield from _indexed(group["template"]["spec"], f"{name}-{group['name']}-0", labels)
    elif kind in ("StatefulSet", "DaemonSet"):
        for index in range(spec.get("replicas", 2)):
            yield Pod(spec["template"]["spec"], f"{name}-{index}")
    elif kind == "PyTorchJob":
        for index, role in enumerate(("Master", "Worker")):
            # What the training operator sets in both pods.
            petted = {
                "PET_NNODES": "2", "PET_NODE_RANK": str(index), "PET_NPROC_PER_NODE": spec["nprocPerNode"],
                "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(PORT), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(PORT), "WORLD_SIZE": "4", "RANK": str(index),
            }  # fmt: skip
            yield Pod(spec["pytorchReplicaSpecs"][role]["template"]["spec"], f"{name}-{role.lower()}-0", added=petted)


PORT = harness.free_port()


def _indexed(job: dict[str, Any], name: str, labels: dict[str, str]) -> Iterator[Pod]:
    assert job["completionMode"] == "Indexed"
    for index in range(job["completions"]):
        pod = f"{name}-{index}"
        yield Pod(job["template"]["spec"], pod, labels, {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": pod})


class Cluster(harness.Members):
    """The processes of all pods of some manifests, by the names of the pods."""

    def __init__(self, *documents: dict[str, Any]) -> None:
        super().__init__()
        self.maps = {one["metadata"]["name"]: one["data"] for one in documents if one["kind"] == "ConfigMap"}
        self.pods = [pod for document in documents for pod in pods_of(document)]

    def start(self, pod: Pod) -> None:
        words = [*pod.container["command"], *pod.container.get("args", [])]
        words[0] = harness.binary(words[0]) if words[0].startswith(("bps", "torchrun")) else words[0]
        env = pod.env(self.maps)
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        self.command(pod.name, words, env, cwd="/")


def changes(*pods: str) -> dict[str, str]:
    """What has to be changed in the text of a manifest, so that its pods can be on this machine."""
    return dict.fromkeys(pods, "127.0.0.1") | {"/workspace/train.py": RANK}


def ranks_in(text: str) -> list[str]:
    return sorted(re.findall(r"rank \d of \d: \S+", text))


ALL = [f"rank {rank} of 4: 6.0" for rank in range(4)]


def test_an_indexed_job() -> None:
    with Cluster(*manifests.load("job.yaml", changes("bps-ranks-0.bps"))) as pods:
        for pod in pods.pods:
            pod.added["MASTER_PORT"] = str(PORT)
            pods.start(pod)
        assert len(pods.processes) == 2
        pods.succeed()
        assert ranks_in(pods.report()) == ALL


def port_of(port: int) -> dict[str, str]:
    return {"9010": str(port), ":2332 ": f":{port:04X} "}


def passes(pod: Pod, probe: str) -> bool:
    command = pod.container[probe]["exec"]["command"]
    return subprocess.run(command, env=pod.env({"bps": {}}), check=False).returncode == 0


@pytest.mark.parametrize("servers", ["servers.yaml", "dpu-servers.yaml"])
def test_dedicated_servers(servers: str) -> None:
    port = harness.free_port()
    texts = changes("bps-scheduler-0.bps", "bps-ranks-0.bps") | port_of(port)
    documents = manifests.load("servers.yaml", texts)
    if servers != "servers.yaml":
        probe = {":2332 ": f":{port:04X} ", "value: rdma,tcp": "value: tcp"}
        documents = [one for one in documents if one["metadata"]["name"] != "bps-server"]
        documents += manifests.load(servers, probe)
    with Cluster(*documents) as pods:
        members = {name: [pod for pod in pods.pods if name in pod.name] for name in ("scheduler", "server", "ranks")}
        assert [len(of_kind) for of_kind in members.values()] == [1, 2, 2]
        assert not passes(members["server"][0], "readinessProbe")
        assert passes(members["server"][0], "livenessProbe")  # it waits for its scheduler
        for pod in members["scheduler"] + members["server"]:
            pods.start(pod)
        pods.eventually(lambda: passes(members["server"][0], "readinessProbe"))
        assert passes(members["server"][0], "livenessProbe")
        for pod in members["ranks"]:
            pod.added["MASTER_PORT"] = str(PORT)
            pods.start(pod)
        pods.succeed()
        assert ranks_in(pods.report()) == ALL
        assert f"waiting for 4 workers and 2 servers on port {port}" in pods.report()


def test_a_stopped_server_is_not_alive() -> None:
    port = harness.free_port()
    documents = manifests.load("servers.yaml", changes("bps-scheduler-0.bps", "bps-ranks-0.bps") | port_of(port))
    with Cluster(*documents) as pods:
        scheduler, server = (next(pod for pod in pods.pods if name in pod.name) for name in ("scheduler", "server"))
        pods.start(scheduler)
        pods.start(server)
        pods.eventually(lambda: passes(server, "readinessProbe"))
        pods.kill(server.name, signal.SIGSTOP)
        assert passes(server, "livenessProbe")  # nobody misses it yet
        pods.kill(scheduler.name)
        pods.eventually(lambda: not passes(server, "livenessProbe"))
        pods.kill(server.name, signal.SIGCONT)
        pods.eventually(lambda: passes(server, "livenessProbe"))


def test_a_jobset() -> None:
    texts = changes("bps-scheduler-0-0.bps", "bps-ranks-0-0.bps") | port_of(harness.free_port())
    with Cluster(*manifests.load("jobset.yaml", texts)) as pods:
        *others, rank = sorted(pods.pods, key=lambda pod: "ranks" in pod.name)
        server = next(pod for pod in others if "servers" in pod.name)
        assert not passes(server, "readinessProbe")
        for pod in others:
            pods.start(pod)
        pods.eventually(lambda: passes(server, "readinessProbe"))
        assert passes(server, "livenessProbe")
        pods.start(rank)
        assert len(pods.processes) == 5
        pods.succeed()
        assert ranks_in(pods.report()) == ALL
        assert "bps-0" in pods.report()  # the job of the first attempt


def test_a_pytorchjob() -> None:
    with Cluster(*manifests.load("pytorchjob.yaml", {"/workspace/train.py": RANK})) as pods:
        for pod in pods.pods:
            pods.start(pod)
        assert len(pods.processes) == 2
        pods.succeed()
        assert ranks_in(pods.report()) == ALL


def test_a_pool(tmp_path: Path) -> None:
    keys = tmp_path / "pool-keys"
    keys.touch(0o600)
    keys.write_text("alice 0123456789abcdef\n")
    with Cluster(*manifests.load("pool.yaml", {"/etc/bps/pool-keys": str(keys)})) as pods:
        pool = pods.pods[0]
        pool.added |= {"BPS_POOL_PORT": str(PORT), "BPS_POOL_MEMORY": str(1 << 30)}
        pods.start(pool)
        pods.eventually(lambda: f"pool on port {PORT}: 4 jobs, 8 cores and 1024 MiB of memory" in pods.report())
        env = harness.clean_env(BPS_POOL=f"127.0.0.1:{PORT}", BPS_POOL_KEY_FILE=str(keys))
        done = harness.run_command([harness.binary("bps"), "run", "-np", "2", RANK], env=env)
        assert ranks_in(done.stdout) == ["rank 0 of 2: 1.0", "rank 1 of 2: 1.0"], done.stderr
        assert "a server of" in done.stderr
        pods.eventually(lambda: "ended with status 0" in pods.report())


def test_every_manifest_is_started_here() -> None:
    assert manifests.NAMES == [
        "dpu-servers.yaml", "job.yaml", "jobset.yaml", "pool.yaml", "pytorchjob.yaml", "rayjob.yaml", "servers.yaml",
    ]  # fmt: skip
