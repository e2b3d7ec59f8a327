"""A model with its loss as two pure functions of arrays: what a training step needs to know of a model.

NNX and Linen modules keep their state in different ways; both become the same `Objective`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

Batch = Mapping[str, jax.Array]
"""One step's data by name; every family states the names, shapes and types of its own."""

Metrics = dict[str, jax.Array]
"""float32 scalars by name; always has `loss`. In an evaluation of clicks also what each example was given: `logits` and
`clicks`, float32 (batch,)."""


class Objective(NamedTuple):
    """A model and what it is trained for.

    Attributes:
        init: key -> (parameters, mutable state), nested dicts of arrays. The mutable state is what the model itself
            changes as it runs in training, such as the running averages of batch norm; empty for most models.
        loss: (parameters, mutable state, batch, key or None) -> (loss, (new mutable state, further metrics)). The loss
            is a float32 scalar, a mean over the batch.
        is_random: whether the loss draws random numbers, and so needs a key.
        evaluate: (parameters, mutable state, batch, key) -> (loss, further metrics) of the model as it is used after
            training: without dropout, with running averages; None where that is `loss` without a key. The key is for
            losses that are random by themselves, such as those over drawn noise.
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    loss: Callable[[Any, Any, Batch, jax.Array | None], tuple[jax.Array, tuple[Any, Metrics]]]
    is_random: bool = False
    evaluate: Callable[[Any, Any, Batch, jax.Array], tuple[jax.Array, Metrics]] | None = None


def nnx_objective(
    make: Callable[[nnx.Rngs], Any],
    loss: Callable[[Any, Batch, jax.Array | None], tuple[jax.Array, Metrics]],
    is_random: bool = False,
    evaluate: Callable[[Any, Batch, jax.Array], tuple[jax.Array, Metrics]] | None = None,
) -> Objective:
    """The objective of an NNX module.

    Args:
        make: builds the module from the random numbers of its parameters.
        loss: (module, batch, key or None) -> (loss, further metrics).
        is_random: whether `loss` needs the key.
        evaluate: (module, batch, key) -> (loss, further metrics) after training; None: `loss` without a key.
    """
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))

    def init(key: jax.Array) -> tuple[Any, Any]:
        return _parts(make(nnx.Rngs(params=key)))

    def loss_of(params: Any, mutable: Any, batch: Batch, key: jax.Array | None) -> Any:
        module = nnx.merge(graphdef, params, mutable)
        value, metrics = loss(module, batch, key)
        return value, (_parts(module)[1], metrics)

    def evaluated(params: Any, mutable: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        return evaluate(nnx.merge(graphdef, params, mutable), batch, key)

    return Objective(init, loss_of, is_random, None if evaluate is None else evaluated)


def _parts(module: nnx.Module) -> tuple[Any, Any]:
    """Parameters and all other state of a module, as nested dicts of arrays."""
    _, params, rest = nnx.split(module, nnx.Param, ...)
    return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)


def linen_objective(
    module: nn.Module,
    example: jax.ShapeDtypeStruct,
    loss: Callable[[Callable[..., jax.Array], Batch, jax.Array | None], tuple[jax.Array, Metrics]],
    is_random: bool = False,
) -> Objective:
    """The objective of a Linen module that has parameters and no other variables.

    Args:
        module: the module.
        example: shape and type of its first argument.
        loss: (the module's apply function with the parameters bound, batch, key or None) -> (loss, further metrics).
        is_random: whether `loss` needs the key.
    """

    def init(key: jax.Array) -> tuple[Any, Any]:
        return module.init(key, jnp.zeros(example.shape, example.dtype))["params"], {}

    def loss_of(params: Any, mutable: Any, batch: Batch, key: jax.Array | None) -> Any:
        value, metrics = loss(lambda *args, **kwargs: module.apply({"params": params}, *args, **kwargs), batch, key)
        return value, (mutable, metrics)

    return Objective(init, loss_of, is_random)


def next_token_batch(config: Any, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the batch of a language model: `batch_size` sequences of `config.context_length` tokens."""
    tokens = jax.ShapeDtypeStruct((batch_size, config.context_length), jnp.int32)
    return {"inputs": tokens, "targets": tokens}
