"""One step of training a GPT as a pure function, for the NNX and the Linen model alike.

`build` gives the two functions that a planner or a training loop wants: one makes the state from a seed, one advances
it by a batch. Both can be traced from shapes alone, so that a 175B model is described without allocating it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct

from .gpt import GPT, GPTConfig
from .gpt_linen import GPT as LinenGPT
from .gpt_linen import LinenGPTConfig

Batch = Mapping[str, jax.Array]
"""`inputs` and `targets`: int32 (batch, sequence); targets[b, s] is the token that follows inputs[b, s]."""

Metrics = dict[str, jax.Array]
"""`loss`: float32 scalar, the mean cross-entropy per token in nats."""


@struct.dataclass
class TrainState:
    """Everything that a training step reads and writes.

    Attributes:
        step: int32 scalar, the number of steps taken.
        params: the model's parameters, nested dicts of arrays.
        opt_state: the optimizer's state for `params`.
        rng: scalar key of the dropout masks; it never changes, each step folds in its own number.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    rng: jax.Array


class TrainFunctions(NamedTuple):
    """What `build` returns.

    Attributes:
        init: seed (int, or an int32 scalar under tracing) -> TrainState.
        step: (TrainState, Batch) -> (TrainState, Metrics).
    """

    init: Callable[[Any], TrainState]
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean over all positions of -log softmax(logits)[target], computed in float32.

    The target's logit is picked by comparing token ids and summing over the vocabulary, not by a gather: both the
    log-sum-exp and the pick are then plain reductions, so that a vocabulary split over devices costs two small
    all-reduces and no all-gather of the logits. XLA fuses the comparison into the reduction.

    Args:
        logits: (batch, sequence, vocab).
        targets: int32 (batch, sequence).

    Returns:
        float32 scalar, nats per token.
    """
    logits = logits.astype(jnp.float32)
    token_ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    picked = jnp.sum(jnp.where(token_ids == targets[..., None], logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def adamw(
    learning_rate: optax.ScalarOrSchedule = 3e-4, weight_decay: float = 0.1, clip_norm: float | None = 1.0
) -> optax.GradientTransformation:
    """AdamW with GPT-3's moments (0.9, 0.95), after clipping the gradient to a global norm of `clip_norm`.

    Args:
        learning_rate: a constant or a function of the step.
        weight_decay: decay per step as a share of the learning rate.
        clip_norm: largest global gradient norm, or None not to clip.
    """
    optimizer = optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=weight_decay)
    return optimizer if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)


class _Model(NamedTuple):
    init: Callable[[jax.Array], Any]
    """key -> params"""
    apply: Callable[[Any, jax.Array, jax.Array | None], jax.Array]
    """(params, tokens, dropout key or None) -> logits"""


def _nnx_model(config: GPTConfig) -> _Model:
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(params=0))))

    def init(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(GPT(config, rngs=nnx.Rngs(params=key)), nnx.Param))

    def apply(params: Any, tokens: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        return nnx.merge(graphdef, params)(tokens, dropout_key)

    return _Model(init, apply)


def _linen_model(config: LinenGPTConfig) -> _Model:
    model = LinenGPT(config)

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]

    def apply(params: Any, tokens: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        rngs = None if dropout_key is None else {"dropout": dropout_key}
        return model.apply({"params": params}, tokens, deterministic=dropout_key is None, rngs=rngs)

    return _Model(init, apply)


def build(config: GPTConfig, optimizer: optax.GradientTransformation) -> TrainFunctions:
    """The functions that make and advance the training state of a GPT.

    Args:
        config: a `LinenGPTConfig` builds the Linen model, any other `GPTConfig` the NNX model.
        optimizer: an Optax transformation; its updates are added to the parameters.

    Returns:
        (init, step), both pure: `jax.eval_shape(init, 0)` and `jax.make_jaxpr(step)(state, batch)` allocate nothing.
    """
    model = _linen_model(config) if isinstance(config, LinenGPTConfig) else _nnx_model(config)

    def init(seed: Any) -> TrainState:
        params_key, dropout_key = jax.random.split(jax.random.key(seed))
        params = model.init(params_key)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), dropout_key)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        dropout_key = jax.random.fold_in(state.rng, state.step) if config.dropout_rate > 0 else None

        def loss_of(params: Any) -> jax.Array:
            return cross_entropy(model.apply(params, batch["inputs"], dropout_key), batch["targets"])

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), {"loss": loss}

    return TrainFunctions(init, train_step)


def batch_shapes(batch_size: int, sequence_length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of `batch_size` sequences of `sequence_length` tokens."""
    tokens = jax.ShapeDtypeStruct((batch_size, sequence_length), jnp.int32)
    return {"inputs": tokens, "targets": tokens}
