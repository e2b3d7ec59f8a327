"""Prices the layers of a model on every mesh that a stage could have: the table that the stage search reads.

Layers that are equal programs are one kind, and are planned once a mesh and micro-batch size. So 96 equal blocks cost
as much as one.
"""

import dataclasses
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from autoshard.cluster import Cluster, DeviceType, LogicalMesh, MeshAxis
from autoshard.errors import AnnotationError, AutoshardError, StageError
from autoshard.pipelines.cost.layers import Activation, Layers, SharedWeight
from autoshard.pipelines.cost.stage import StageCost, TracedStage, plan_stage, stage_cost, trace_stage
from autoshard.pipelines.cost.stage_meshes import stage_meshes, usual_devices
from autoshard.pipelines.cost.table import CostKey, CostTable, LayerCost, MeshOption
from autoshard.pipelines.cost.traced_model import TracedModel, trace_model
from autoshard.pipelines.split.layer_boundaries import LayerBoundaries
from autoshard.planner.asked import check_binding
from autoshard.plans.annotated import stacks
from autoshard.plans.options import PlanOptions
from autoshard.plans.question import report
from autoshard.trace.blocks import program_blocks
from autoshard.trace.walk import size_bytes
from autoshard.train_step import TrainStep

_LITERAL = re.compile(r"\b-?\d+:[iu]\d+\[\]")
_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclasses.dataclass(frozen=True, slots=True)
class PricedLayers:
    """The layers of a model, and what they cost.

    Attributes:
      models: The model by micro-batch size.
      layers: Its layers. table: Their costs.
      warnings: What the user should know, such as a model without layers.
    """

    models: dict[int, TracedModel] = dataclasses.field(repr=False)
    layers: Layers
    table: CostTable
    warnings: tuple[str, ...]


def price_layers(
    step: TrainStep,
    state: Any,
    batch: Any,
    cluster: Cluster,
    micro_batch_sizes: Sequence[int],
    options: PlanOptions,
    max_devices_per_stage: int | None = None,
) -> PricedLayers:
    """Prices all kinds of layers on all mesh options, for all micro-batch sizes.

    Args:
      step, state, batch: As for `autoshard.plan`; of the batch only the shapes behind the first dimension count.
      cluster: The devices. micro_batch_sizes: Examples of a micro-batch, each size that is to be tried.
      options: Of each solve. max_devices_per_stage: Larger meshes are not tried; None: than `usual_devices`.

    Raises:
      StageError: No layer can be planned with any of the micro-batch sizes.
      AnnotationError: What annotations ask for cannot be had with any of them.
    """
    started = time.perf_counter()
    fast: list[MeshOption] = []
    lean: list[MeshOption] = []
    models: dict[int, TracedModel] = {}
    costs: dict[CostKey, LayerCost] = {}
    ratio = optimizer_ratio(state)
    cuts: LayerBoundaries | None = None
    kinds: tuple[int, ...] = ()
    failures: list[str] = []
    unbound: AnnotationError | None = None
    for size in micro_batch_sizes:
        report(options, started, "layers", f"micro-batches of {size}")
        model = trace_model(step, state, batch, size, cuts)
        if cuts is not None and model.stages.cuts.starts != cuts.starts:
            failures.append(f"micro-batches of {size} are traced to another program")
            continue
        traced, kinds_here = _kinds(model)
        try:
            check_binding([stage.asked for stage in traced if stage.asked is not None])
        except AnnotationError as error:  # one example is no dimension, and larger micro-batches may have it
            failures.append(f"in micro-batches of {size}: {error}")
            unbound = error
            continue
        cuts = model.stages.cuts
        if not fast:
            fast = _mesh_options(cluster, max_devices_per_stage, traced)
            lean = [dataclasses.replace(o, shards_weights=True) for o in fast if o.num_devices > 1]
        kinds = kinds or kinds_here
        if kinds_here != kinds:
            failures.append(f"micro-batches of {size} make other kinds of layers")
            continue
        models[size] = model
        for kind, stage in enumerate(traced):
            pricer = _Pricer(stage, cluster.name, options, ratio, failures)
            known: dict[tuple[DeviceType, tuple[MeshAxis, ...], bool], LayerCost | None] = {}
            for n, option in enumerate([*fast, *lean]):
                key = option.mesh.device_type, option.mesh.axes, option.shards_weights
                if key not in known:
                    report(options, started, "price", f"kind {kind + 1} of {len(traced)} on {option}, {size} examples")
                    before = known.get((*key[:2], False))
                    known[key] = pricer.lean(option.mesh, before) if option.shards_weights else pricer.fast(option.mesh)
                if (cost := known[key]) is not None:
                    costs[CostKey(kind, n, size)] = cost
    if unbound is not None and not models:
        tried = ", ".join(map(str, micro_batch_sizes))
        alone = (
            " An example alone cannot be split: ask for larger micro-batches." if max(micro_batch_sizes) == 1 else ""
        )
        raise AnnotationError(f"{unbound} Micro-batches of {tried} were tried.{alone}") from unbound
    if models:
        _check_asked(next(iter(models.values())), kinds, costs, failures)
    if not costs:
        raise StageError(
            f"No layer of the model can be planned for micro-batches of {list(micro_batch_sizes)}: "
            f"{'; '.join(dict.fromkeys(failures))}."
        )
    model = next(iter(models.values()))
    warnings = (model.stages.cuts.warning,) if model.stages.cuts.warning else ()
    return PricedLayers(models, _layers(model, kinds), CostTable((*fast, *lean), costs), warnings)


