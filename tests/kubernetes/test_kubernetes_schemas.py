# SPDX-License-Identifier: Apache-2.0
"""The manifests fit the schemas: of Kubernetes itself for its own kinds, and our excerpts for others."""

import copy
import re
from typing import Any

import jsonschema
import kubernetes_validate
import manifests
import pytest
import yaml
from fields import KINDS

# Labels of the pods that a policy lets in; operators give them to all pods of a resource.
POLICIES = {
    "job.yaml": {"bps-job": "train"},
    "servers.yaml": {"bps-job": "train"},
    "jobset.yaml": {"jobset.sigs.k8s.io/jobset-name": "bps"},
    "pytorchjob.yaml": {"training.kubeflow.org/job-name": "bps"},
}
OLDEST, NEWEST = "1.28", kubernetes_validate.latest_version()


def check(document: dict[str, Any], version: str = NEWEST) -> None:
    """Raises ValidationError, of either library."""
    excerpt = KINDS.get((document["apiVersion"], document["kind"]))
    if excerpt is None:
        kubernetes_validate.validate(document, version, strict=True)
        return
    anything = {"type": "object"}
    jsonschema.validate(document["spec"], excerpt | {"$defs": {"pod": anything, "job": anything}})
    for group in templates(document["spec"]):
        kind = {"apiVersion": "batch/v1", "kind": "Job"} if "template" in group["spec"] else None
        kind = kind or {"apiVersion": "v1", "kind": "Pod"}
        kubernetes_validate.validate(kind | {"metadata": {"name": "x"}} | copy.deepcopy(group), version, strict=True)


def check_all(documents: list[dict[str, Any]], version: str = NEWEST) -> None:
    for document in documents:
        check(document, version)


def templates(node: Any) -> list[dict[str, Any]]:
    """The outermost templates within: of jobs, or of pods."""
    if isinstance(node, list):
        return [found for value in node for found in templates(value)]
    if not isinstance(node, dict):
        return []
    found = [node["template"]] if "template" in node else []
    return found + [more for name, value in node.items() if name != "template" for more in templates(value)]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", manifests.NAMES)
def test_a_manifest_fits(name: str, version: str) -> None:
    documents = manifests.load(name)
    assert documents
    check_all(documents, version)


@pytest.mark.parametrize("name", manifests.NAMES)
def test_a_wrong_field_of_a_container_is_found(name: str) -> None:
    """Shows that pod templates are looked at, wherever they are."""
    for document in manifests.load(name):
        for index in range(len(list(manifests.pod_specs(document)))):
            broken = copy.deepcopy(document)
            list(manifests.pod_specs(broken))[index]["containers"][0]["volumeMount"] = []
            with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
                check(broken)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("jobset.yaml", "maxRestarts", "maxRestart"),
        ("jobset.yaml", "operator: All", "operator: Every"),
        ("pytorchjob.yaml", 'nprocPerNode: "2"', "nprocPerNode: 2"),
        ("rayjob.yaml", "minReplicas: 2", 'minReplicas: "2"'),
        ("rayjob.yaml", 'num-cpus: "0"', "num-cpus: 0"),
        ("job.yaml", "backoffLimit: 6", "backoffLimits: 6"),
        *((name, "policyTypes", "policyType") for name in POLICIES),
    ],
)
def test_a_wrong_field_of_a_resource_is_found(name: str, old: str, new: str) -> None:
    with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
        check_all(manifests.load(name, {old: new}))


@pytest.mark.parametrize("name", manifests.NAMES)
def test_what_every_pod_has(name: str) -> None:
    """No secret in the manifest; memory with a limit; a volume for /dev/shm that has a size, and fits into that."""
    for document in manifests.load(name):
        for pod in manifests.pod_specs(document):
            sizes = {
                volume["name"]: volume["emptyDir"]["sizeLimit"]
                for volume in pod.get("volumes", [])
                if "emptyDir" in volume
            }
            for container in pod["containers"]:
                assert "memory" in container["resources"]["limits"]
                for mount in container.get("volumeMounts", []):
                    if mount.get("readOnly"):  # a secret
                        continue
                    assert gigabytes(sizes[mount["name"]]) < gigabytes(container["resources"]["limits"]["memory"])
                for variable in container.get("env", []):
                    if variable["name"] == "BPS_SECRET":
                        assert variable["valueFrom"]["secretKeyRef"] == {"name": "bps", "key": "secret"}


@pytest.mark.parametrize("name", POLICIES)
def test_only_pods_of_the_job_reach_each_other(name: str) -> None:
    *others, policy = manifests.load(name)
    wanted = POLICIES[name]
    assert policy["kind"] == "NetworkPolicy"
    assert policy["spec"] == {
        "podSelector": {"matchLabels": wanted},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": wanted}}]}],
    }
    pods = [template for one in others for template in innermost(one)]
    assert pods
    ours = [document for document in others if document["kind"] in ("JobSet", "PyTorchJob")]
    if ours:
        assert [document["metadata"]["name"] for document in ours] == list(wanted.values())
    else:
        assert all(wanted.items() <= template["metadata"]["labels"].items() for template in pods)


def innermost(node: Any) -> list[dict[str, Any]]:
    """The templates of pods within."""
    if isinstance(node, list):
        return [found for value in node for found in innermost(value)]
    if not isinstance(node, dict):
        return []
    found = [node["template"]] if "containers" in node.get("template", {}).get("spec", {}) else []
    return found + [more for value in node.values() for more in innermost(value)]


@pytest.mark.parametrize("name", POLICIES)
def test_the_lines_for_rdma_fit(name: str) -> None:
    """When they are uncommented every rank and server has the device, and may lock memory."""
    text = (manifests.FOLDER / name).read_text()
    with_rdma = re.sub(r"^( *)# (rdma/hca: |securityContext: )", r"\1\2", text, flags=re.MULTILINE)
    documents = list(yaml.safe_load_all(with_rdma))
    check_all(documents)
    containers = [one for document in documents for pod in manifests.pod_specs(document) for one in pod["containers"]]
    assert containers
    for container in containers:
        if container["command"] == ["bps-scheduler"]:
            assert "securityContext" not in container
        else:
            assert container["resources"]["limits"]["rdma/hca"] == 1
            assert container["securityContext"] == {"runAsUser": 0, "capabilities": {"add": ["IPC_LOCK"]}}


def test_a_policy_can_let_in_servers_of_dpus() -> None:
    """The pods of dpu-servers.yaml have the addresses of their hosts."""
    line = "- ipBlock: {cidr: 10.0.0.0/24}"
    documents = manifests.load("servers.yaml", {f"# {line}": line})
    check_all(documents)
    (rule,) = documents[-1]["spec"]["ingress"]
    assert rule["from"][1] == {"ipBlock": {"cidr": "10.0.0.0/24"}}


@pytest.mark.parametrize("name", manifests.NAMES)
def test_servers_and_schedulers_have_probes(name: str) -> None:
    """A scheduler's look at the port that its members connect to; a server's are run by test_kubernetes_start.py."""
    for document in manifests.load(name):
        for pod in manifests.pod_specs(document):
            for container in pod["containers"]:
                for probe in ("readinessProbe", "livenessProbe"):
                    if container.get("command") == ["bps-scheduler"]:
                        assert container[probe]["tcpSocket"] == {"port": 9010}
                    if container.get("command") == ["bps-server"]:
                        assert ":2332 " in container[probe]["exec"]["command"][-1]  # 9010


def gigabytes(text: str) -> float:
    return float(text.removesuffix("Gi")) if text.endswith("Gi") else float(text.removesuffix("Mi")) / 1024
