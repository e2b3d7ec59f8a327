"""What differs between two plans, and what each difference costs.

Both estimates are sums over items: collectives, computations, tensors alive at the peak. A collective or a tensor that
bears an argument's path belongs to that argument; every other one belongs to the operation and line that makes it. So
the difference of two step times falls apart, without a remainder, into what the arguments with other layouts cost, the
collectives of all other tensors, and computation; and the difference of two peaks likewise.

An argument's own items are not all that its layout causes: a gradient's reduction, for example, bears the name of the
product that makes the gradient. Such items stand under that operation, with its line.
"""

import collections
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from autoshard.graph.layout import SpecEntries
from autoshard.planner.estimate import CommunicationItem
from autoshard.plans.differences import (
    CommunicationChange,
    ComputeChange,
    LayoutChange,
    MemoryChange,
    OrderChange,
    Side,
)
from autoshard.plans.plan_diff import PlanDiff
from autoshard.plans.program_plan import PlannedTensor, ProgramPlan
from autoshard.plans.text import layout_text, lineless, pattern

COPY = "copy of "
"""What the estimate writes before the name of a tensor of which a resharded copy takes memory."""


def diff(a: ProgramPlan, b: ProgramPlan) -> PlanDiff:
    """Compares two plans, of one program or of several, on one cluster or on two.

    Args:
      a, b: The plans, fresh or read from files.

    Returns:
      What differs. `print` shows it; `.json()` is for programs. The difference of a plan with itself is empty.
    """
    changed, layouts = _layouts(a, b)
    communication, compute, memory = _communication(a, b, changed), _compute(a, b), _memory(a, b, changed)
    step_s = sum(c.comm_s for c in (*layouts, *communication)) + sum(c.compute_s for c in compute)
    peak = sum(c.memory_bytes for c in (*layouts, *memory))
    left = lambda total, parts, scale: 0.0 if abs(total - parts) <= 1e-9 * scale else total - parts
    return PlanDiff(
        _side(a),
        _side(b),
        a.equations == b.equations and [_kind(t) for t in a.arguments] == [_kind(t) for t in b.arguments],
        _inside(a, b),
        layouts,
        communication,
        compute,
        memory,
        _orders(a, b),
        left(b.estimate.step_s - a.estimate.step_s, step_s, max(a.estimate.step_s, b.estimate.step_s)),
        left(b.estimate.peak_bytes - a.estimate.peak_bytes, peak, max(a.estimate.peak_bytes, b.estimate.peak_bytes)),
    )


def _side(plan: ProgramPlan) -> Side:
    e = plan.estimate
    return Side(
        plan.name,
        plan.cluster,
        plan.axes,
        e.step_s,
        e.compute_s,
        e.exposed_s,
        e.comm_bytes,
        e.peak_bytes,
        plan.budget_bytes,
        "as written" if plan.choice is None else str(plan.choice),
        plan.logical_mesh.order,
    )


def _kind(tensor: PlannedTensor) -> tuple:
    return tensor.name, tensor.shape, tensor.dtype


def _inside(a: ProgramPlan, b: ProgramPlan) -> int | None:
    """How many equations enforce other layouts; None if that cannot be said."""
    if a.equations != b.equations or a.axes != b.axes:
        return None
    one, two = (
        {
            n: (e.operands, e.results, e.body, e.scatters, e.exchange, e.pieces)
            for n, e in plan.shardings
            if e.has_layouts
        }
        for plan in (a, b)
    )
    return sum(one.get(n) != two.get(n) for n in {*one, *two})


def _orders(a: ProgramPlan, b: ProgramPlan) -> tuple[OrderChange, ...]:
    """What is ordered or kept in one of the plans more often than in the other, the greatest difference first."""
    one, two = (
        collections.Counter((o.kind.value, pattern(o.tensor), o.source) for o in plan.orders) for plan in (a, b)
    )
    found = [OrderChange(*key, one[key], two[key]) for key in {**one, **two} if one[key] != two[key]]
    return tuple(sorted(found, key=lambda c: -abs(c.after - c.before)))


# ---- layouts


def _written(plan: ProgramPlan, other: ProgramPlan) -> Callable[[SpecEntries], str]:
    """How layouts of `plan` are written: with the sizes of the axes, where the two meshes are not the same."""
    if plan.axes == other.axes:
        return layout_text
    sizes = plan.mesh_axes
    return lambda entries: layout_text(tuple(tuple(f"{x}={sizes[x]}" for x in e) for e in entries))


