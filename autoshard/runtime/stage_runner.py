"""One stage on its devices: its compiled phases, and where its arguments and results are."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.execution.apply import partition_spec
from autoshard.execution.parts import PlannedParts, Ran, planned_parts
from autoshard.plans.plan import Plan, PlannedTensor
from autoshard.schedule.tasks import Phase
from autoshard.stages.stage_plan import TracedStage

_Layouts = dict[str, NamedSharding]


class StageRunner:
    """Runs the phases of one stage.

    Args:
      stage: The traced stage. plan: How it is sharded. mesh: Its devices. splits_backward: Whether the gradients of
        weights are a phase of their own.

    Attributes:
      params, sums, mutable, batch, inputs, gradients: The layout of each argument, by the name of its leaf.
      new_sums, outputs, input_gradients, new_mutable, metrics: Likewise of each result.
    """

    def __init__(self, stage: TracedStage, plan: Plan, mesh: Mesh, splits_backward: bool):
        self.stage, self.plan, self.mesh = stage, plan, mesh
        slots = stage.slots
        parts = stage.split if splits_backward else stage.whole
        name = stage.function.__name__
        self._parts: PlannedParts = planned_parts(stage.trace, plan.interface, mesh, parts, list(slots.sums), name)
        arguments = lambda positions: self._layouts(plan.arguments, positions)
        results = lambda positions: self._layouts(plan.outputs, positions)
        self.sums, self.params = arguments(slots.sums), arguments(slots.params)
        self.mutable, self.batch = arguments(slots.mutable), arguments(slots.batch)
        self.inputs, self.gradients = arguments(slots.inputs), arguments(slots.gradients)
        self.new_sums, self.outputs = results(slots.new_sums), results(slots.outputs)
        self.input_gradients = results(slots.input_gradients)
        self.new_mutable, self.metrics = results(slots.new_mutable), results(slots.metrics)
        self.reads_key = bool(slots.key)
        self.whole = NamedSharding(mesh, PartitionSpec())
        self._zeros = jax.jit(
            lambda: [jax.numpy.zeros(t.shape, t.dtype) for t in (plan.arguments[n] for n in slots.sums)],
            out_shardings=list(self.sums.values()),
        )
        self._add = jax.jit(lambda xs: sum(xs[1:], xs[0]))

    def _layouts(self, tensors: Sequence[PlannedTensor], positions: Sequence[int]) -> _Layouts:
        """By the name of each leaf, without that of the argument that it belongs to."""
        named = [tensors[n] for n in positions]
        return {t.name.partition(".")[2]: NamedSharding(self.mesh, partition_spec(t.entries)) for t in named}

    @property
    def is_local(self) -> bool:
        """Whether this process has any of its devices."""
        return any(d.process_index == jax.process_index() for d in self.mesh.devices.flat)

    def zeros(self) -> dict[str, jax.Array]:
        """Sums of gradients before the first micro-batch."""
        return dict(zip(self.sums, self._zeros(), strict=True))

    def add(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """The sum of arrays of one layout."""
        return arrays[0] if len(arrays) == 1 else self._add(list(arrays))

    def run(self, phase: Phase, arguments: Mapping[int, Any], held: Sequence[Any]) -> Ran | None:
        """Runs a phase; None if it has nothing to do of its own.

        Args:
          arguments: By position among the joint function's flat arguments; see `TracedStage.slots`.
          held: What earlier phases of the micro-batch hold for it.
        """
        match phase:
            case Phase.FORWARD:
                part = self._parts.forward
            case Phase.BACKWARD:
                part = self._parts.backward
            case Phase.WEIGHT:
                part = self._parts.weight
        return None if part is None else part(arguments, held)

    def held_after(self, phase: Phase, held: Sequence[Any], made: Sequence[Any]) -> list[Any]:
        """What is held of a micro-batch after a phase.

        Args:
          held: Before the phase. made: By it.
        """
        if phase is not Phase.BACKWARD:
            return list(made)
        parts = self._parts.parts
        return [*(dict(zip(parts.held, held, strict=True))[v] for v in parts.kept), *made]

    def given(self, phase: Phase) -> tuple[int, ...]:
        """Positions of the arguments that a phase reads."""
        parts = self._parts.parts
        part = {Phase.FORWARD: parts.forward, Phase.BACKWARD: parts.backward, Phase.WEIGHT: parts.weight}[phase]
        return () if part is None else part.given

    def lower(self, phase: Phase, arguments: Mapping[int, Any], held: Sequence[Any]) -> Any:
        """Lowers a phase for arrays or shapes, as `jax.jit(f).lower`."""
        match phase:
            case Phase.FORWARD:
                return self._parts.forward.lower(arguments, held)
            case Phase.BACKWARD:
                return self._parts.backward.lower(arguments, held)
            case Phase.WEIGHT:
                return self._parts.weight.lower(arguments, held)
