"""One step of training as a loss and an optimizer: what three lines of user code turn into a step for any cluster.

    step = autoshard.TrainStep(loss_fn, optax.adamw(3e-4))
    state = step.init(params, jax.random.key(0))
    plan = autoshard.plan(step, state, batch, cluster="cluster.yaml")
    state, metrics = plan.jit(step)(state, batch)

Called by itself, a `TrainStep` is an ordinary function `(state, batch) -> (state, metrics)` for one device. Because it
is not closed, a planner can cut the loss into stages, share the batch out in unequal parts, and place the optimizer.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct

from autoshard.errors import StageError
from autoshard.loss_function import loss_and_aux, loss_of_arrays
from autoshard.module_params import ModuleParams

Metrics = dict[str, jax.Array]


@struct.dataclass
class TrainState:
    """Everything that a training step reads and writes. Any dataclass with these fields and `replace` serves as well.

    Attributes:
      step: int32 scalar, the number of steps taken.
      params: The model's parameters, a pytree of arrays; of a Flax NNX module, `ModuleParams`.
      opt_state: The optimizer's state for `params`.
      rng: Scalar key of random numbers; it never changes, each step folds in its own number.
      mutable: What the model itself changes as it runs, such as running averages; empty for most models.
      loss_scale: The scale of the loss, of whatever type `TrainStep.scaling` uses; None if the loss is not scaled.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    rng: jax.Array
    mutable: Any = struct.field(default_factory=dict)
    loss_scale: Any = None

    @property
    def module(self) -> Any:
        """The Flax NNX module that is trained, a new one with the state's arrays.

        Raises:
          StageError: `TrainStep.init` was given no module.
        """
        if not isinstance(self.params, ModuleParams):
            raise StageError(
                f"A state has a module if it was made from one; received parameters as {type(self.params).__name__}. "
                "Make the state by TrainStep.init(module)."
            )
        return self.params.module(self.mutable)


class LossScaling(Protocol):
    """How the scale of the loss moves, so that small gradients survive in half precision (arXiv:1710.03740)."""

    def first(self) -> Any:
        """The scale before the first step: a pytree with a float32 scalar `scale`."""

    def next(self, current: Any, is_finite: jax.Array) -> Any:
        """The scale after a step whose gradients were finite or not."""


