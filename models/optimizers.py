"""The optimizers of the zoo, by their usual settings; each may clip the gradient first."""

import optax


def adamw(
    learning_rate: optax.ScalarOrSchedule = 3e-4, weight_decay: float = 0.1, clip_norm: float | None = 1.0
) -> optax.GradientTransformation:
    """AdamW with GPT-3's moments (0.9, 0.95), after clipping the gradient to a global norm of `clip_norm`.

    Args:
        learning_rate: a constant or a function of the step.
        weight_decay: decay per step as a share of the learning rate.
        clip_norm: largest global gradient norm, or None not to clip.
    """
    return _clipped(optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=weight_decay), clip_norm)


def adafactor(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    clip_norm: float | None = None,
    min_dim_size_to_factor: int = 128,
) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern 2018, arXiv:1804.04235): row and column sums in place of second moments.

    Args:
        learning_rate: a constant or a function of the step, as a share of each parameter's root mean square.
        clip_norm: largest global gradient norm, or None for Adafactor's own clipping of each update alone.
        min_dim_size_to_factor: arrays with fewer than two dimensions of this size keep full second moments.
    """
    optimizer = optax.adafactor(learning_rate, min_dim_size_to_factor=min_dim_size_to_factor)
    return _clipped(optimizer, clip_norm)


def sgd(
    learning_rate: optax.ScalarOrSchedule = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
) -> optax.GradientTransformation:
    """Stochastic gradient descent with momentum, and weight decay added to the gradient.

    Args:
        learning_rate: a constant or a function of the step.
        momentum: share of the last update that is kept.
        weight_decay: share of the parameters that is added to the gradient.
        clip_norm: largest global gradient norm, or None not to clip.
    """
    optimizer = optax.sgd(learning_rate, momentum=momentum)
    if weight_decay:
        optimizer = optax.chain(optax.add_decayed_weights(weight_decay), optimizer)
    return _clipped(optimizer, clip_norm)


def _clipped(optimizer: optax.GradientTransformation, clip_norm: float | None) -> optax.GradientTransformation:
    return optimizer if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)
