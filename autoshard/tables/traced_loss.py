"""The loss of a training step as a program over the leaves of parameters, mutable state, batch and key."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from autoshard.trace.absent_cudnn import assume_cudnn
from autoshard.trace.inline import inlined
from autoshard.trace.trace import path_name
from autoshard.trace.walk import variables
from autoshard.train_step import TrainStep


@dataclasses.dataclass(frozen=True)
class TracedLoss:
    """A loss for arguments of some shapes; nested `jit` calls are inlined.

    Attributes:
      closed: The program; its inputs are the leaves of the parameters, of the mutable state, of the batch, and the key.
      paths: Of the parameters.
      num_mutable, num_batch: Leaves of the mutable state and of the batch.
      out_tree: The structure of what the loss returns.
    """

    closed: jex.ClosedJaxpr
    paths: tuple[str, ...]
    num_mutable: int
    num_batch: int
    out_tree: Any

    @property
    def params(self) -> list[Any]:
        """The variables of the parameters."""
        return self.closed.jaxpr.invars[: len(self.paths)]

    @property
    def batch(self) -> list[Any]:
        """The variables of the batch."""
        first = len(self.paths) + self.num_mutable
        return self.closed.jaxpr.invars[first : first + self.num_batch]


@assume_cudnn()
def trace_loss(step: TrainStep, params: Any, mutable: Any, batch: Any, key: Any) -> TracedLoss:
    """Traces what the loss of a step returns, for arrays or shapes."""
    own = step.of_arrays(params)
    loss_fn: Callable[..., Any] = own.loss_fn if own.has_mutable else lambda p, _, b, k: own.loss_fn(p, b, k)
    args = jax.tree.map(shape_like, (params, mutable, batch, key))
    closed, shapes = jax.make_jaxpr(loss_fn, return_shape=True)(*args)
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    paths = tuple(path_name(path) for path, _ in leaves)
    counts = [len(jax.tree.leaves(tree)) for tree in (mutable, batch)]
    return TracedLoss(inlined(closed), paths, counts[0], counts[1], jax.tree.structure(shapes))


def shape_like(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and type of an array."""
    aval: Any = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def sliced(jaxpr: jex.Jaxpr, wanted: Sequence[Any]) -> tuple[list[jex.JaxprEqn], set[Any]]:
    """The equations of a program that some of its values need, and all variables that these read."""
    needed, kept = set(variables(wanted)), []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            kept.append(equation)
            needed.update(variables(equation.invars))
    return kept[::-1], needed
