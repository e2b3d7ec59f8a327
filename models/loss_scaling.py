"""Scaling of the loss, so that small gradients survive in float16 (Micikevicius et al. 2018, arXiv:1710.03740).

The scale grows while gradients are finite and shrinks when they are not, in which case the step is left out.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True, slots=True)
class LossScaling:
    """How the scale moves.

    Attributes:
        initial: the first scale.
        growth_steps: finite steps in a row after which the scale doubles; after one that is not, it halves.
    """

    initial: float = 2.0**15
    growth_steps: int = 2000

    def first(self) -> "LossScale":
        """The scale before the first step."""
        return first_scale(self)

    def next(self, current: "LossScale", is_finite: jax.Array) -> "LossScale":
        """The scale after a step whose gradients were finite or not."""
        return next_scale(self, current, is_finite)


@struct.dataclass
class LossScale:
    """The scale (float32 scalar) and the number of finite steps since it last moved (int32 scalar)."""

    scale: jax.Array
    finite_steps: jax.Array


def first_scale(scaling: LossScaling) -> LossScale:
    """The scale before the first step."""
    return LossScale(jnp.float32(scaling.initial), jnp.int32(0))


def next_scale(scaling: LossScaling, current: LossScale, is_finite: jax.Array) -> LossScale:
    """The scale after a step whose gradients were finite or not."""
    steps = current.finite_steps + 1
    grows = steps >= scaling.growth_steps
    kept = jnp.where(grows, current.scale * 2, current.scale)
    return LossScale(
        jnp.where(is_finite, kept, jnp.maximum(current.scale / 2, 1.0)),
        jnp.where(is_finite & ~grows, steps, 0),
    )


def all_finite(tree: Any) -> jax.Array:
    """Whether no number in `tree` is infinite or not a number: bool scalar."""
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]).all()


def chosen(condition: jax.Array, if_true: Tree, if_false: Tree) -> Tree:
    """One of two trees of equal structure, by a bool scalar."""
    return jax.tree.map(lambda left, right: jnp.where(condition, left, right), if_true, if_false)
