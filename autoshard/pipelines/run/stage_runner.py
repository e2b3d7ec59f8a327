"""One stage on its devices: its compiled phases, and where its arguments and results are."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.execution.placement import partition_spec
from autoshard.pipelines.cost.stage import TracedStage
from autoshard.pipelines.run.phase_functions import PhaseFunction, PhaseFunctions, PhaseResult, phase_functions
from autoshard.pipelines.schedule.tasks import Phase
from autoshard.plans.program_plan import PlannedTensor, ProgramPlan


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """An argument or a result of a stage: its position among them, its type as the plan writes it, and its layout."""

    position: int
    shape: tuple[int, ...]
    dtype: str
    sharding: NamedSharding

    def or_shape(self, array: jax.Array | None) -> jax.Array | jax.ShapeDtypeStruct:
        """An array of this leaf, or what stands for it in a process that does not have it."""
        if array is not None:
            return array
        dtype = jax.random.key(0).dtype if self.dtype.startswith("key<") else jnp.dtype(self.dtype)
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=self.sharding)


Leaves = dict[str, Leaf]
"""By the name of each leaf, without that of the argument or result that it belongs to."""


class StageRunner:
    """Runs the phases of one stage.

    Args:
      stage: The traced stage. plan: How it is sharded. mesh: Its devices. splits_backward: Whether the gradients of
        weights are a phase of their own.

    Attributes:
      params, sums, mutable, batch, inputs, gradients: The leaves of each argument; key and factor have no names.
      new_sums, outputs, input_gradients, new_mutable, metrics: Likewise of each result.
      whole: The layout of what lies whole on each of its devices.
      last_phase: The phase after which nothing is held of a micro-batch.
    """

    def __init__(self, stage: TracedStage, plan: ProgramPlan, mesh: Mesh, splits_backward: bool):
        self.mesh, self._slots = mesh, stage.slots
        slots = stage.slots
        parts = stage.split_backward if splits_backward else stage.fused_backward
        name = stage.function.__name__
        self._parts: PhaseFunctions = phase_functions(stage.trace, plan.interface, mesh, parts, list(slots.sums), name)
        arguments = lambda positions: self._leaves(plan.arguments, positions)
        results = lambda positions: self._leaves(plan.outputs, positions)
        self.sums, self.params = arguments(slots.sums), arguments(slots.params)
        self.mutable, self.batch = arguments(slots.mutable), arguments(slots.batch)
        self.inputs, self.gradients = arguments(slots.inputs), arguments(slots.gradients)
        self.new_sums, self.outputs = results(slots.new_sums), results(slots.outputs)
        self.input_gradients = results(slots.input_gradients)
        self.new_mutable, self.metrics = results(slots.new_mutable), results(slots.metrics)
        self.whole = NamedSharding(mesh, PartitionSpec())
        self.last_phase = Phase.WEIGHT if splits_backward else Phase.BACKWARD
        self._zeros = jax.jit(
            lambda: [jnp.zeros(l.shape, l.dtype) for l in self.sums.values()],
            out_shardings=[l.sharding for l in self.sums.values()],
        )
        self._add = jax.jit(lambda xs: sum(xs[1:], xs[0]))

    def _leaves(self, tensors: Sequence[PlannedTensor], positions: Sequence[int]) -> Leaves:
        found = {}
        for n in positions:
            tensor = tensors[n]
            sharding = NamedSharding(self.mesh, partition_spec(tensor.entries))
            found[tensor.name.partition(".")[2]] = Leaf(n, tensor.shape, tensor.dtype, sharding)
        return found

    @property
    def is_local(self) -> bool:
        """Whether this process has any of its devices."""
        return any(d.process_index == jax.process_index() for d in self.mesh.devices.flat)

    @property
    def reads_key(self) -> bool:
        """Whether it draws random numbers."""
        return bool(self._slots.key)

    @property
    def key_position(self) -> int:
        """Position of the random key among the arguments."""
        return self._slots.key.start

    @property
    def factor_position(self) -> int:
        """Position of a micro-batch's weight in the loss among the arguments."""
        return self._slots.factor

    def zeros(self) -> dict[str, jax.Array]:
        """Sums of gradients before the first micro-batch."""
        return dict(zip(self.sums, self._zeros(), strict=True))

    def add(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """The sum of arrays of one layout."""
        return arrays[0] if len(arrays) == 1 else self._add(list(arrays))

    def run(self, phase: Phase, arguments: Mapping[int, Any], residuals: Sequence[Any]) -> PhaseResult | None:
        """Runs a phase; None if it has nothing to do of its own.

        Args:
          arguments: By position among the stage's flat arguments; more than the phase reads may be there.
          residuals: What earlier phases of the micro-batch hold for it.
        """
        part = self._part(phase)
        return None if part is None else part(arguments, residuals)

    def residuals_after(self, phase: Phase, residuals: Sequence[Any], made: Sequence[Any]) -> list[Any]:
        """What is held of a micro-batch after a phase.

        Args:
          residuals: Before the phase. made: By it.
        """
        if phase is not Phase.BACKWARD:
            return list(made)
        parts = self._parts.parts
        return [*(dict(zip(parts.residuals, residuals, strict=True))[v] for v in parts.kept_residuals), *made]

    def reads(self, phase: Phase) -> frozenset[int]:
        """Positions of the arguments that a phase reads."""
        part = self._part(phase)
        return frozenset() if part is None else frozenset(part.part.given)

    def _part(self, phase: Phase) -> PhaseFunction | None:
        match phase:
            case Phase.FORWARD:
                return self._parts.forward
            case Phase.BACKWARD:
                return self._parts.backward
            case Phase.WEIGHT:
                return self._parts.weight
