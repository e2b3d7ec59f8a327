"""Forward and backward pass of a stage as one function, so that one plan decides the layouts of both.

Execution runs it in phases (`phase_partition.py`). Its arguments and results are dicts by the names of leaves.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from autoshard.pipelines.split.forward import Forward
from autoshard.pipelines.split.stage_program import StageProgram


@dataclasses.dataclass(frozen=True, slots=True)
class LeafNames:
    """The names of a stage's leaves, in the order of its interface."""

    params: tuple[str, ...]
    mutable_in: tuple[str, ...]
    mutable_out: tuple[str, ...]
    batch: tuple[str, ...]
    metrics: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class JointFunction:
    """Forward and backward pass of a stage for one micro-batch, as a function to be traced, planned and run.

    Called with `(sums, params, mutable, batch, key, inputs, factor, gradients)`, each a dict by name or a scalar:
      sums: The sums of gradients so far, like the parameters.
      factor: float32 scalar, the weight of this micro-batch in the loss, times the loss's scale.
      gradients: By the outputs that have any.
    Returns `(sums, outputs, gradients by the inputs, mutable, metrics)`.
    """

    program: StageProgram
    names: LeafNames
    rematerialise: bool = False

    @property
    def __name__(self) -> str:
        return f"stage_{self.program.start}_{self.program.stop}"

    def __call__(
        self,
        sums: Mapping[str, Any],
        params: Mapping[str, Any],
        mutable: Mapping[str, Any],
        batch: Mapping[str, Any],
        key: Mapping[str, Any],
        inputs: Mapping[str, Any],
        factor: Any,
        gradients: Mapping[str, Any],
    ) -> tuple[Any, Any, Any, Any, Any]:
        interface, names = self.program.interface, self.names
        run = jex.jaxpr_as_fun(self.program.forward)
        num_outputs, num_mutable = len(interface.outputs), len(interface.mutable_out)
        weights = {n: x for n, x in params.items() if n in sums}
        moving = {s.key: inputs[s.key] for s in interface.inputs if s.has_gradient}

        def stage(weights: Mapping[str, Any], moving: Mapping[str, Any]) -> Any:
            given, values = {**params, **weights}, {**inputs, **moving}
            results = run(
                *(given[n] for n in names.params),
                *(mutable[n] for n in names.mutable_in),
                *(batch[n] for n in names.batch),
                *key.values(),
                *(values[s.key] for s in interface.inputs),
            )
            outputs, rest = results[:num_outputs], results[num_outputs:]
            differentiable = [r for s, r in zip(interface.outputs, outputs, strict=True) if s.has_gradient]
            loss = rest[-1:] if interface.has_loss else []
            return (differentiable, loss), (outputs, rest[:num_mutable], rest[num_mutable : len(rest) - len(loss)])

        if self.rematerialise:
            stage = jax.checkpoint(stage)
        (_, loss), pullback, (outputs, new_mutable, metrics) = jax.vjp(stage, weights, moving, has_aux=True)
        seeds = [gradients[s.key] for s in interface.outputs if s.has_gradient]
        by_weights, by_inputs = pullback((seeds, [jnp.asarray(factor, l.dtype) for l in loss]))
        new_sums = {n: sums[n] + by_weights[n].astype(sums[n].dtype) for n in sums}
        named = lambda names, leaves: dict(zip(names, leaves, strict=True))
        sent = [s.key for s in interface.outputs]
        return (
            new_sums,
            named(sent, outputs),
            by_inputs,
            named(names.mutable_out, new_mutable),
            named(names.metrics, metrics),
        )


def joint_function(forward: Forward, program: StageProgram, rematerialise: bool = False) -> JointFunction:
    """The function of a stage; see `JointFunction`."""
    i = program.interface
    pick = lambda leaves, numbers: tuple(leaves.names[n] for n in numbers)
    names = LeafNames(
        pick(forward.params, i.params),
        pick(forward.mutable, i.mutable_in),
        pick(forward.mutable, i.mutable_out),
        pick(forward.batch, i.batch),
        pick(forward.metrics, i.metrics),
    )
    return JointFunction(program, names, rematerialise)


def joint_arguments(forward: Forward, program: StageProgram) -> tuple[Any, ...]:
    """The shapes of the arguments of `JointFunction`; sums of gradients have the type of their parameter."""
    i = program.interface
    shape = lambda v: jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
    params = {forward.params.names[n]: shape(forward.param_vars[n]) for n in i.params}
    sums = {n: x for n, x in params.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    mutable = {forward.mutable.names[n]: shape(forward.mutable_vars[n]) for n in i.mutable_in}
    batch = {forward.batch.names[n]: shape(forward.batch_vars[n]) for n in i.batch}
    key = {"key": shape(forward.key_var)} if i.reads_key else {}
    struct = lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype)
    inputs = {s.key: struct(s) for s in i.inputs}
    gradients = {s.key: struct(s) for s in i.outputs if s.has_gradient}
    return sums, params, mutable, batch, key, inputs, jax.ShapeDtypeStruct((), jnp.float32), gradients
