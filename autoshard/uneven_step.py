"""A training step whose replicas share a batch out unequally, anew in every step, without compiling.

    step = autoshard.UnevenStep(autoshard.TrainStep(loss_fn, optax.adamw(3e-4)), replicas=8, num_parts=64)
    plan = autoshard.plan(step, state, batch, step.even, options=autoshard.PlanOptions(while_trips=step.mean_parts))
    run = plan.jit(step)
    state, metrics = run(state, batch, step.even)             # eight parts on each replica
    state, metrics = run(state, batch, step.shares(slowness))  # fewer on one that is slow

The batch is run in parts of equal size, the micro-batches; which replica runs how many is data. A replica adds up the
gradients of its parts in a loop with no collective in it, so that each may take as long as it likes; the sums over
replicas come behind, as in any data parallelism, and are planned like everything else.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from autoshard.balance.batch_shares import batch_shares
from autoshard.errors import StageError
from autoshard.train_step import Metrics, TrainStep, batch_size


@dataclasses.dataclass(frozen=True)
class UnevenStep:
    """A training step: `(state, batch, counts) -> (state, metrics)`, for a plan with one mesh axis of replicas.

    Each replica has the parameters as a whole while it runs its parts, and the batch; between steps, the state is laid
    out as the plan has it, so also in pieces (ZeRO). Results are those of `step.in_parts` with equal parts, up to the
    order of sums, whatever the counts.

    Attributes:
      step: The step that a single device would take, without parts of its own. The state may have nothing mutable,
        which would pass from part to part.
      replicas: Devices of the mesh axis.
      num_parts: Micro-batches of a batch, of equal size: the grain of sharing out. Part m draws its random numbers from
        the step's key folded with m, whichever replica runs it.
      axis: The name of the mesh axis.
      can_be_slowed: Whether calls take a last argument, int32 [replicas]: how often each replica runs each of its
        parts, all but the first time for nothing. For tests and demonstrations.
    """

    step: TrainStep
    replicas: int
    num_parts: int
    axis: str = "data"
    can_be_slowed: bool = False

    def __post_init__(self) -> None:
        if self.step.parts is not None:
            raise StageError(
                "The parts of an UnevenStep are its own, so that its TrainStep has none; received parts="
                f"{self.step.parts}. Say num_parts= instead."
            )
        if not 1 <= self.replicas <= self.num_parts:
            raise StageError(
                f"Each of {self.replicas} replicas must have a part when shares are even; received num_parts="
                f"{self.num_parts}. Take several parts for each replica."
            )

    @property
    def __name__(self) -> str:
        return f"uneven_{self.step.__name__}"

    @property
    def even(self) -> np.ndarray:
        """int32 [replicas]: equal numbers of parts, as far as that is possible."""
        return self.shares((1.0,) * self.replicas)

    @property
    def mean_parts(self) -> float:
        """Parts of a replica on average: how often its loop runs, for `PlanOptions.while_trips`."""
        return self.num_parts / self.replicas

    def shares(self, slowness: Sequence[float]) -> np.ndarray:
        """int32 [replicas]: the numbers of parts with which replicas that are so many times slower end soonest."""
        if len(slowness) != self.replicas:
            raise StageError(f"There are {self.replicas} replicas; received the slowness of {len(slowness)}.")
        return np.asarray(batch_shares(self.num_parts, slowness), np.int32)

    def alone(self, num_examples: int) -> TrainStep:
        """The same step for one device and a batch of so many examples."""
        return self.step.in_parts((num_examples // self.num_parts,) * self.num_parts)

    def __call__(
        self, state: Any, batch: Any, counts: jax.Array, slowed: jax.Array | None = None
    ) -> tuple[Any, Metrics]:
        """Takes one step.

        Args:
          state, batch: As of the `TrainStep`.
          counts: int32 [replicas]: how many parts each replica runs. If they are not `num_parts` together, the parts
            that are left over count for nothing, or those that are too many are not run: the step is that of a smaller
            batch.
          slowed: See `can_be_slowed`.

        Raises:
          StageError: The parts do not divide the batch, or the model has mutable state.
        """
        if mutable := jax.tree_util.tree_leaves_with_path(state.mutable):
            raise StageError(
                "Replicas of an UnevenStep run their parts side by side, so that a model's mutable state cannot pass "
                "from part to part; received one whose state has "
                f"mutable{jax.tree_util.keystr(mutable[0][0])}. Use layers without running averages, and draw random "
                "numbers, such as those of dropout, from the key that the loss is given (`rngs=` where the layer is "
                "called)."
            )
        if (slowed is not None) != self.can_be_slowed:
            raise StageError(
                "An UnevenStep takes the argument `slowed` if it was made with can_be_slowed=True, and not otherwise; "
                f"received can_be_slowed={self.can_be_slowed}."
            )
        num_examples = batch_size(batch)
        if num_examples % self.num_parts:
            raise StageError(
                f"The parts of an UnevenStep have equal size; received num_parts={self.num_parts} for a batch of "
                f"{num_examples}. Take a number that divides it."
            )
        size, key, scale = num_examples // self.num_parts, self.step.key(state), self.step.scale(state)
        stops = jnp.minimum(jnp.cumsum(counts), self.num_parts)
        starts = jnp.concatenate([jnp.zeros(1, stops.dtype), stops[:-1]])

        def run(number: Any, weight: Any, params: Any, batch: Any, key: Any) -> tuple[Any, Metrics]:
            part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, number * size, size), batch)
            part_key = self.step.part_key(key, number, self.num_parts)
            factor = weight if scale is None else weight * scale
            gradients, _, metrics = self.step.gradients(params, state.mutable, part, part_key, factor)
            return gradients, jax.tree.map(lambda m: m * weight, metrics)

        def replica(params: Any, batch: Any, key: Any, weight: Any, start: Any, stop: Any, times: Any) -> Any:
            """The sums over the parts of one replica: its gradients and metrics, [1, ...]."""
            first, count = start[0], stop[0] - start[0]
            shapes = jax.eval_shape(run, 0, weight, params, batch, key)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

            def add(turn: Any, sums: Any) -> Any:
                if times is None:
                    return jax.tree.map(jnp.add, sums, run(first + turn, weight, params, batch, key))
                own = jnp.where(turn < count, weight, 0.0)
                return jax.tree.map(jnp.add, sums, run(first + turn % count, own, params, batch, key))

            turns = count if times is None else count * times[0]
            return jax.tree.map(lambda x: x[None], jax.lax.fori_loop(0, turns, add, zeros))

        whole, own = PartitionSpec(), PartitionSpec(self.axis)
        side_by_side = jax.shard_map(
            replica,
            mesh=AbstractMesh((self.replicas,), (self.axis,), (AxisType.Auto,)),
            in_specs=(whole, whole, whole, whole, own, own, None if slowed is None else own),
            out_specs=own,
            check_vma=False,  # what differs between replicas is summed behind; losses need not know of the axis
        )
        weight = 1 / stops[-1].astype(jnp.float32)
        sums = side_by_side(state.params, batch, key, weight, starts, stops, slowed)
        gradients, metrics = jax.tree.map(lambda x: x.sum(0), sums)
        return self.step.finish(state, gradients, state.mutable, metrics)
