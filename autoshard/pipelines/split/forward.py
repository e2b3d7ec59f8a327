"""The loss of a training step for one micro-batch, as one jaxpr whose equations can be cut into stages.

Equations are of three classes:
- *weights only*: made of parameters alone, such as a cast; every stage that reads it makes it anew;
- *data*: made of the batch, the random key and constants alone, such as masks and dropout; likewise made anew;
- *main*: made of parameters or mutable state and data; each belongs to one stage, and what it makes is sent on.
"""

import dataclasses
from typing import Any

import jax
import jax.extend.core as jex

from autoshard.garbage import collection_paused
from autoshard.pipelines.split.annotated_stages import AskedPipeline, asked_pipeline
from autoshard.trace.absent_cudnn import assume_cudnn
from autoshard.trace.blocks import without_blocks
from autoshard.trace.inline import inlined
from autoshard.trace.trace import path_name
from autoshard.train_step import TrainStep


@dataclasses.dataclass(frozen=True, slots=True)
class NamedLeaves:
    """Flat leaves of one argument of the loss: the names of their paths, and their structure."""

    names: tuple[str, ...]
    tree: Any = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Forward:
    """The loss of one micro-batch: `(params, mutable, batch, key) -> (loss, mutable, metrics)`, all flat.

    Attributes:
      closed: The jaxpr, calls inlined, without dead equations.
      params, mutable, batch, metrics: The leaves, in the order of the jaxpr's inputs and outputs.
      micro_batch_size: Examples of the micro-batch that it was traced for.
      main: Indices of the main equations, in program order.
      asked: The pipeline and stages that annotations ask for; None for none.
    """

    closed: jex.ClosedJaxpr = dataclasses.field(repr=False)
    params: NamedLeaves
    mutable: NamedLeaves
    batch: NamedLeaves
    metrics: NamedLeaves
    micro_batch_size: int
    main: tuple[int, ...] = dataclasses.field(repr=False)
    asked: AskedPipeline | None = None

    @property
    def jaxpr(self) -> jex.Jaxpr:
        """The open jaxpr."""
        return self.closed.jaxpr

    @property
    def param_vars(self) -> list[Any]:
        """The variables of the parameters."""
        return self.jaxpr.invars[: len(self.params.names)]

    @property
    def mutable_vars(self) -> list[Any]:
        """The variables of the mutable state before the micro-batch."""
        first = len(self.params.names)
        return self.jaxpr.invars[first : first + len(self.mutable.names)]

    @property
    def batch_vars(self) -> list[Any]:
        """The variables of the micro-batch."""
        first = len(self.params.names) + len(self.mutable.names)
        return self.jaxpr.invars[first : first + len(self.batch.names)]

    @property
    def key_var(self) -> Any:
        """The variable of the random key."""
        return self.jaxpr.invars[-1]

    @property
    def loss_out(self) -> Any:
        """What the loss is: a variable or a literal."""
        return self.jaxpr.outvars[0]

    @property
    def mutable_outs(self) -> list[Any]:
        """The mutable state after the micro-batch."""
        return self.jaxpr.outvars[1 : 1 + len(self.mutable.names)]

    @property
    def metric_outs(self) -> list[Any]:
        """The metrics."""
        return self.jaxpr.outvars[1 + len(self.mutable.names) :]

    @property
    def metric_dtypes(self) -> tuple[Any, ...]:
        """The types of the metrics."""
        return tuple(v.aval.dtype for v in self.metric_outs)


@collection_paused()
@assume_cudnn()
def trace_forward(step: TrainStep, state: Any, batch: Any, micro_batch_size: int) -> Forward:
    """Traces the loss of `step` for a micro-batch.

    Args:
      step: The training step. state, batch: Arrays or shapes; of the batch only the shapes behind the first dimension
        count. micro_batch_size: Examples of the micro-batch.
    """
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    params, mutable, key = jax.tree.map(shape, (state.params, state.mutable, state.rng))
    part = jax.tree.map(lambda x: jax.ShapeDtypeStruct((micro_batch_size, *x.shape[1:]), x.dtype), batch)

    def loss_of(params: Any, mutable: Any, batch: Any, key: Any) -> Any:
        loss, (new_mutable, metrics) = step.objective(params, mutable, batch, key)
        return loss, new_mutable, metrics

    closed, shapes = jax.make_jaxpr(loss_of, return_shape=True)(params, mutable, part, key)
    closed = _without_dead(inlined(closed))
    names = _leaves(params), _leaves(mutable), _leaves(part), _leaves(shapes[2])
    main = _main(closed.jaxpr, len(names[0].names), len(names[1].names))
    asked = asked_pipeline(closed.jaxpr, main)
    if asked is not None and asked.outer:  # they speak of pipelines, not of what runs in a stage
        equations = [without_blocks(e, asked.outer) for e in closed.jaxpr.eqns]
        closed = jex.ClosedJaxpr(closed.jaxpr.replace(eqns=equations), closed.consts)
    return Forward(closed, *names, micro_batch_size, main, asked)


def _leaves(tree: Any) -> NamedLeaves:
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    return NamedLeaves(tuple(path_name(path) for path, _ in found), structure)


def _without_dead(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    jaxpr = closed.jaxpr
    needed = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
    kept = []
    for equation in reversed(jaxpr.eqns):
        if any(v in needed for v in equation.outvars) or equation.effects:
            kept.append(equation)
            needed.update(v for v in equation.invars if not isinstance(v, jex.Literal))
    return jex.ClosedJaxpr(jaxpr.replace(eqns=kept[::-1]), closed.consts)


def _main(jaxpr: jex.Jaxpr, num_params: int, num_mutable: int) -> tuple[int, ...]:
    """Equations that depend on mutable state, or on both parameters and data."""
    of_weights = set(jaxpr.invars[:num_params])
    of_main = set(jaxpr.invars[num_params : num_params + num_mutable])
    of_data = set(jaxpr.invars[num_params + num_mutable :])
    found = []
    for i, equation in enumerate(jaxpr.eqns):
        operands = {v for v in equation.invars if not isinstance(v, jex.Literal)}
        weights, data = operands & of_weights, operands & of_data
        if operands & of_main or (weights and data):
            found.append(i)
            of_main.update(equation.outvars)
        elif weights or data:
            (of_weights if weights else of_data).update(equation.outvars)
    return tuple(found)
