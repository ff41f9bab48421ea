# SPDX-License-Identifier: Apache-2.0
"""The fields of custom resources that our manifests may have: own excerpts of what their operators publish.

A field that is not here is unknown to the test, whether or not the operator knows it: look it up, and add it. Pod
templates are checked against Kubernetes' own schema instead (`POD`).
"""

from typing import Any

POD: dict[str, Any] = {"$ref": "#/$defs/pod"}
JOB: dict[str, Any] = {"$ref": "#/$defs/job"}
NUMBER = {"type": "integer"}
TEXT = {"type": "string"}
FLAG = {"type": "boolean"}


def of(*needed: str, **fields: Any) -> dict[str, Any]:
    """An object that has no other fields than these, and at least the `needed` ones."""
    return {"type": "object", "properties": fields, "required": list(needed), "additionalProperties": False}


def list_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


def words(*allowed: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(allowed)}


JOBSET = of(
    "replicatedJobs",
    network=of(enableDNSHostnames=FLAG, subdomain=TEXT, publishNotReadyAddresses=FLAG),
    successPolicy=of("operator", operator=words("All", "Any"), targetReplicatedJobs=list_of(TEXT)),
    failurePolicy=of(maxRestarts=NUMBER, restartStrategy=words("Recreate", "BlockingRecreate")),
    startupPolicy=of("startupPolicyOrder", startupPolicyOrder=words("AnyOrder", "InOrder")),
    suspend=FLAG,
    ttlSecondsAfterFinished=NUMBER,
    replicatedJobs=list_of(of("name", "template", name=TEXT, groupName=TEXT, replicas=NUMBER, template=JOB)),
)

_REPLICA = of(
    "template",
    replicas=NUMBER,
    restartPolicy=words("Always", "OnFailure", "Never", "ExitCode"),
    template=POD,
)
PYTORCHJOB = of(
    "pytorchReplicaSpecs",
    nprocPerNode=TEXT,
    runPolicy=of(
        cleanPodPolicy=words("Running", "All", "None"),
        backoffLimit=NUMBER,
        activeDeadlineSeconds=NUMBER,
        ttlSecondsAfterFinished=NUMBER,
        suspend=FLAG,
    ),
    pytorchReplicaSpecs=of(Master=_REPLICA, Worker=_REPLICA),
)

_START = {"type": "object", "additionalProperties": TEXT}  # of `ray start`; all values are texts
RAYJOB = of(
    "rayClusterSpec",
    entrypoint=TEXT,
    shutdownAfterJobFinishes=FLAG,
    ttlSecondsAfterFinished=NUMBER,
    activeDeadlineSeconds=NUMBER,
    backoffLimit=NUMBER,
    runtimeEnvYAML=TEXT,
    submissionMode=words("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
    rayClusterSpec=of(
        "headGroupSpec",
        rayVersion=TEXT,
        headGroupSpec=of("template", rayStartParams=_START, serviceType=TEXT, template=POD),
        workerGroupSpecs=list_of(
            of(
                "groupName",
                "template",
                groupName=TEXT,
                replicas=NUMBER,
                minReplicas=NUMBER,
                maxReplicas=NUMBER,
                numOfHosts=NUMBER,
                rayStartParams=_START,
                template=POD,
            )
        ),
    ),
)

KINDS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): JOBSET,
    ("kubeflow.org/v1", "PyTorchJob"): PYTORCHJOB,
    ("ray.io/v1", "RayJob"): RAYJOB,
}
