"""One step of training a model of the zoo as a pure function.

`build` gives the functions that a planner or a training loop wants: one makes the state from a seed, one advances it by
a batch, one evaluates it on a batch. All can be traced from shapes alone, so that a 175B model is described without
allocating it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from .loss_scaling import LossScale, LossScaling, all_finite, chosen, first_scale, next_scale
from .losses import cross_entropy as cross_entropy
from .objective import Batch, Metrics, Objective
from .optimizers import adamw as adamw
from .zoo import objective_of


@struct.dataclass
class TrainState:
    """Everything that a training step reads and writes.

    Attributes:
        step: int32 scalar, the number of steps taken.
        params: the model's parameters, nested dicts of arrays.
        opt_state: the optimizer's state for `params`.
        rng: scalar key of the model's random numbers; it never changes, each step folds in its own number.
        mutable: what the model itself changes as it runs, such as running averages; empty for most models.
        loss_scale: the scale of the loss, or None if it is not scaled.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    rng: jax.Array
    mutable: Any = struct.field(default_factory=dict)
    loss_scale: LossScale | None = None


class TrainFunctions(NamedTuple):
    """What `build` returns.

    Attributes:
        init: seed (int, or an int32 scalar under tracing) -> TrainState.
        step: (TrainState, Batch) -> (TrainState, Metrics). The metrics are float32 scalars; `loss` is the mean over
            the batch, in nats per token for language models.
        evaluate: (TrainState, Batch) -> Metrics of the model as it is used after training: without dropout, with
            running averages. Noise that belongs to the loss is the same at every call.
    """

    init: Callable[[Any], TrainState]
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    evaluate: Callable[[TrainState, Batch], Metrics]


EVALUATION_KEY = 2**32 - 1
"""Folded into a run's key for evaluations; no step has this number."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepOptions:
    """How a step computes gradients.

    Attributes:
        num_micro_batches: parts that the batch is run in, one after another, to need less memory; must divide the
            batch. Gradients and metrics are the means over the parts.
        loss_scaling: scale the loss and leave out steps with infinite gradients; None: neither.
    """

    num_micro_batches: int = 1
    loss_scaling: LossScaling | None = None


def build(config: Any, optimizer: optax.GradientTransformation, options: StepOptions = StepOptions()) -> TrainFunctions:
    """The functions that make and advance the training state of a model.

    Args:
        config: a configuration of any family in `zoo.py`.
        optimizer: an Optax transformation; its updates are added to the parameters.
        options: accumulation of gradients and scaling of the loss.

    Returns:
        (init, step, evaluate), all pure: `jax.eval_shape(init, 0)` and `jax.make_jaxpr(step)(state, batch)` allocate
        nothing.

    Raises:
        TypeError: no family has a configuration of that type.
    """
    return build_for(objective_of(config), optimizer, options)


def build_for(
    objective: Objective, optimizer: optax.GradientTransformation, options: StepOptions = StepOptions()
) -> TrainFunctions:
    """`build` for any objective, of a model of the zoo or another."""
    scaling = options.loss_scaling

    def init(seed: Any) -> TrainState:
        params_key, key = jax.random.split(jax.random.key(seed))
        params, mutable = objective.init(params_key)
        scale = None if scaling is None else first_scale(scaling)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), key, mutable, scale)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.rng, state.step) if objective.is_random else None
        scale = None if state.loss_scale is None else state.loss_scale.scale
        if options.num_micro_batches == 1:
            gradients, mutable, metrics = _gradients(objective, state.params, state.mutable, batch, key, scale)
        else:
            gradients, mutable, metrics = _accumulated(objective, state, batch, key, scale, options.num_micro_batches)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        if scaling is None:
            new = state.replace(step=state.step + 1, params=params, opt_state=opt_state, mutable=mutable)
            return new, metrics
        is_finite = all_finite(gradients)
        params, opt_state, mutable = chosen(
            is_finite, (params, opt_state, mutable), (state.params, state.opt_state, state.mutable)
        )
        new = TrainState(
            state.step + 1, params, opt_state, state.rng, mutable, next_scale(scaling, state.loss_scale, is_finite)
        )
        return new, metrics | {"loss_scale": scale, "is_finite": is_finite.astype(jnp.float32)}

    def evaluate(state: TrainState, batch: Batch) -> Metrics:
        if objective.evaluate is None:
            loss, (_, metrics) = objective.loss(state.params, state.mutable, batch, None)
        else:
            key = jax.random.fold_in(state.rng, EVALUATION_KEY)
            loss, metrics = objective.evaluate(state.params, state.mutable, batch, key)
        return {"loss": loss} | metrics

    return TrainFunctions(init, train_step, evaluate)


def _gradients(
    objective: Objective, params: Any, mutable: Any, batch: Batch, key: jax.Array | None, scale: jax.Array | None
) -> tuple[Any, Any, Metrics]:
    """Gradients by the parameters, the model's new mutable state, and the metrics."""

    def loss_of(params: Any) -> Any:
        loss, (new_mutable, metrics) = objective.loss(params, mutable, batch, key)
        return loss if scale is None else loss * scale, (new_mutable, {"loss": loss} | metrics)

    gradients, (mutable, metrics) = jax.grad(loss_of, has_aux=True)(params)
    if scale is not None:
        gradients = jax.tree.map(lambda gradient: gradient / scale.astype(gradient.dtype), gradients)
    return gradients, mutable, metrics


def _accumulated(
    objective: Objective, state: TrainState, batch: Batch, key: jax.Array | None, scale: jax.Array | None, count: int
) -> tuple[Any, Any, Metrics]:
    """`_gradients` in `count` parts, one after another."""

    def run(params: Any, mutable: Any, part: Batch, number: jax.Array) -> tuple[Any, Any, Metrics]:
        part_key = None if key is None else jax.random.fold_in(key, number)
        return _gradients(objective, params, mutable, part, part_key, scale)

    def body(carry: tuple[Any, Any, Metrics], inputs: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        sums, mutable = carry
        part, number = inputs
        gradients, mutable, metrics = run(state.params, mutable, part, number)
        return (jax.tree.map(jnp.add, sums, (gradients, metrics)), mutable), None

    parts = jax.tree.map(lambda leaf: _parts(leaf, count), dict(batch))
    first = jax.tree.map(lambda leaf: leaf[0], parts)
    shapes, _, metric_shapes = jax.eval_shape(run, state.params, state.mutable, first, jnp.int32(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), (shapes, metric_shapes))
    (sums, mutable), _ = jax.lax.scan(body, (zeros, state.mutable), (parts, jnp.arange(count)))
    gradients, metrics = jax.tree.map(lambda leaf: leaf / count, sums)
    return gradients, mutable, metrics


def _parts(leaf: jax.Array, count: int) -> jax.Array:
    """(batch, ...) as (count, batch / count, ...).

    Part n has rows n, n + count, n + 2 * count and so on, so that every device of those that the batch is split over
    has its share of each part, and nothing moves.
    """
    if leaf.shape[0] % count:
        raise ValueError(
            f"`num_micro_batches` must divide the batch; received num_micro_batches={count}, batch={leaf.shape[0]}."
        )
    return jnp.swapaxes(leaf.reshape(leaf.shape[0] // count, count, *leaf.shape[1:]), 0, 1)


def batch_shapes(batch_size: int, sequence_length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of `batch_size` sequences of `sequence_length` tokens."""
    tokens = jax.ShapeDtypeStruct((batch_size, sequence_length), jnp.int32)
    return {"inputs": tokens, "targets": tokens}