def _placement(plan: ProgramPlan) -> Callable[[Sequence[str]], tuple[tuple[int, int], ...]]:
    """What mesh axes mean for the devices, whatever they are called: sizes and strides in the order of devices.

    Neighbours that count on, such as data=4 and tensor=2 of a mesh of 8, are one: eight parts, one a device.
    """
    places, stride = {}, 1
    for name, size in reversed(plan.axes):
        places[name] = size, stride
        stride *= size

    def placement(axes: Sequence[str]) -> tuple[tuple[int, int], ...]:
        merged: list[tuple[int, int]] = []
        for size, stride in (places[name] for name in axes if name in places):
            if merged and merged[-1][1] == size * stride:
                merged[-1] = merged[-1][0] * size, stride
            elif size > 1:
                merged.append((size, stride))
        return tuple(merged)

    return placement


def _layouts(a: ProgramPlan, b: ProgramPlan) -> tuple[frozenset[str], tuple[LayoutChange, ...]]:
    """The paths of the arguments whose layouts differ, and the differences of arguments and outputs, folded."""
    arguments = list(_changed(a.arguments, b.arguments, a, b))
    told = {(_tail(change[0], 2), *change[1:]) for change in arguments}
    outputs = []
    for path, *change in _changed(a.outputs, b.outputs, a, b):
        # an output that is an argument's successor follows it, which is no news
        if not any((_tail(path, n), *change) in told for n in range(path.count(".") + 1)):
            outputs.append((f"result.{path}" if path else "result", *change))
    alike: dict[tuple, dict[str, list[str]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for path, shape, before, after in (*arguments, *outputs):
        alike[shape, before, after][pattern(path)].append(path)
    shares, folded = _shares(a, b), []
    for (shape, before, after), patterns in alike.items():
        for rows in _grouped(patterns.items(), lambda row: len(row[1])).values():  # layers with layers
            for text, paths in fold_paths(dict(rows)).items():
                sums = [sum(shares[path][k] for path in paths if path in shares) for k in range(3)]
                folded.append(LayoutChange(text, len(paths), shape, before, after, *sums))
    order = lambda c: (-abs(c.comm_s), -abs(c.memory_bytes), c.path)
    return frozenset(path for path, *_ in arguments), tuple(sorted(folded, key=order))


def _tail(path: str, first: int) -> str:
    """A path without its `first` components; all of a path that has no more."""
    return ".".join(path.split(".")[first:]) or path


def _shares(a: ProgramPlan, b: ProgramPlan) -> dict[str, tuple[float, float, float]]:
    """For each tensor that the estimates name: communication time, bytes sent, memory at the peak; B less A."""
    shares: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0.0])
    for plan, sign in ((a, -1), (b, 1)):
        for c in plan.estimate.communication:
            shares[c.value][0] += sign * c.exposed_s
            shares[c.value][1] += sign * c.wire_bytes
        for m in plan.estimate.memory:
            shares[m.name.removeprefix(COPY)][2] += sign * m.size_bytes
    return {name: (x[0], x[1], x[2]) for name, x in shares.items()}


def _changed(before: Iterable[PlannedTensor], after: Iterable[PlannedTensor], a: ProgramPlan, b: ProgramPlan):
    """(path, shape, layout in A, layout in B) of every tensor that has not the same in both."""
    one, two = {t.name: t for t in before}, {t.name: t for t in after}
    write_a, write_b, place_a, place_b = _written(a, b), _written(b, a), _placement(a), _placement(b)
    for path in dict.fromkeys([*one, *two]):
        x, y = one.get(path), two.get(path)
        if x and y and x.shape == y.shape:
            if list(map(place_a, x.entries)) != list(map(place_b, y.entries)):
                yield path, x.shape, write_a(x.entries), write_b(y.entries)
            continue
        if x:
            yield path, x.shape, write_a(x.entries), None
        if y:
            yield path, y.shape, None, write_b(y.entries)


