"""A JobSet for Kubernetes: it starts the workers as pods of one indexed job, and restarts all when one fails.

Its meaning follows the API jobset.x-k8s.io/v1alpha2 and Kubernetes' Job (batch/v1).
"""

from collections.abc import Mapping
from typing import Any

from autoshard.errors import ConfigError
from autoshard.files import yaml_text
from autoshard.launch.emit.request import FINAL_STATUS, NOTICE_S, JobRequest

PORT = 8476
"""Of the coordinator; JAX's own choice on Kubernetes. All pods are new after a restart, so that it can stay."""

WORKER = "worker"
CONFIG_FOLDER = "/etc/autoshard"
CONFIG_FILE = f"{CONFIG_FOLDER}/config.yaml"

_HEADER = """\
# Trains on Kubernetes with JobSet. Made by `autoshard launch --emit kubernetes`; start it with kubectl apply -f.
# It needs the JobSet controller and a volume claim `{claim}` that all nodes can write to (ReadWriteMany).
# Add what your cluster asks for: namespace, queue, node selector, tolerations.
"""


def kubernetes_text(request: JobRequest) -> str:
    """The configuration, a network policy and the JobSet as YAML documents, for `kubectl apply`.

    Raises:
        ConfigError: the number of workers may change, which a JobSet's may not; or no image is named.
    """
    if request.least_workers != request.most_workers:
        raise ConfigError(
            f"--emit kubernetes: a JobSet has a fixed number of workers; received {request.least_workers}:"
            f"{request.most_workers}. Give one number, or run `autoshard launch --engine ray` on a Ray cluster there."
        )
    if not request.image:
        raise ConfigError("--emit kubernetes: --image names the container image with autoshard; none was given.")
    if any(character.isspace() for character in request.image):
        raise ConfigError(
            f"--image: the name of a container image has no white space; received {request.image!r}. Write it as in "
            "registry.example/autoshard:1."
        )
    documents = (_config_map(request), _network_policy(request), job_set(request))
    return _HEADER.format(claim=_claim(request)) + "---\n".join(yaml_text(document) for document in documents)


def job_set(request: JobRequest) -> dict[str, Any]:
    """The JobSet as plain data.

    One worker that fails ends its job, since a group of processes that has lost one cannot go on; the JobSet then
    starts all of them anew, up to `max_restarts` times, and they continue what is saved. An error that would come
    again ends the JobSet at once.
    """
    job = {
        "parallelism": request.most_workers,
        "completions": request.most_workers,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": WORKER, "operator": "In", "values": [FINAL_STATUS]},
                }
            ]
        },
        "template": {"spec": _pod(request)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": request.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": request.name, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": request.max_restarts,
                "restartStrategy": "BlockingRecreate",
                "rules": [
                    {"name": "wouldComeAgain", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
                ],
            },
            "replicatedJobs": [{"name": WORKER, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pod(request: JobRequest) -> dict[str, Any]:
    """The pod of a worker: it has no rights in the cluster, and time to save the run when it is evicted."""
    arguments = (*request.arguments, f"train.output_dir={request.output_dir}", "distributed=true", "train.resume=true")
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    coordinator = f"{request.name}-{WORKER}-0-0.{request.name}:{PORT}"
    own = {"fieldRef": {"fieldPath": "status.podIP"}}
    limits: dict[str, Any] = {}
    if request.gpus_per_worker:
        limits["nvidia.com/gpu"] = str(request.gpus_per_worker)
    if request.cpus_per_worker is not None:
        limits["cpu"] = str(request.cpus_per_worker)
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": NOTICE_S,
        "automountServiceAccountToken": False,
        "containers": [
            {
                "name": WORKER,
                "image": request.image,
                "command": list(arguments),
                "env": [
                    {"name": "JAX_COORDINATOR_ADDRESS", "value": coordinator},
                    {"name": "POD_IP", "valueFrom": own},
                    {"name": "JAX_COORDINATOR_BIND_ADDRESS", "value": f"$(POD_IP):{PORT}"},
                    {"name": "JAX_NUM_PROCESSES", "value": str(request.most_workers)},
                    {"name": "JAX_PROCESS_ID", "valueFrom": index},
                ],
                "ports": [{"name": "coordinator", "containerPort": PORT, "protocol": "TCP"}],
                "resources": {"limits": limits},
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [
                    {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
                    {"name": "output", "mountPath": request.output_dir},
                    {"name": "shared-memory", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "config", "configMap": {"name": f"{request.name}-config"}},
            {"name": "output", "persistentVolumeClaim": {"claimName": _claim(request)}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _config_map(request: JobRequest) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{request.name}-config"},
        "data": {"config.yaml": request.config_text},
    }


def _network_policy(request: JobRequest) -> dict[str, Any]:
    """Lets only the workers themselves reach each other: what they say is neither encrypted nor authenticated."""
    workers: Mapping[str, Any] = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": request.name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"{request.name}-workers"},
        "spec": {
            "podSelector": workers,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": workers}]}],
        },
    }


def _claim(request: JobRequest) -> str:
    return f"{request.name}-output"