def _key_of(rng: jax.Array | int) -> jax.Array:
    """The key that is given, or that of a seed."""
    shape, dtype = getattr(rng, "shape", ()), getattr(rng, "dtype", None)
    if isinstance(rng, int) or dtype is not None and jnp.issubdtype(dtype, jnp.integer) and shape == ():
        return jax.random.key(rng)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
    if not (is_key or dtype == jnp.uint32 and len(shape) == 1):  # the latter of `jax.random.PRNGKey`
        raise StageError(
            "`rng` of TrainStep.init must be one key of random numbers, or a seed; received "
            f"{type(rng).__name__ if dtype is None else f'{dtype}{list(shape)}'}. Pass jax.random.key(0), or 0."
        )
    return rng


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A training step: `(state, batch) -> (state, metrics)`.

    Attributes:
      loss_fn: `(params, batch) -> loss`, as for `jax.value_and_grad`, or `(params, batch, rng) -> (loss, aux)`; `rng`
        and `aux` may each be left out. With `has_mutable`: `(params, mutable, batch, rng) -> (loss, (mutable, aux))`,
        where `rng` may be left out. `loss` is a scalar, a mean over the batch; `aux` a dict of scalars, means too, or
        None. `batch` is a pytree whose leaves have the examples as their first dimension. `rng` is a key; each
        micro-batch has its own. It is given to the argument behind `batch`, an optional one too; where there is none,
        to one that is taken by keyword alone and named `rng` or `key`. Where the state was made from a Flax NNX module,
        `loss_fn` takes that in place of `params`, and what it changes in it - averages, random numbers - is part of
        the mutable state.
      optimizer: Any Optax transformation.
      has_mutable: Whether the model has state of its own, such as batch norm's averages.
      scaling: Scales the loss, and leaves out steps with infinite gradients; None: neither.
      parts: Numbers of examples of the micro-batches that the batch is run in, one after another; None: one, the whole.
        Gradients and metrics are means over all examples; the mutable state passes from part to part. Part m draws its
        random numbers from `rng` folded with m, if there are several. Plans in stages keep them, if they are of one
        size; left open, these choose their own.
    """

    loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    has_mutable: bool = False
    scaling: LossScaling | None = None
    parts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuses an optimizer that is none.

        Raises:
          StageError: It has no functions `init` and `update`, as of Optax.
        """
        if not (callable(getattr(self.optimizer, "init", None)) and callable(getattr(self.optimizer, "update", None))):
            received = getattr(self.optimizer, "__name__", type(self.optimizer).__name__)
            raise StageError(
                "The optimizer of a TrainStep must be a transformation of Optax, with `init` and `update`; received "
                f"{received}. Write autoshard.TrainStep(loss_fn, optax.adamw(3e-4)), for example."
            )

    @property
    def __name__(self) -> str:
        return getattr(self.loss_fn, "__name__", "loss_fn").removesuffix("_fn") + "_step"

    def init(self, params: Any, rng: jax.Array | int | None = None, mutable: Any = None) -> TrainState:
        """The state before the first step.

        Args:
          params: The parameters, or a Flax NNX module, whose `nnx.Param` are trained.
          rng: Key of the random numbers of training, or a seed of one; `jax.random.key(0)` by default.
          mutable: The model's own state, with `has_mutable`.

        Raises:
          StageError: `rng` is neither, or a module comes with mutable state besides.
        """
        rng = _key_of(0 if rng is None else rng)
        if isinstance(params, nnx.Module):
            if mutable is not None or self.has_mutable:
                raise StageError(
                    f"A module brings its own mutable state; received {type(params).__name__} with has_mutable or "
                    "mutable=. Leave both out: `loss_fn` takes (module, batch, rng)."
                )
            params, mutable = ModuleParams.of(params)
        scale = None if self.scaling is None else self.scaling.first()
        mutable = {} if mutable is None else mutable
        return TrainState(jnp.zeros((), jnp.int32), params, self.optimizer.init(params), rng, mutable, scale)

    def in_parts(self, sizes: Sequence[int]) -> "TrainStep":
        """The same step, run in micro-batches of these numbers of examples."""
        return dataclasses.replace(self, parts=tuple(sizes))

    def check_parts(self, num_examples: int) -> None:
        """Refuses a batch of so many examples that `parts` do not make up.

        Raises:
          StageError: They have more examples, or fewer.
        """
        if self.parts and sum(self.parts) != num_examples:
            raise StageError(
                "The micro-batches of a TrainStep must have all examples of the batch; received parts of "
                f"{self.parts}, {sum(self.parts)} in all, for a batch of {num_examples}."
            )

    def of_arrays(self, params: Any) -> "TrainStep":
        """The same step with a `loss_fn` that takes arrays, and a key by position.

        It is made once, so that JAX finds what it traced of the loss before.

        Raises:
          StageError: `loss_fn` takes other arguments than `TrainStep` says.
        """
        return self._of_module if isinstance(params, ModuleParams) else self._of_params

    @functools.cached_property
    def _of_params(self) -> "TrainStep":
        return dataclasses.replace(self, loss_fn=loss_of_arrays(self.loss_fn, False, self.has_mutable))

    @functools.cached_property
    def _of_module(self) -> "TrainStep":
        return dataclasses.replace(self, loss_fn=loss_of_arrays(self.loss_fn, True, False), has_mutable=True)

    def objective(self, params: Any, mutable: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, tuple[Any, Metrics]]:
        """(loss, (new mutable state, metrics)) of a micro-batch.

        Raises:
          StageError: `loss_fn` does not take or return what `TrainStep` says.
        """
        step = self.of_arrays(params)
        returned = step.loss_fn(params, mutable, batch, key) if step.has_mutable else step.loss_fn(params, batch, key)
        loss, aux = loss_and_aux(returned, step.has_mutable)
        if step.has_mutable:
            mutable, aux = aux
        if not (aux is None or isinstance(aux, Mapping)):
            raise StageError(
                "`aux` of the `loss_fn` of a TrainStep must be a dict of scalars by name, or None; received "
                f"{type(aux).__name__}. Give each of them a name."
            )
        metrics = dict(aux or {})
        for name, value in [("loss", loss), *metrics.items()]:
            if jnp.shape(value):
                raise StageError(
                    f"`loss_fn` of a TrainStep must return scalars, means over the examples; `{name}` has shape "
                    f"{list(jnp.shape(value))}. Take its mean."
                )
        return loss, (mutable, {"loss": loss} | metrics)

    def key(self, state: Any) -> jax.Array:
        """The key of the random numbers of this step."""
        return jax.random.fold_in(state.rng, state.step)

    def part_key(self, key: jax.Array, part: Any, num_parts: int) -> jax.Array:
        """The key of micro-batch `part`."""
        return key if num_parts == 1 else jax.random.fold_in(key, part)

    def scale(self, state: Any) -> jax.Array | None:
        """The factor of the loss; None for 1."""
        return None if self.scaling is None else state.loss_scale.scale

    def gradients(self, params: Any, mutable: Any, batch: Any, key: jax.Array, factor: Any) -> tuple[Any, Any, Metrics]:
        """(gradients of `factor` times the loss, new mutable state, metrics) of a micro-batch."""

        def scaled(params: Any) -> Any:
            loss, (new_mutable, metrics) = self.objective(params, mutable, batch, key)
            return loss * factor, (new_mutable, metrics)

        gradients, (mutable, metrics) = jax.grad(scaled, has_aux=True)(params)
        return gradients, mutable, metrics

    def finish(self, state: Any, gradients: Any, mutable: Any, metrics: Metrics) -> tuple[Any, Metrics]:
        """The state after the step.

        Args:
          state: Before the step.
          gradients: Means over the batch, times the scale of the loss, if there is one.
          mutable: The model's own state after the step. metrics: Means over the batch.
        """
        scale = self.scale(state)
        if scale is not None:
            gradients = jax.tree.map(lambda g: g / scale.astype(g.dtype), gradients)
        updates, opt_state = self.optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        if scale is None or self.scaling is None:
            return state.replace(step=state.step + 1, params=params, opt_state=opt_state, mutable=mutable), metrics
        is_finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]).all()
        chosen = jax.tree.map(
            lambda new, old: jnp.where(is_finite, new, old),
            (params, opt_state, mutable),
            (state.params, state.opt_state, state.mutable),
        )
        params, opt_state, mutable = chosen
        loss_scale = self.scaling.next(state.loss_scale, is_finite)
        new = state.replace(
            step=state.step + 1, params=params, opt_state=opt_state, mutable=mutable, loss_scale=loss_scale
        )
        return new, metrics | {"loss_scale": scale, "is_finite": is_finite.astype(jnp.float32)}

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Metrics]:
        """Takes one step, as one device would."""
        key, scale = self.key(state), self.scale(state)
        sizes = self.parts or (1,)
        if self.parts:  # a batch that stays whole need not have examples
            self.check_parts(batch_size(batch))
        if len(set(sizes)) == 1:
            sums = self._run_equal(state, batch, key, scale, len(sizes))
        else:
            sums = self._run_unequal(state, batch, key, scale, sizes)
        gradients, mutable, metrics = sums
        return self.finish(state, gradients, mutable, metrics)

    def _run_equal(self, state: Any, batch: Any, key: jax.Array, scale: Any, count: int) -> tuple[Any, Any, Metrics]:
        factor = (1.0 if scale is None else scale) / count
        if count == 1:
            return self.gradients(state.params, state.mutable, batch, key, factor)

        def run(mutable: Any, part: Any, number: Any) -> tuple[Any, Any, Metrics]:
            part_key = self.part_key(key, number, count)
            gradients, mutable, metrics = self.gradients(state.params, mutable, part, part_key, factor)
            return gradients, mutable, jax.tree.map(lambda m: m / count, metrics)

        def metrics_of(mutable: Any, part: Any) -> Metrics:
            return jax.tree.map(lambda m: m / count, self.objective(state.params, mutable, part, key)[1][1])

        def body(carry: Any, inputs: Any) -> tuple[Any, None]:
            sums, mutable = carry
            gradients, mutable, metrics = run(mutable, *inputs)
            return (jax.tree.map(jnp.add, sums, (gradients, metrics)), mutable), None

        parts = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)
        metric_shapes = jax.eval_shape(metrics_of, state.mutable, jax.tree.map(lambda x: x[0], parts))
        # gradients are of the shapes of what they are gradients of: no need to trace the backward pass twice
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (state.params, metric_shapes))
        ((gradients, metrics), mutable), _ = jax.lax.scan(body, (zeros, state.mutable), (parts, jnp.arange(count)))
        return gradients, mutable, metrics

    def _run_unequal(
        self, state: Any, batch: Any, key: jax.Array, scale: Any, sizes: Sequence[int]
    ) -> tuple[Any, Any, Metrics]:
        sums, mutable, first, total = None, state.mutable, 0, sum(sizes)
        for number, size in enumerate(sizes):
            part = jax.tree.map(lambda x, a=first, b=first + size: x[a:b], batch)
            first += size
            factor = (1.0 if scale is None else scale) * (size / total)
            part_key = self.part_key(key, number, len(sizes))
            gradients, mutable, metrics = self.gradients(state.params, mutable, part, part_key, factor)
            own = gradients, jax.tree.map(lambda m, w=size / total: m * w, metrics)
            sums = own if sums is None else jax.tree.map(jnp.add, sums, own)
        assert sums is not None  # a batch has at least one part
        return sums[0], mutable, sums[1]


def batch_size(batch: Any) -> int:
    """Examples of a batch: the first dimension that all its leaves have.

    Raises:
      StageError: There is no such dimension.
    """
    first: dict[tuple[int, ...], str] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        first.setdefault(jnp.shape(x)[:1], f"`{name or 'batch'}` {list(jnp.shape(x))}")
    if len(first) != 1 or () in first:
        raise StageError(
            "Where a batch is cut into micro-batches, every leaf must have the examples as its first dimension, the "
            f"same number in all; received {', '.join(first.values()) or 'a batch without leaves'}. Give all leaves "
            "that dimension, or run the batch whole, in one program."
        )
    return next(iter(first))[0]
