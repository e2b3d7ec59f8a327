"""Runs the parts of a planned program one by one: each is a jitted function of its own on the plan's mesh."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autoshard.compiler.options import compiler_options
from autoshard.compiler.schedule import Schedule
from autoshard.execution.apply import Evaluator
from autoshard.execution.jit import Interface
from autoshard.execution.placement import partition_spec
from autoshard.pipelines.split.phase_partition import PhaseEquations, PhasePartition
from autoshard.pipelines.split.residual_layouts import residual_layouts
from autoshard.trace.trace import Trace


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseResult:
    """What a part gave: the program's outputs by position, and the values that later parts read."""

    results: dict[int, jax.Array]
    residuals: tuple[jax.Array, ...]


class PhaseFunction:
    """One part of a planned program. Call it, or `.lower(...)` it.

    Args:
      trace: The planned program. interface: What its plan says. mesh: The devices.
      part: Which equations.
      before: The variables that earlier parts hold for it. after: Those that it holds for later ones.
      donated: Positions of the program's inputs whose buffers the part may reuse.
      name: Of the function, for profiles.
    """

    def __init__(
        self,
        trace: Trace,
        interface: Interface,
        mesh: Mesh,
        part: PhaseEquations,
        before: Sequence[Any],
        after: Sequence[Any],
        donated: Sequence[int],
        name: str,
    ):
        self.part, self._interface = part, interface
        jaxpr, consts = trace.jaxpr.jaxpr, trace.jaxpr.consts
        evaluator = Evaluator(mesh, dict(interface.shardings))
        entries = interface.argument_entries
        named = lambda e: None if e is None else NamedSharding(mesh, partition_spec(e))
        before_layouts, after_layouts = (residual_layouts(jaxpr, interface, residuals) for residuals in (before, after))

        def run(given: Sequence[Any], reused: Sequence[Any], residuals: Sequence[Any]) -> Any:
            flat = {**dict(zip(self._plain, given, strict=True)), **dict(zip(self._donated, reused, strict=True))}
            known = {v: (c, None) for v, c in zip(jaxpr.constvars, consts, strict=True)}
            known |= {jaxpr.invars[n]: (x, entries[n]) for n, x in flat.items()}
            known |= {v: pair for v, *pair in zip(before, residuals, before_layouts, strict=True)}
            wanted = [*(jaxpr.outvars[n] for n in part.results), *after]
            made = evaluator.part(jaxpr, part.equations, known, wanted)
            results = [
                evaluator.move(x, interface.output_steps[n])
                for n, x in zip(part.results, made[: len(part.results)], strict=True)
            ]
            kept = map(evaluator.place, made[len(part.results) :], after_layouts)
            return results, list(kept)

        run.__name__ = name
        self._donated = [n for n in part.given if n in set(donated)]
        self._plain = [n for n in part.given if n not in set(donated)]
        ins = lambda positions: [NamedSharding(mesh, partition_spec(entries[n])) for n in positions]
        outs = [named(interface.output_entries[n]) for n in part.results]
        self._shardings = dict(zip(part.given, ins(part.given), strict=True))
        self._jitted = jax.jit(
            run,
            in_shardings=(ins(self._plain), ins(self._donated), list(map(named, before_layouts))),
            out_shardings=(outs, list(map(named, after_layouts))),
            donate_argnums=(1,),
            compiler_options=compiler_options(mesh.devices.flat[0].platform, Schedule.LEAST_MEMORY),
        )

    def sharding(self, position: int) -> NamedSharding:
        """How the part reads an input of the program."""
        return self._shardings[position]

    def _arranged(self, arguments: Mapping[int, Any], residuals: Sequence[Any]) -> tuple[Any, Any, Any]:
        return [arguments[n] for n in self._plain], [arguments[n] for n in self._donated], list(residuals)

    def __call__(self, arguments: Mapping[int, Any], residuals: Sequence[Any]) -> PhaseResult:
        """Runs it.

        Args:
          arguments: The program's inputs by position; those that the part reads must be there, as planned.
          residuals: What earlier parts hold for it.
        """
        results, kept = self._jitted(*self._arranged(arguments, residuals))
        return PhaseResult(dict(zip(self.part.results, results, strict=True)), tuple(kept))

    def lower(self, arguments: Mapping[int, Any], residuals: Sequence[Any]) -> Any:
        """Lowers it for arrays or shapes."""
        return self._jitted.lower(*self._arranged(arguments, residuals))


@dataclasses.dataclass(frozen=True)
class PhaseFunctions:
    """All parts of a planned program; `weight` is None where the backward pass makes the gradients of weights too."""

    parts: PhasePartition
    forward: PhaseFunction
    backward: PhaseFunction
    weight: PhaseFunction | None


def phase_functions(
    trace: Trace, interface: Interface, mesh: Mesh, parts: PhasePartition, donated: Sequence[int], name: str
) -> PhaseFunctions:
    """The parts of a planned program on `mesh`.

    Args:
      donated: Positions of inputs that the part which makes their successors may reuse, such as sums of gradients.
      name: Prefix of the functions' names.
    """
    make = lambda part, before, after, phase: PhaseFunction(
        trace, interface, mesh, part, before, after, donated, f"{name}_{phase}"
    )
    forward = make(parts.forward, (), parts.residuals, "forward")
    if parts.weight is None:
        return PhaseFunctions(parts, forward, make(parts.backward, parts.residuals, (), "backward"), None)
    backward = make(parts.backward, parts.residuals, parts.weight_residuals, "backward")
    weight = make(parts.weight, (*parts.kept_residuals, *parts.weight_residuals), (), "weight")
    return PhaseFunctions(parts, forward, backward, weight)
