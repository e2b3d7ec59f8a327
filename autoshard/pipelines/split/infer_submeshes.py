"""Where the inputs of a program belong, known the submeshes of some: optimizer state lies with its parameter."""

import collections
from collections.abc import Mapping, Sequence

import jax.extend.core as jex

from autoshard.errors import TraceError
from autoshard.pipelines.split.placement import SMALL_BYTES
from autoshard.pipelines.split.steps import Flattening, Step

_SEVERAL = -1
"""The label of what is computed from scalars of several submeshes."""


def infer_submeshes(
    closed: jex.ClosedJaxpr, known: Sequence[int | None], successors: Mapping[int, int] | None = None
) -> tuple[int | None, ...]:
    """A submesh for each flat input.

    An input belongs where the values are that it is first combined with. A small one that meets values of several
    submeshes, such as a step counter, belongs everywhere. What meets none belongs where its next version is made, or
    else on submesh 0 (an array) or everywhere (a scalar).

    Args:
      closed: The program. known: For each flat input, its submesh (of parameters and gradients); None if not known.
      successors: By the flat position of an output, the input that it is the next version of.

    Returns:
      For each flat input its submesh; None for everywhere.
    """
    if len(known) != len(closed.jaxpr.invars):
        raise TraceError(
            f"Every flat input needs a submesh or None: the program has {len(closed.jaxpr.invars)} inputs, but "
            f"{len(known)} submeshes are given. Flatten the arguments with jax.tree.leaves."
        )
    flattening = Flattening()
    inputs = [flattening.new_value(v.aval) for v in closed.jaxpr.invars]
    steps, outputs = flattening.flatten(closed, inputs)
    flow = _opened(flattening, steps)
    submeshes = dict(enumerate(known))
    while True:  # an input may meet only inputs that are placed themselves by what they meet
        labels = _labels(flattening, flow, submeshes)
        met = _meetings(flattening, flow, labels, submeshes)
        found = {v: p for v, p in met.items() if p not in (None, _SEVERAL)}
        if not found:
            break
        submeshes.update(found)
    for output, value in (successors or {}).items():
        label = labels.get(outputs[output])
        if value in met and met[value] is None and label not in (None, _SEVERAL):
            submeshes[value] = label
    is_counter = lambda v: met[v] is _SEVERAL or closed.jaxpr.invars[v].aval.shape == ()
    return tuple(p if p is not None or is_counter(v) else 0 for v, p in sorted(submeshes.items()))


def _opened(flattening: Flattening, steps: Sequence[Step]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(operands, results) of each step, in order, with the steps of all branches in the place of a conditional."""
    flow: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for step in steps:
        if not step.branches:
            flow.append((step.operands, tuple(v for v in step.results if v is not None)))
            continue
        ends = []
        for branch in step.branches:
            inner, results = flattening.flatten(branch, step.arguments)
            flow.extend(_opened(flattening, inner))
            ends.append(results)
        joins = zip(step.results, zip(*ends, strict=True), strict=True)
        flow.extend((alternatives, (r,)) for r, alternatives in joins if r is not None)
    return flow


def _labels(
    flattening: Flattening,
    flow: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    submeshes: Mapping[int, int | None],
) -> dict[int, int]:
    """The submeshes of the values that depend on a placed input; where several meet, that of the largest array."""
    labels = {v: p for v, p in submeshes.items() if p is not None}
    for operands, results in flow:
        met = [(flattening.size_bytes(v), labels[v], flattening.is_scalar(v)) for v in operands if v in labels]
        if not met:
            continue
        arrays = [(size, -label) for size, label, is_scalar in met if not is_scalar and label != _SEVERAL]
        distinct = {label for _, label, _ in met}
        if arrays:
            label = -max(arrays)[1]
        else:
            label = distinct.pop() if len(distinct) == 1 else _SEVERAL
        labels.update(dict.fromkeys(results, label))
    return labels


def _meetings(
    flattening: Flattening,
    flow: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    labels: Mapping[int, int],
    submeshes: Mapping[int, int | None],
) -> dict[int, int | None]:
    """For each input without a submesh, where it meets values that have one: `_SEVERAL` or None for several or none.

    Of several, a large array belongs where it meets most bytes.
    """
    reached: dict[int, set[int]] = {v: {v} for v, p in submeshes.items() if p is None}
    meets: dict[int, collections.Counter[int]] = {v: collections.Counter() for v in reached}
    for operands, results in flow:
        sources = set[int]().union(*(reached[v] for v in operands if v in reached))
        for r in results:
            if r in labels:
                for source in sources:
                    meets[source][labels[r]] += flattening.size_bytes(r)
            elif sources:
                reached[r] = sources
    chosen: dict[int, int | None] = {}
    for value, met in meets.items():
        arrays = {p: size for p, size in met.items() if p != _SEVERAL}
        is_small = flattening.size_bytes(value) <= SMALL_BYTES
        is_one = len(met) == 1 if flattening.is_scalar(value) else len(arrays) == 1
        if arrays and (is_one or not is_small):
            chosen[value] = max(arrays, key=lambda p: (arrays[p], -p))
        else:
            chosen[value] = _SEVERAL if met and is_small else None
    return chosen