def fold_paths(paths: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Joins paths that differ in one component, as in `{mu,nu}.up.kernel`.

    Args:
      paths: Path or pattern to the tensors that it stands for.

    Returns:
      The joined paths, each with all tensors that it stands for.
    """
    rows = {tuple(path.split(".")): tuple(members) for path, members in paths.items()}
    for i in reversed(range(max(map(len, rows), default=0))):
        joined: dict[tuple[str, ...], tuple[str, ...]] = {}
        for alike in _grouped(rows, lambda parts, i=i: (parts[:i], parts[i:] and parts[i + 1 :], len(parts))).values():
            parts = alike[0]
            if len(alike) > 1:
                parts = (*parts[:i], "{" + ",".join(p[i] for p in alike) + "}", *parts[i + 1 :])
            joined[parts] = tuple(member for p in alike for member in rows[p])
        rows = joined
    return {".".join(parts): members for parts, members in rows.items()}


def _grouped(items: Iterable, key: Callable[[Any], Any]) -> dict[Any, list]:
    groups: dict[Any, list] = collections.defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


# ---- costs of everything else


def _communication(a: ProgramPlan, b: ProgramPlan, changed: Collection[str]) -> tuple[CommunicationChange, ...]:
    """Collectives of all tensors but `changed`, by tensor and line."""
    sides = [
        _grouped(
            (c for c in plan.estimate.communication if c.value not in changed), lambda c: (pattern(c.value), c.source)
        )
        for plan in (a, b)
    ]
    found = []
    for path, line in dict.fromkeys([*sides[0], *sides[1]]):
        before, after = (side.get((path, line), []) for side in sides)
        comm_s = sum(c.exposed_s for c in after) - sum(c.exposed_s for c in before)
        comm_bytes = sum(c.wire_bytes for c in after) - sum(c.wire_bytes for c in before)
        is_other = _counted(before, _placement(a)) != _counted(after, _placement(b))
        if is_other or not _is_nothing(comm_s, before, after, lambda c: c.exposed_s):
            words = _collectives(before), _collectives(after)
            found.append(CommunicationChange(path, line, *words, comm_s, comm_bytes))
    return tuple(sorted(found, key=lambda c: -abs(c.comm_s)))


def _counted(items: Sequence[CommunicationItem], axes: Callable[[Sequence[str]], Any]) -> dict[tuple, float]:
    """How often each kind of collective runs over which axes."""
    counts: dict[tuple, float] = collections.defaultdict(float)
    for c in items:
        counts[c.kind, axes(c.axes)] += c.count
    return counts


def _collectives(items: Sequence[CommunicationItem]) -> str:
    """Such as `48 all-gather data, 2 all-reduce data+tensor`."""
    counts = sorted(_counted(items, "+".join).items())
    return ", ".join(f"{count:g} {kind} {axes}" for (kind, axes), count in counts)


def _compute(a: ProgramPlan, b: ProgramPlan) -> tuple[ComputeChange, ...]:
    sides = [_grouped(plan.estimate.compute, lambda c: (c.name, c.source)) for plan in (a, b)]
    found = []
    for name, line in dict.fromkeys([*sides[0], *sides[1]]):
        before, after = (side.get((name, line), []) for side in sides)
        compute_s = sum(c.compute_s for c in after) - sum(c.compute_s for c in before)
        flops = sum(c.flops for c in after) - sum(c.flops for c in before)
        if not _is_nothing(compute_s, before, after, lambda c: c.compute_s):
            found.append(ComputeChange(name, line, compute_s, flops))
    return tuple(sorted(found, key=lambda c: -abs(c.compute_s)))


def _memory(a: ProgramPlan, b: ProgramPlan, changed: Collection[str]) -> tuple[MemoryChange, ...]:
    others = lambda plan: (m for m in plan.estimate.memory if m.name.removeprefix(COPY) not in changed)
    sides = [_grouped(others(plan), lambda m: (m.memory_class, lineless(m.name))) for plan in (a, b)]
    found = []
    for memory_class, path in dict.fromkeys([*sides[0], *sides[1]]):
        before, after = (side.get((memory_class, path), []) for side in sides)
        memory_bytes = sum(m.size_bytes for m in after) - sum(m.size_bytes for m in before)
        if not _is_nothing(memory_bytes, before, after, lambda m: m.size_bytes):
            found.append(MemoryChange(memory_class, path, memory_bytes))
    return tuple(sorted(found, key=lambda m: -abs(m.memory_bytes)))


def _is_nothing(difference: float, before: Sequence, after: Sequence, weight: Callable[[Any], float]) -> bool:
    """Whether a difference of sums is only rounding."""
    return abs(difference) <= 1e-12 * sum(map(weight, (*before, *after)))
