"""Stages that annotations ask for, as the search sees them: which layers each may hold, and on which slices."""

import dataclasses

import numpy as np

from autoshard.annotations.block import Block
from autoshard.cluster import Cluster
from autoshard.errors import AnnotationError
from autoshard.pipelines.split.annotated_stages import AskedPipeline
from autoshard.pipelines.split.layer_boundaries import LayerBoundaries
from autoshard.suggestions import suggestion


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AskedStages:
    """What the stages of every pipeline must be.

    Attributes:
      runs: For each stage, [layers + 1, layers + 1]: whether it may hold the layers i <= l < j.
      slices: For each stage, the slices of the cluster that it may run on.
    """

    runs: tuple[np.ndarray, ...]
    slices: tuple[frozenset[int], ...]


def asked_stages(asked: AskedPipeline | None, cuts: LayerBoundaries, cluster: Cluster) -> AskedStages | None:
    """The stages of a pipeline that annotations ask for; None where the planner cuts.

    Args:
      asked: What is asked for. cuts: The layers; one begins between any two stages. cluster: The devices.

    Raises:
      AnnotationError: The cluster has no devices of a kind that a stage is for.
    """
    if asked is None or not asked.stages:
        return None
    edges = np.array([*cuts.starts, cuts.stop])
    before = [-1, *(last for _, last in asked.spans[:-1])]
    after = [*(first for first, _ in asked.spans[1:]), cuts.stop]
    runs = []
    for (first, last), earlier, later in zip(asked.spans, before, after, strict=True):
        begins = (earlier < edges) & (edges <= first)
        ends = (last < edges) & (edges <= later)
        runs.append(begins[:, None] & ends[None, :])
    return AskedStages(tuple(runs), tuple(_slices(block, cluster) for block in asked.stages))


def _slices(block: Block, cluster: Cluster) -> frozenset[int]:
    """The slices whose devices or name a stage asks for."""
    slices, wanted = cluster.slices(), block.devices
    if wanted is None:
        return frozenset(range(len(slices)))
    names = [(part.device_type.name.lower(), part.name.lower()) for part in slices]
    exact = frozenset(n for n, own in enumerate(names) if wanted.lower() in own)
    found = exact or frozenset(n for n, own in enumerate(names) if any(wanted.lower() in name for name in own))
    if not found:
        there = [part.device_type.name for part in slices]
        raise AnnotationError(
            f"A stage runs on a kind of devices that the cluster has, but {block.at_line} asks for {wanted!r}, and "
            f"cluster `{cluster.name}` has {', '.join(there)}.{suggestion(wanted, there, quote='`')}"
        )
    return found
