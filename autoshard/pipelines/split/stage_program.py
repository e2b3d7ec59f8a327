"""The forward program of a model cut into stages: consecutive layers, what they read, and what crosses between."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from autoshard.pipelines.split.forward import Forward
from autoshard.pipelines.split.layer_boundaries import LayerBoundaries
from autoshard.trace.walk import variables


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

    @property
    def key(self) -> str:
        """Its name among the inputs and outputs of stages."""
        return f"value{self.number}"


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
