"""Pins: shardings that the user insists on, given by argument path pattern."""

import difflib
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.errors import PinError
from autoshard.graph.graph import FixedLayout, Graph
from autoshard.trace.annotations import fixed_of_spec


def as_spec(pattern: str, spec: PartitionSpec | Sequence[Any]) -> PartitionSpec:
    """A pin's value as a PartitionSpec; plain sequences of entries are taken for one.

    Raises:
      PinError: If it is anything else.
    """
    if isinstance(spec, Sequence) and not isinstance(spec, str | PartitionSpec):
        spec = PartitionSpec(*spec)
    if not isinstance(spec, PartitionSpec):
        raise PinError(
            f"A pin must be a PartitionSpec, but `{pattern}` is pinned to {spec!r}. Write e.g. "
            "PartitionSpec('data', None)."
        )
    return spec


def resolve_pins(
    graph: Graph, pins: Mapping[str, PartitionSpec] | None, axes: Mapping[str, int]
) -> tuple[FixedLayout | None, ...]:
    """The layout that each argument is pinned to, or None.

    Args:
      graph: The traced program.
      pins: Shell-style pattern of argument paths (`state.params.*.kernel`) to PartitionSpec.
      axes: Mesh axis name to size.

    Raises:
      PinError: A pattern that matches nothing; an axis that the mesh lacks, that is used twice, or that does not divide
        the dimension; more entries than dimensions; two patterns that demand different things of one argument.
    """
    names = [a.name for a in graph.arguments]
    chosen: list[tuple[str, FixedLayout] | None] = [None] * len(names)
    for pattern, spec in (pins or {}).items():
        spec = as_spec(pattern, spec)
        matched = [i for i, n in enumerate(names) if fnmatch.fnmatchcase(n, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
            raise PinError(
                f"The pin `{pattern}` matches no argument. Paths look like {', '.join(f'`{n}`' for n in near)}; "
                "`*` matches any part."
            )
        for i in matched:
            value = graph.values[graph.arguments[i].value]
            if len(spec) > len(value.shape):
                raise PinError(
                    f"The pin `{pattern}` = {spec} has {len(spec)} entries, but `{names[i]}` has shape "
                    f"{value.shape}. Drop the extra ones."
                )
            fixed = fixed_of_spec(spec, len(value.shape))
            _check(pattern, spec, names[i], value.shape, fixed, axes)
            earlier = chosen[i]
            if earlier is not None and earlier[1] != fixed:
                raise PinError(
                    f"Two pins contradict each other on `{names[i]}`: `{earlier[0]}` demands {earlier[1]} and "
                    f"`{pattern}` demands {fixed}. "
                    "Narrow one of the patterns."
                )
            chosen[i] = (pattern, fixed)
    return tuple(c[1] if c is not None else None for c in chosen)


def _check(
    pattern: str, spec: PartitionSpec, name: str, shape: Sequence[int], fixed: FixedLayout, axes: Mapping[str, int]
) -> None:
    used = [a for entry in fixed if entry for a in entry]
    unknown = [a for a in used if a not in axes]
    if unknown:
        raise PinError(
            f"The pin `{pattern}` = {spec} names the mesh axis `{unknown[0]}`, but the mesh has {dict(axes)}. "
            "Pass mesh= with that axis."
        )
    twice = [a for a in used if used.count(a) > 1]
    if twice:
        raise PinError(
            f"A mesh axis may shard at most one dimension, but the pin `{pattern}` = {spec} uses `{twice[0]}` twice."
        )
    order = {a: n for n, a in enumerate(axes)}
    for entry in fixed:
        if entry and list(entry) != sorted(entry, key=order.__getitem__):
            raise PinError(
                f"The axes on one dimension stand in the order of the mesh, but the pin `{pattern}` = {spec} has "
                f"{entry} on a mesh "
                f"of {dict(axes)}. Write {tuple(sorted(entry, key=order.__getitem__))}, or give mesh= in the "
                "other order."
            )
    for d, entry in enumerate(fixed):
        parts = math.prod(axes[a] for a in entry or ())
        if shape[d] % parts:
            raise PinError(
                f"The pin `{pattern}` = {spec} splits dimension {d} of `{name}` with shape {tuple(shape)} into "
                f"{parts} parts, "
                "which do not divide it. Pin another dimension, or pad the tensor."
            )
