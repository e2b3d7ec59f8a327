"""Facts of a plan in stages: equal pipelines, bytes between stages, weights on submeshes."""

import collections
import dataclasses
import math

import jax.numpy as jnp

from autoshard.pipelines.cost.layers import Layers
from autoshard.pipelines.plan.parameter_owners import StageId
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.pipelines.search.arrangement import Pipeline


@dataclasses.dataclass(frozen=True, slots=True)
class EqualPipelines:
    """Pipelines that are alike but for the devices they run on, by their numbers."""

    numbers: tuple[int, ...]

    @property
    def first(self) -> int:
        """The number that stands for all."""
        return self.numbers[0]

    @property
    def short_name(self) -> str:
        """`2`, or `2, 5-7`."""
        runs: list[list[int]] = []
        for n in self.numbers:
            if runs and runs[-1][-1] == n - 1:
                runs[-1].append(n)
            else:
                runs.append([n])
        return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)

    @property
    def name(self) -> str:
        """`Pipeline 2`, or `Pipelines 2, 5-7`."""
        return f"Pipeline{'s' if len(self.numbers) > 1 else ''} {self.short_name}"


def equal_pipelines(plan: PipelinePlan) -> tuple[EqualPipelines, ...]:
    """All pipelines of a plan, those that are alike together."""
    groups: dict[object, list[int]] = {}
    for n, pipeline in enumerate(plan.arrangement.pipelines):
        submeshes = tuple(
            (submesh.slice, mesh.axes) for submesh, mesh in zip(pipeline.submeshes, plan.meshes[n], strict=True)
        )
        key = (dataclasses.replace(pipeline, submeshes=()), submeshes, plan.program_of[n])
        groups.setdefault(key, []).append(n)
    return tuple(EqualPipelines(tuple(numbers)) for numbers in groups.values())


@dataclasses.dataclass(frozen=True, slots=True)
class StageTraffic:
    """What one stage sends a later one for each micro-batch, and gets back; `makers`: the layers that make it."""

    forward_bytes: float
    backward_bytes: float
    makers: tuple[int, ...]


def crossing(layers: Layers, pipeline: Pipeline, source: int, target: int) -> StageTraffic:
    """What stage `source` of a pipeline sends to stage `target`."""
    here, there = pipeline.stages[source], pipeline.stages[target]
    found = [
        c
        for c in layers.activations
        if here.start <= c.source < here.stop and any(there.start <= r < there.stop for r in c.readers)
    ]
    sizes = [c.example_bytes * (1 if c.is_shared else pipeline.micro_batch_size) for c in found]
    backward = sum(size for c, size in zip(found, sizes, strict=True) if c.has_gradient)
    return StageTraffic(sum(sizes), backward, tuple(sorted({c.source for c in found})))


@dataclasses.dataclass(frozen=True, slots=True)
class SubmeshWeights:
    """Bytes of the weights that live on a submesh, and of the copies that it reads besides; replicas not counted."""

    owned_bytes: float
    copied_bytes: float


def weights_of(plan: PipelinePlan) -> dict[tuple[int, int], SubmeshWeights]:
    """The weights of every submesh, by pipeline and submesh."""
    owner = {name: _submesh(plan, one) for name, one in zip(plan.parameters, plan.owners, strict=True)}
    sizes: dict[str, float] = {}
    read: collections.defaultdict[tuple[int, int], set[str]] = collections.defaultdict(set)
    for one in plan.stage_ids:
        for argument in plan.plan_of(one).arguments:
            head, _, name = argument.name.partition(".")
            if head == "params" and name in owner:
                sizes[name] = math.prod(argument.shape) * jnp.dtype(argument.dtype).itemsize
                read[_submesh(plan, one)].add(name)
    submeshes = [(p, k) for p, meshes in enumerate(plan.meshes) for k in range(len(meshes))]
    return {
        submesh: SubmeshWeights(
            float(sum(sizes.get(name, 0) for name, where in owner.items() if where == submesh)),
            float(sum(sizes[name] for name in read[submesh] if owner[name] != submesh)),
        )
        for submesh in submeshes
    }


def _submesh(plan: PipelinePlan, one: StageId) -> tuple[int, int]:
    return one.pipeline, one.stage % len(plan.meshes[one.pipeline])
