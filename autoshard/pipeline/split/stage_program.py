"""One stage of a model as a program of its own: forward and backward pass of consecutive layers for a micro-batch.

The program is traced jointly, so that one plan decides the layouts of both passes; execution runs it in parts
(`autoshard/pipeline/split/phase_partition.py`). Its arguments and results are dicts by the names of leaves.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from autoshard.pipeline.split.forward import Forward, variables
from autoshard.pipeline.split.layer_boundaries import LayerBoundaries


@dataclasses.dataclass(frozen=True, slots=True)
class BoundaryValue:
    """A value that crosses from one stage to later ones.

    Attributes:
      number: Position among all values that could cross any cut of the program.
      name: For people: what makes it. shape, dtype: Of one micro-batch; random keys have a type of their own.
      has_gradient: Whether gradients come back.
    """

    number: int
    name: str
    shape: tuple[int, ...]
    dtype: Any
    has_gradient: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StageInterface:
    """What a stage takes and gives, by position among the leaves of the forward program.

    Attributes:
      params: Parameters that it reads. mutable_in, mutable_out: Mutable leaves that it reads, and that it changes.
      batch: Leaves of the batch that it reads. reads_key: Whether it draws random numbers.
      inputs, outputs: The values that it takes from earlier stages, and gives to later ones.
      metrics: Metrics that it makes. has_loss: Whether it makes the loss.
    """

    params: tuple[int, ...]
    mutable_in: tuple[int, ...]
    mutable_out: tuple[int, ...]
    batch: tuple[int, ...]
    reads_key: bool
    inputs: tuple[BoundaryValue, ...]
    outputs: tuple[BoundaryValue, ...]
    metrics: tuple[int, ...]
    has_loss: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StageProgram:
    """Layers `start <= layer < stop` of a forward program.

    Attributes:
      interface: What it takes and gives.
      forward: `(params, mutable, batch, key, inputs) -> (outputs, mutable, metrics, loss)`, flat.
    """

    start: int
    stop: int
    interface: StageInterface
    forward: jex.ClosedJaxpr = dataclasses.field(repr=False)


class StageSplitter:
    """Cuts a forward program into stages; what belongs to the whole program is worked out once."""

    def __init__(self, forward: Forward, cuts: LayerBoundaries):
        self.forward, self.cuts = forward, cuts
        jaxpr = forward.jaxpr
        self._maker = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars if not isinstance(v, jex.DropVar)}
        self._main = frozenset(forward.main)
        self._position = {i: k for k, i in enumerate(forward.main)}
        self._sources = [self._main_sources(e) for e in jaxpr.eqns]
        self._numbers = {v: n for n, v in enumerate(self._made_by_main())}
        self._last_read: dict[Any, int] = {}
        for k, i in enumerate(forward.main):
            for v in self._sources[i]:
                self._last_read[v] = k

    def _main_sources(self, equation: jex.JaxprEqn) -> tuple[Any, ...]:
        return tuple(v for v in variables(equation.invars) if self._maker.get(v) in self._main)

    def _made_by_main(self) -> list[Any]:
        return [v for i in self.forward.main for v in variables(self.forward.jaxpr.eqns[i].outvars)]

    def readers(self) -> dict[int, tuple[Any, tuple[int, ...]]]:
        """For each value that layers other than its own read: its number -> (variable, layers that read it)."""
        layer_of = self._layer_of_position
        found: dict[int, tuple[Any, set[int]]] = {}
        for k, i in enumerate(self.forward.main):
            for v in self._sources[i]:
                own = layer_of[self._position[self._maker[v]]]
                if layer_of[k] != own:
                    found.setdefault(self._numbers[v], (v, set()))[1].add(layer_of[k])
        return {n: (v, tuple(sorted(layers))) for n, (v, layers) in sorted(found.items())}

    def layer_of(self, v: Any) -> int:
        """The layer that makes a main value."""
        return self._layer_of_position[self._position[self._maker[v]]]

    @functools.cached_property
    def _layer_of_position(self) -> list[int]:
        layers = []
        for layer in range(self.cuts.num_layers):
            first, stop = self.cuts.span(layer, layer + 1)
            layers.extend([layer] * (stop - first))
        return layers

    def program(self, start: int, stop: int) -> StageProgram:
        """The program of layers `start <= layer < stop`; the last stage also gives what depends on no layer."""
        forward, jaxpr = self.forward, self.forward.jaxpr
        first, end = self.cuts.span(start, stop)
        own = set(forward.main[first:end])
        is_last = stop == self.cuts.num_layers
        made = {v for i in own for v in variables(jaxpr.eqns[i].outvars)}

        def is_given_here(v: Any) -> bool:
            """Whether an output of the program is made here: by a layer of this stage, or by none at the last."""
            if isinstance(v, jex.Literal):
                return is_last
            return v in made or (is_last and self._maker.get(v) not in self._main)

        is_new = lambda before, after: after is not before
        mutable = list(zip(forward.mutable_vars, forward.mutable_outs, strict=True))
        mutable_out = [n for n, (b, a) in enumerate(mutable) if is_new(b, a) and is_given_here(a)]
        metrics = [n for n, v in enumerate(forward.metric_outs) if is_given_here(v)]
        has_loss = is_given_here(forward.loss_out)
        outputs = sorted((v for v in made if self._last_read.get(v, -1) >= end), key=self._numbers.__getitem__)
        results = [
            *outputs,
            *(mutable[n][1] for n in mutable_out),
            *(forward.metric_outs[n] for n in metrics),
            *([forward.loss_out] if has_loss else []),
        ]
        equations, inputs = self._needed(own, results)
        read = {v for i in equations for v in variables(jaxpr.eqns[i].invars)}
        read |= set(variables(results))
        positions = lambda names: tuple(n for n, v in enumerate(names) if v in read)
        crossing = sorted(inputs, key=self._numbers.__getitem__)
        interface = StageInterface(
            params=positions(forward.param_vars),
            mutable_in=positions(forward.mutable_vars),
            mutable_out=tuple(mutable_out),
            batch=positions(forward.batch_vars),
            reads_key=forward.key_var in read,
            inputs=tuple(map(self._sent, crossing)),
            outputs=tuple(map(self._sent, outputs)),
            metrics=tuple(metrics),
            has_loss=has_loss,
        )
        invars = [
            *(forward.param_vars[n] for n in interface.params),
            *(forward.mutable_vars[n] for n in interface.mutable_in),
            *(forward.batch_vars[n] for n in interface.batch),
            *([forward.key_var] if interface.reads_key else []),
            *crossing,
        ]
        used = [(v, c) for v, c in zip(jaxpr.constvars, forward.closed.consts, strict=True) if v in read]
        part = jaxpr.replace(
            constvars=[v for v, _ in used],
            invars=invars,
            outvars=results,
            eqns=[jaxpr.eqns[i] for i in equations],
            debug_info=jex.DebugInfo("stage", "stage", ("",) * len(invars), ("",) * len(results)),
        )
        return StageProgram(start, stop, interface, jex.ClosedJaxpr(part, [c for _, c in used]))

    def _needed(self, own: set[int], results: Sequence[Any]) -> tuple[list[int], list[Any]]:
        """The equations of a stage, in order: its own, and those off the main path that they read; and the main values
        of other stages that these read.
        """
        jaxpr, found, inputs = self.forward.jaxpr, set(), {}
        pending = [*own, *(self._maker[v] for v in variables(results) if v in self._maker)]
        while pending:
            i = pending.pop()
            if i in found or (i in self._main and i not in own):
                continue
            found.add(i)
            for v in variables(jaxpr.eqns[i].invars):
                maker = self._maker.get(v)
                if maker is None or maker in found:
                    continue
                if maker in self._main and maker not in own:
                    inputs[v] = None
                else:
                    pending.append(maker)
        return sorted(found), list(inputs)

    def _sent(self, v: Any) -> BoundaryValue:
        equation = self.forward.jaxpr.eqns[self._maker[v]]
        return BoundaryValue(
            self._numbers[v],
            f"{equation.primitive.name} of {self.cuts.names[self.layer_of(v)]}",
            tuple(v.aval.shape),
            v.aval.dtype,
            jnp.issubdtype(v.aval.dtype, jnp.inexact),
        )


@dataclasses.dataclass(frozen=True)
class JointFunction:
    """Forward and backward pass of a stage for one micro-batch, as a function to be traced, planned and run.

    Called with `(sums, params, mutable, batch, key, inputs, factor, gradients)`, each a dict by name or a scalar:
      sums: The sums of gradients so far, like the parameters, in `sum_dtype`.
      factor: float32 scalar, the weight of this micro-batch in the loss, times the loss's scale.
      gradients: By the outputs that have any.
    Returns `(sums, outputs, gradients by the inputs, mutable, metrics)`.
    """

    program: StageProgram
    names: "LeafNames"
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
        moving = {boundary_name(s): inputs[boundary_name(s)] for s in interface.inputs if s.has_gradient}

        def stage(weights: Mapping[str, Any], moving: Mapping[str, Any]) -> Any:
            given, values = {**params, **weights}, {**inputs, **moving}
            results = run(
                *(given[n] for n in names.params),
                *(mutable[n] for n in names.mutable_in),
                *(batch[n] for n in names.batch),
                *key.values(),
                *(values[boundary_name(s)] for s in interface.inputs),
            )
            outputs, rest = results[:num_outputs], results[num_outputs:]
            differentiable = [r for s, r in zip(interface.outputs, outputs, strict=True) if s.has_gradient]
            loss = rest[-1:] if interface.has_loss else []
            return (differentiable, loss), (outputs, rest[:num_mutable], rest[num_mutable : len(rest) - len(loss)])

        if self.rematerialise:
            stage = jax.checkpoint(stage)
        (_, loss), pullback, (outputs, new_mutable, metrics) = jax.vjp(stage, weights, moving, has_aux=True)
        seeds = [gradients[boundary_name(s)] for s in interface.outputs if s.has_gradient]
        by_weights, by_inputs = pullback((seeds, [jnp.asarray(factor, l.dtype) for l in loss]))
        new_sums = {n: sums[n] + by_weights[n].astype(sums[n].dtype) for n in sums}
        named = lambda names, leaves: dict(zip(names, leaves, strict=True))
        sent = [boundary_name(s) for s in interface.outputs]
        return (
            new_sums,
            named(sent, outputs),
            by_inputs,
            named(names.mutable_out, new_mutable),
            named(names.metrics, metrics),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class LeafNames:
    """The names of a stage's leaves, in the order of its interface."""

    params: tuple[str, ...]
    mutable_in: tuple[str, ...]
    mutable_out: tuple[str, ...]
    batch: tuple[str, ...]
    metrics: tuple[str, ...]


