"""A decision for Kueue: priorities, queues and quotas, and the size of each job.

Follows kueue.x-k8s.io/v1beta1. Kueue admits jobs by priority as quota allows, and preempts lower ones; it does not
choose sizes, so that these are set on the JobSets, whose number of workers is fixed while they run.
"""

from collections.abc import Sequence
from typing import Any

from autoshard.cluster import Cluster
from autoshard.errors import ShareError
from autoshard.files import yaml_text
from autoshard.launch.emit.request import job_name
from autoshard.share.emit.ranking import Ranked

_HEADER = """\
# For Kueue: made by `autoshard share --emit kueue`. Apply it with kubectl apply -f; give each JobSet of
# `autoshard launch --emit kubernetes` the labels and sizes of its entry in the ConfigMap at the end.
# Nodes need the label autoshard/group with the name of their group in the cluster file.
"""
_QUEUE = "autoshard"


def kueue_text(ranked: Sequence[Ranked], cluster: Cluster, resource: str = "nvidia.com/gpu") -> str:
    """YAML documents for `kubectl apply`: flavors with quotas, queues, a priority class and the labels for each job.

    Raises:
        ShareError: two jobs would have the same name in Kubernetes.
    """
    given: dict[str, str] = {}
    for one in ranked:
        other = given.setdefault(job_name(one.name), one.name)
        if other != one.name:
            raise ShareError(
                f"--emit kueue: names in Kubernetes have lower-case letters, digits and hyphens, and {other!r} and "
                f"{one.name!r} are both {job_name(one.name)!r} there. Rename one of the jobs."
            )
    documents = [*_flavors(cluster), _cluster_queue(cluster, resource), _local_queue()]
    documents += [_priority(one) for one in ranked]
    documents.append(_labels(ranked))
    return _HEADER + "---\n".join(yaml_text(document) for document in documents)


def _flavors(cluster: Cluster) -> list[dict[str, Any]]:
    return [
        _object("ResourceFlavor", job_name(group.name), {"nodeLabels": {"autoshard/group": group.name}})
        for group in cluster.groups
    ]


def _cluster_queue(cluster: Cluster, resource: str) -> dict[str, Any]:
    flavors = [
        {"name": job_name(g.name), "resources": [{"name": resource, "nominalQuota": g.num_devices}]}
        for g in cluster.groups
    ]
    return _object(
        "ClusterQueue",
        _QUEUE,
        {
            "namespaceSelector": {},
            "queueingStrategy": "BestEffortFIFO",
            "preemption": {"withinClusterQueue": "LowerPriority"},
            "resourceGroups": [{"coveredResources": [resource], "flavors": flavors}],
        },
    )


def _local_queue() -> dict[str, Any]:
    return _object("LocalQueue", _QUEUE, {"clusterQueue": _QUEUE}, namespace="default")


def _priority(one: Ranked) -> dict[str, Any]:
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta1",
        "kind": "WorkloadPriorityClass",
        "metadata": {"name": f"autoshard-{job_name(one.name)}"},
        "value": one.priority,
        "description": f"{one.name}: {one.footprint or 'waits'}",
    }


def _labels(ranked: Sequence[Ranked]) -> dict[str, Any]:
    """What each JobSet is given; those that wait are told so."""
    entries = {}
    for one in ranked:
        parts = () if one.footprint is None else one.footprint.parts
        entries[f"{job_name(one.name)}.yaml"] = yaml_text(
            {
                "labels": {
                    "kueue.x-k8s.io/queue-name": _QUEUE,
                    "kueue.x-k8s.io/priority-class": f"autoshard-{job_name(one.name)}",
                },
                "suspend": one.footprint is None,
                "workers": [
                    {"group": p.group, "parallelism": p.num_nodes, "devices_per_worker": p.devices_per_node}
                    for p in parts
                ],
            }
        )
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "autoshard-sizes"}, "data": entries}


def _object(kind: str, name: str, spec: dict[str, Any], namespace: str | None = None) -> dict[str, Any]:
    metadata = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
    return {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": kind, "metadata": metadata, "spec": spec}
