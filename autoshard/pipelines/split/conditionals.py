"""Cuts a conditional over values of several submeshes into one conditional for each submesh and level.

Each piece holds, of every branch, the steps that run on its submesh. What one piece makes and another of the same
branch reads passes from piece to piece (zeros, where the other branch runs). Steps that any submesh may run are put
into every piece that reads them, so that nothing large is made where nobody needs it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.pipelines.split.steps import Flattening, Site, Step, run_steps


@dataclasses.dataclass(frozen=True, slots=True)
class ConditionalSites:
    """Where the parts of a conditional run.

    Attributes:
      branches: For each branch, its steps and their sites, in order.
      outputs: For each branch, the values that it returns.
      joins: For each result, where it is chosen among the branches; None if nothing reads it.
    """

    branches: Sequence[Sequence[tuple[Step, Site]]]
    outputs: Sequence[Sequence[int]]
    joins: Sequence[Site | None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """What one branch does in one piece: steps, values that it reads from outside, values that later pieces read."""

    steps: tuple[Step, ...]
    reads: tuple[int, ...]
    passes: tuple[int, ...]


def split_conditional(step: Step, cut: ConditionalSites, flattening: Flattening) -> list[tuple[Step, Site]]:
    """The pieces of a conditional and their sites, in an order in which they can run."""
    sites = {s for s in cut.joins if s is not None}
    sites |= {s for branch in cut.branches for _, s in branch if len(s.submeshes) == 1}
    order = sorted(sites, key=lambda s: (s.level, -len(s.submeshes), sorted(s.submeshes)))
    origins = [{v: (i, s) for i, (x, s) in enumerate(branch) for v in x.results} for branch in cut.branches]
    wanted: list[set[int]] = [set() for _ in cut.branches]  # by the pieces after this one
    pieces: list[tuple[Step, Site]] = []
    for site in reversed(order):
        slots = [k for k, s in enumerate(cut.joins) if s == site]
        parts = []
        for branch, outputs, origin, later in zip(cut.branches, cut.outputs, origins, wanted, strict=True):
            passes = sorted(v for v in later if origin[v][1] == site)
            later.difference_update(passes)
            part = _part(branch, site, [*(outputs[k] for k in slots), *passes], passes)
            later.update(v for v in part.reads if v in origin)
            parts.append(part)
        results = [step.results[k] for k in slots]
        ends = [[outputs[k] for k in slots] for outputs in cut.outputs]
        if results or any(p.passes for p in parts):
            pieces.append((_piece(step, parts, results, ends, flattening), site))
    return pieces[::-1]


def _part(branch: Sequence[tuple[Step, Site]], site: Site, needed: Sequence[int], passes: list[int]) -> _Part:
    """The steps of a branch that make `needed` at `site`: its own, and those that any submesh may run."""
    missing, steps = dict.fromkeys(needed), []
    for step, submesh in reversed(branch):
        if (submesh == site or len(submesh.submeshes) > 1) and any(v in missing for v in step.results):
            steps.append(step)
            for v in missing.keys() & step.results:
                del missing[v]
            missing.update(dict.fromkeys(step.operands))
    return _Part(tuple(reversed(steps)), tuple(missing), tuple(passes))


def _piece(
    step: Step,
    parts: Sequence[_Part],
    results: Sequence[int | None],
    ends: Sequence[Sequence[int]],
    flattening: Flattening,
) -> Step:
    operands = tuple(dict.fromkeys(v for part in parts for v in part.reads))
    passed = [(b, v) for b, part in enumerate(parts) for v in part.passes]

    def branch(number: int):
        def run(*arrays: Any) -> list[Any]:
            env = dict(zip(operands, arrays, strict=True))
            run_steps(parts[number].steps, env)
            chosen = [env[v] for v in ends[number]]
            others = [flattening.avals[v] for _, v in passed]
            extra = [
                env[v] if b == number else jnp.zeros(a.shape, a.dtype) for (b, v), a in zip(passed, others, strict=True)
            ]
            return [*chosen, *extra]

        return run

    branches = [branch(n) for n in range(len(parts))]

    def run(arrays: Sequence[Any]) -> Sequence[Any]:
        return jax.lax.switch(arrays[0], branches, *arrays[1:])

    return Step("cond", step.line, (step.operands[0], *operands), (*results, *(v for _, v in passed)), run)