def _mesh_options(cluster: Cluster, most: int | None, traced: Sequence[TracedStage]) -> list[MeshOption]:
    """The meshes of stages; where annotations ask for degrees inside a stage, also those that have axes for them."""
    nested = [blocks for stage in traced if stage.asked is not None for blocks in stacks(stage.trace.graph)]
    return [
        MeshOption(k, mesh)
        for k, part in enumerate(cluster.slices())
        for mesh in stage_meshes(part, most or usual_devices(part), nested)
    ]


def _check_asked(
    model: TracedModel, kinds: Sequence[int], costs: Mapping[CostKey, LayerCost], failures: Sequence[str]
) -> None:
    """Refuses annotations that no mesh of a stage can obey."""
    priced = {key.kind for key in costs}
    unpriced = next((layer for layer, kind in enumerate(kinds) if kind not in priced), None)
    asking = [text for text in dict.fromkeys(failures) if "annotation" in text]
    if unpriced is not None and asking:
        raise AnnotationError(
            f"The layer `{model.stages.cuts.names[unpriced]}` cannot do what annotations ask of it on any mesh that a "
            f"stage may have: {asking[0]} Choose degrees that divide the micro-batch and its dimensions, and whose "
            "product is the devices of a stage."
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Pricer:
    """Prices one kind of layer; what goes wrong is added to `failures`."""

    stage: TracedStage
    cluster_name: str
    options: PlanOptions
    ratio: float
    failures: list[str]

    def fast(self, mesh: LogicalMesh) -> LayerCost | None:
        """The fastest plan, whatever memory it takes; None if there is none."""
        return self._price(mesh, shards_weights=False)

    def lean(self, mesh: LogicalMesh, fast: LayerCost | None) -> LayerCost | None:
        """The fastest plan that holds no weight twice if it can be split; `fast` where that does not either."""
        if fast is None:
            return None
        copies_bytes = fast.weight_bytes - fast.weight_total_bytes / mesh.num_devices
        if copies_bytes < SMALL_SHARE * fast.weight_bytes:
            return fast
        return self._price(mesh, shards_weights=True) or fast

    def _price(self, mesh: LogicalMesh, shards_weights: bool) -> LayerCost | None:
        try:
            plan = plan_stage(
                self.stage, mesh, self.cluster_name, math.inf, self.options, shards_weights, branches=False
            )
        except AutoshardError as error:
            self.failures.append(str(error).partition("\n")[0])
            return None
        return layer_cost(stage_cost(self.stage, plan), mesh, self.ratio, weight_total_bytes(self.stage))


SMALL_SHARE = 0.1
"""Copies of weights below this share of them are not worth another plan."""


def _kinds(model: TracedModel) -> tuple[list[TracedStage], tuple[int, ...]]:
    """One traced layer of each kind, and the kind of each layer."""
    numbers: dict[str, int] = {}
    traced, kinds = [], []
    for layer in range(model.stages.cuts.num_layers):
        program = model.stages.program(layer, layer + 1)
        shapes = [(s.shape, s.dtype) for s in (*program.interface.inputs, *program.interface.outputs)]
        own = program.interface
        counts = len(own.params), len(own.mutable_in), len(own.batch), len(own.inputs), len(own.mutable_out)
        asked = [[f"{b} {b.line}" for b in blocks] for blocks in program_blocks(program.forward)]
        text = _LITERAL.sub("#", _ADDRESS.sub("", f"{program.forward}{shapes}{counts}{asked}"))
        if text not in numbers:
            numbers[text] = len(traced)
            traced.append(trace_stage(model.forward, program))
        kinds.append(numbers[text])
    return traced, tuple(kinds)


def _layers(model: TracedModel, kinds: tuple[int, ...]) -> Layers:
    size = model.forward.micro_batch_size
    activations = []
    for v, readers in model.stages.readers().values():
        scales = bool(v.aval.shape) and v.aval.shape[0] % size == 0
        is_float = jax.numpy.issubdtype(v.aval.dtype, jax.numpy.inexact)
        each = size_bytes(v) / size if scales else size_bytes(v)
        activations.append(Activation(model.stages.layer_of(v), readers, each, not scales, is_float))
    reading: dict[int, list[int]] = {}
    for layer in range(len(kinds)):
        for n in model.stages.program(layer, layer + 1).interface.params:
            reading.setdefault(n, []).append(layer)
    shared = tuple(
        SharedWeight(tuple(layers), float(size_bytes(model.forward.param_vars[n])))
        for n, layers in sorted(reading.items())
        if len(layers) > 1
    )
    return Layers(kinds, model.stages.cuts.names, tuple(activations), shared)


def optimizer_ratio(state: Any) -> float:
    """Bytes of the optimizer's state for each byte of parameters."""
    total = lambda tree: sum(math.prod(x.shape) * getattr(x.dtype, "itemsize", 4) for x in jax.tree.leaves(tree))
    return total(state.opt_state) / max(1, total(state.params))


def weight_total_bytes(stage: TracedStage) -> float:
    """Bytes of all weights that a stage reads, copies not counted."""
    return float(sum(size_bytes(stage.trace.jaxpr.jaxpr.invars[n]) for n in stage.slots.params))


def layer_cost(cost: StageCost, mesh: LogicalMesh, ratio: float, total_bytes: float) -> LayerCost:
    """A planned stage as the search sees it.

    The optimizer's state lies like the sums of gradients. Its update reads sums, state and weights and writes state and
    weights, at the memory's bandwidth, and gathers the weights where they lie on more devices than the sums do.

    Args:
      ratio: Bytes of the optimizer's state for each byte of weights.
    """
    device = mesh.device_type
    optimizer_bytes = ratio * cost.gradient_bytes
    moved_bytes = 3 * cost.gradient_bytes + 2 * optimizer_bytes
    all_gather_bytes = max(0.0, cost.weight_bytes - cost.gradient_bytes)
    link = next((level.link for axis in reversed(mesh.axes) for level in axis.levels), None)
    gather_s = all_gather_bytes / link.bandwidth_bytes_per_s + link.latency_s if all_gather_bytes and link else 0.0
    update_s = moved_bytes / device.memory_bytes_per_s + device.launch_overhead_s + gather_s
    return LayerCost(
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        weight_s=cost.weight_s,
        update_s=update_s if total_bytes else 0.0,
        weight_bytes=cost.weight_bytes,
        gradient_bytes=cost.gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        weight_total_bytes=total_bytes,
        residual_bytes=cost.residual_bytes,
        weight_residual_bytes=cost.weight_residual_bytes,
        input_bytes=cost.input_bytes,
        working_bytes=cost.working_bytes,
    )
