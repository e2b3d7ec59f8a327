"""Losses, each a mean that is computed in float32 and made of reductions that stay cheap on split tensors."""

import jax
import jax.numpy as jnp


def token_losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log softmax(logits)[target] at each position, computed in float32.

    The target's logit is picked by comparing token ids and summing over the vocabulary, not by a gather: both the
    log-sum-exp and the pick are then plain reductions, so that a vocabulary split over devices costs two small
    all-reduces and no all-gather of the logits. XLA fuses the comparison into the reduction.

    Args:
        logits: (..., vocab).
        targets: int32 (...).

    Returns:
        float32 (...), nats.
    """
    logits = logits.astype(jnp.float32)
    token_ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    picked = jnp.sum(jnp.where(token_ids == targets[..., None], logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def cross_entropy(logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Mean of `token_losses`, or their weighted mean.

    Args:
        logits: (..., vocab).
        targets: int32 (...).
        weights: float (...), the weight of each position, or None to weigh all alike. Weights of zero everywhere give
            a loss of zero.

    Returns:
        float32 scalar, nats per position.
    """
    losses = token_losses(logits, targets)
    if weights is None:
        return jnp.mean(losses)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def binary_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean of -log of the probability that sigmoid(logits) gives to the labels.

    Args:
        logits: (batch,).
        labels: (batch,), 0 or 1.

    Returns:
        float32 scalar, nats per example.
    """
    logits = logits.astype(jnp.float32)
    return jnp.mean(jax.nn.softplus(logits) - labels * logits)


def mean_squared_error(predictions: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean square of the difference of two arrays of one shape: float32 scalar."""
    return jnp.mean(jnp.square(predictions.astype(jnp.float32) - targets))
