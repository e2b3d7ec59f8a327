"""Traced functions with what a plan says of their equations, for tests."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.compiler.planned_graph import PlannedGraph, planned_graph
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.layout import SpecEntries
from autoshard.trace.trace import trace


def planned(
    fn: Callable[..., Any],
    shapes: Sequence[Sequence[int]],
    equations: Mapping[int, EquationPlan],
    axis_sizes: Mapping[str, int],
    arguments: Sequence[SpecEntries] | None = None,
    donate: tuple[int, ...] = (),
) -> PlannedGraph:
    """`fn` of float32 arrays, planned; arguments lie whole where nothing else is said."""
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    whole = [((),) * len(shape) for shape in shapes]
    return planned_graph(trace(fn, given, donate).graph, equations, arguments or whole, axis_sizes)