def boundary_name(sent: BoundaryValue) -> str:
    """The name of a crossing value among the inputs and outputs of a stage."""
    return f"value{sent.number}"


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


def joint_arguments(forward: Forward, program: StageProgram, sum_dtype: Any = None) -> tuple[Any, ...]:
    """The shapes of the arguments of `JointFunction`.

    Args:
      sum_dtype: Type of the sums of gradients; None for that of each parameter.
    """
    i = program.interface
    shape = lambda v: jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
    params = {forward.params.names[n]: shape(forward.param_vars[n]) for n in i.params}
    floating = {n: x for n, x in params.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    sums = {n: jax.ShapeDtypeStruct(x.shape, sum_dtype or x.dtype) for n, x in floating.items()}
    mutable = {forward.mutable.names[n]: shape(forward.mutable_vars[n]) for n in i.mutable_in}
    batch = {forward.batch.names[n]: shape(forward.batch_vars[n]) for n in i.batch}
    key = {"key": shape(forward.key_var)} if i.reads_key else {}
    struct = lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype)
    inputs = {boundary_name(s): struct(s) for s in i.inputs}
    gradients = {boundary_name(s): struct(s) for s in i.outputs if s.has_gradient}
    return sums, params, mutable, batch, key, inputs, jax.ShapeDtypeStruct((), jnp.float32), gradients
