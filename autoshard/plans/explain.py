"""A plan as text that answers, in a terminal: what was chosen, why, what it costs, and how good it is proven to be.

On one screen, the most important of it; in full, every table.
"""

import collections
import dataclasses
import math
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console

from autoshard.compiler.schedule import Schedule
from autoshard.planner.obeyed import Obeyed
from autoshard.plans.host_text import host_line, print_in_host
from autoshard.plans.lookups_text import print_lookups
from autoshard.plans.placement_text import placement_line, print_placement
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.text import folded, is_companion, layout_text, pattern
from autoshard.printing import TextConsole, amount, seconds, table

MORE = "More of it: explain(full=True), `autoshard explain PLAN --full`; as a page: `autoshard report PLAN`."
"""The last line of one screen."""

_AS_LONG = 1e-3
"""A step that is longer by no more than this share is told as equally long."""

_MOST_WARNINGS, _MOST_LETTERS = 3, 420


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """How many rows tables have at most."""

    tensors: int
    communication: int
    compute: int
    memory: int
    lookups: int


_SCREEN, _FULL = _Rows(7, 5, 3, 3, 4), _Rows(10**6, 14, 8, 12, 10**6)


def explain(plan: ProgramPlan, full: bool = False) -> str:
    """The explanation: about 40 lines with what matters most, or all there is."""
    console, most = TextConsole(), _FULL if full else _SCREEN
    _summary(console, plan)
    print_asked(console, plan.obeyed)
    _tensors(console, plan, most.tensors)
    _communication(console, plan, most.communication)
    print_lookups(console, plan, most.lookups)
    print_in_host(console, plan, most.communication)
    if full:
        print_placement(console, plan)
    _compute(console, plan, most.compute)
    _memory(console, plan, most.memory)
    if not full:
        if plan.confirmation is not None:
            console.print(f"Compiled ahead of time: {str(plan.confirmation).splitlines()[0]}")
        print_warnings(console, plan.warnings)
        console.print(MORE)
        return console.text
    _orders(console, plan)
    _near_ties(console, plan)
    _meshes(console, plan)
    _choice(console, plan)
    for warning in plan.warnings:
        console.print(f"warning: {warning}")
    if plan.confirmation is not None:
        console.print(f"Compiled ahead of time: {plan.confirmation}")
    return console.text


def print_warnings(console: Console, warnings: Sequence[str]) -> None:
    """The first warnings, in up to four lines each: what to do about it stands last."""
    for warning in warnings[:_MOST_WARNINGS]:
        console.print(f"warning: {textwrap.shorten(warning, _MOST_LETTERS, placeholder=' ...')}")
    if warnings[_MOST_WARNINGS:]:
        console.print(f"and {len(warnings) - _MOST_WARNINGS} more warnings")


def _summary(console: Console, plan: ProgramPlan) -> None:
    e, c = plan.estimate, plan.certificate
    console.print(f"Plan `{plan.name}` for cluster `{plan.cluster}`: {plan.logical_mesh}")
    host_s = e.host_exposed_s
    sum_of = f"{seconds(e.compute_s)} compute + {seconds(e.exposed_s - host_s)} communication"
    if plan.schedule is Schedule.LATENCY_HIDING:
        sum_of = f"{sum_of} exposed, beside {seconds(e.hidden_s)} hidden"
    if host_s:
        sum_of = f"{sum_of}, + {seconds(host_s)} copies to and from the host"
    console.print(f"  step     {seconds(e.step_s)} predicted = {sum_of}")
    console.print(f"  traffic  {amount(e.comm_bytes)} sent per device and step; {amount(e.flops, 'FLOP')} computed")
    limit = f" of {amount(plan.budget_bytes)} allowed" if plan.budget_bytes else ""
    console.print(f"  memory   {amount(e.peak_bytes)} per device at the peak{limit}, at {e.peak_at or 'the start'}")
    if e.reserved_bytes is not None:
        console.print(f"  reserved {amount(e.reserved_bytes)} per device, with gaps between buffers")
    if line := host_line(plan):
        console.print(f"  host     {line}")
    gap = f"{c.gap:.3%}" if math.isfinite(c.gap) else "unknown"
    console.print(
        f"  proof    {c.status.value}: cost {seconds(c.objective)}{in_best_schedule(plan)}, no plan below "
        f"{seconds(max(c.bound, 0.0))} (gap {gap}), found in {c.solve_s:.1f} s"
    )
    console.print(f"  price    {_price(plan)}")
    if line := placement_line(plan):
        console.print(f"  order    {line}")
    if plan.slack is not None:
        console.print(f"  slack    {plan.slack}")
    if plan.on_hosts:
        console.print(f"  hosts    {plan.on_hosts}")
    console.print(f"  figures  {plan.figures}")
    console.print()


def in_best_schedule(plan: ProgramPlan) -> str:
    """What a proof is about, where the compiler's schedule of a plan takes longer than the best there is; else
    nothing."""
    is_longer = plan.estimate.step_s > plan.certificate.objective * (1 + _AS_LONG)
    return " in the best schedule" if plan.schedule is Schedule.LATENCY_HIDING and is_longer else ""


def print_asked(console: Console, obeyed: Sequence[Obeyed]) -> None:
    """What annotations asked for, and the mesh axes that carry it."""
    if not obeyed:
        return
    rows = table(
        "Asked for by annotations; all else is the planner's choice",
        [("annotation", "left"), ("axes", "left"), ("obeyed by", "right"), ("cannot", "right"), ("line", "left")],
    )
    for block in obeyed:
        axes = "+".join(block.axes) or "-"
        rows.add_row(block.asked, axes, f"{block.groups} groups", str(block.free or "-"), block.line)
    console.print(rows)
    console.print()


def _price(plan: ProgramPlan) -> str:
    """What more memory could gain on the plan's mesh, from the prices that prove the bound."""
    price, cost_s = plan.certificate.capacity_price, plan.certificate.objective
    if plan.budget_bytes is None:
        return "memory is not limited"
    if price is None or not cost_s:
        return "it is not known what more memory would gain"
    most_s = min(cost_s - price.bound_with(1e9), cost_s)
    if price.per_unit == 0:
        if most_s < 1e-6 * cost_s:
            return "memory does not bind: more of it would gain nothing"
        return f"no amount of memory would gain more than {seconds(most_s)} a step ({most_s / cost_s:.2%})"
    about = f"about {seconds(price.per_unit * 1e9)} a step to first order"
    return f"one more GB per device would gain {about}, at most {seconds(most_s)} ({most_s / cost_s:.2%})"


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """Arguments that agree in path pattern, shape and layout. `shown` is the path itself where there is one."""

    path: str
    shape: tuple[int, ...]
    layout: str
    count: int
    shown: str


def _rows(plan: ProgramPlan) -> list[_Row]:
    names = collections.defaultdict(list)
    for a in plan.arguments:
        if a.shape:
            names[pattern(a.name), a.shape, layout_text(a.entries)].append(a.name)
    return [_Row(path, shape, layout, len(alike), folded(alike)) for (path, shape, layout), alike in names.items()]


def _largest(leaders: list[tuple[_Row, list[_Row]]], most: int) -> list[tuple[_Row, list[_Row]]]:
    """Up to `most` rows, in their order: the largest of each of the function's arguments, then the largest of all."""
    ranked = sorted(range(len(leaders)), key=lambda n: -leaders[n][0].count * math.prod(leaders[n][0].shape))
    first = {leaders[n][0].path.partition(".")[0]: n for n in reversed(ranked)}
    chosen = [*first.values(), *(n for n in ranked if n not in first.values())][:most]
    return [leaders[n] for n in sorted(chosen)]


def _follows(row: _Row, leader: _Row) -> bool:
    """Whether `row` is a companion of `leader`: an optimizer's moment of a parameter."""
    return row.shape == leader.shape and is_companion(row.path, leader.path)


def _leaders(plan: ProgramPlan) -> list[tuple[_Row, list[_Row]]]:
    """Kinds of arguments; moments stand behind the parameter that they belong to."""
    leaders: list[tuple[_Row, list[_Row]]] = []
    for row in _rows(plan):
        home = next((companions for leader, companions in leaders if _follows(row, leader)), None)
        if home is None:
            leaders.append((row, []))
        else:
            home.append(row)
    return leaders


def tensor_rows(plan: ProgramPlan, most: int) -> list[tuple[str, ...]]:
    """Path, number, shape, layout and layout of the optimizer's state of each kind of argument: of more than `most`,
    those that tell most.
    """
    rows = []
    for row, companions in _largest(_leaders(plan), most):
        layouts = list(dict.fromkeys(c.layout for c in companions))
        state = "" if not layouts else "same" if layouts == [row.layout] else ", ".join(layouts)
        rows.append((row.shown, str(row.count), "x".join(map(str, row.shape)), row.layout, state))
    return rows


def _tensors(console: Console, plan: ProgramPlan, most: int) -> None:
    """One line a kind of argument."""
    kinds = len(_leaders(plan))
    rows = table(
        "What each group of arguments does: the mesh axes that shard each dimension",
        [("path", "left"), ("n", "right"), ("shape", "left"), ("layout", "left"), ("its optimizer state", "left")],
    )
    for row in tensor_rows(plan, most):
        rows.add_row(*row)
    console.print(rows)
    if kinds > most:
        console.print(f"and {kinds - most} more kinds, which are smaller")
    scalars = sum(not a.shape for a in plan.arguments)
    if scalars:
        console.print(f"and {scalars} scalars, replicated")
    console.print()


def _grouped(items: Iterable, key, weight) -> list[tuple]:
    groups: dict = collections.defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return sorted(((k, v) for k, v in groups.items()), key=lambda kv: -sum(map(weight, kv[1])))


def _communication(console: Console, plan: ProgramPlan, most: int) -> None:
    groups = _grouped(
        plan.estimate.collectives,
        lambda c: (c.kind, c.axes, pattern(c.value), c.source),
        lambda c: c.exposed_s + 1e-9 * c.time_s,
    )
    if not groups:
        console.print("Communication: none\n")
        return
    hides = plan.schedule is Schedule.LATENCY_HIDING
    rows = table(
        "Where communication goes",
        [
            *([("exposed", "right")] if hides else []),
            ("time", "right"),
            ("sent", "right"),
            ("times", "right"),
            ("collective", "left"),
            ("axes", "left"),
            ("tensor", "left"),
            ("line", "left"),
        ],
    )
    for (kind, axes, value, source), items in groups[:most]:  # what is hidden ranks behind what is exposed
        rows.add_row(
            *([seconds(sum(c.exposed_s for c in items))] if hides else []),
            seconds(sum(c.time_s for c in items)),
            amount(sum(c.wire_bytes for c in items)),
            f"{sum(c.count for c in items):g}",
            kind,
            "+".join(axes),
            value,
            source,
        )
    console.print(rows)
    _rest(console, groups[most:], lambda c: c.exposed_s)


def _rest(console: Console, groups: Sequence[tuple], weight) -> None:
    if groups:
        console.print(
            f"and {len(groups)} more kinds, {seconds(sum(weight(c) for _, items in groups for c in items))} together"
        )
    console.print()


def _compute(console: Console, plan: ProgramPlan, most: int) -> None:
    groups = _grouped(plan.estimate.compute, lambda c: (c.name, c.source), lambda c: c.compute_s)
    rows = table(
        "Where computation goes",
        [("time", "right"), ("work", "right"), ("groups", "right"), ("operation", "left"), ("line", "left")],
    )
    for (name, source), items in groups[:most]:
        rows.add_row(
            seconds(sum(c.compute_s for c in items)),
            amount(sum(c.flops for c in items), "FLOP"),
            str(len(items)),
            name,
            source,
        )
    console.print(rows)
    _rest(console, groups[most:], lambda c: c.compute_s)


def _memory(console: Console, plan: ProgramPlan, most: int) -> None:
    e = plan.estimate
    classes = _grouped(e.memory, lambda m: m.memory_class, lambda m: m.size_bytes)
    shares = ", ".join(f"{kind} {amount(sum(m.size_bytes for m in items))}" for kind, items in classes)
    console.print(f"What fills the memory at the peak: {shares}")
    groups = _grouped(e.memory, lambda m: (m.memory_class, pattern(m.name), m.shape), lambda m: m.size_bytes)
    rows = table("", [("memory", "right"), ("n", "right"), ("class", "left"), ("shape", "left"), ("tensor", "left")])
    for (kind, _, shape), items in groups[:most]:
        tensor = folded([m.name for m in items])
        rows.add_row(amount(sum(m.size_bytes for m in items)), str(len(items)), kind, "x".join(map(str, shape)), tensor)
    console.print(rows)
    if groups[most:]:
        console.print(
            f"and {len(groups) - most} more kinds, "
            f"{amount(sum(m.size_bytes for _, items in groups[most:] for m in items))} together"
        )
    console.print()


def _orders(console: Console, plan: ProgramPlan) -> None:
    """One line a kind of order, with the largest tensor of each."""
    if not plan.orders:
        return
    rows = table(
        "What the compiler is made to order or keep; of each the largest",
        [("n", "right"), ("order", "left"), ("size", "right"), ("tensor", "left"), ("line", "left")],
    )
    for kind, items in _grouped(plan.orders, lambda o: o.kind, lambda o: o.size_bytes):
        largest = max(items, key=lambda o: o.size_bytes)
        shape = "x".join(map(str, largest.shape))
        tensor = f"{pattern(largest.tensor)} {shape}"
        rows.add_row(str(len(items)), kind.value, amount(largest.size_bytes), tensor, largest.source)
    console.print(rows)
    console.print()


def _near_ties(console: Console, plan: ProgramPlan, most: int = 6) -> None:
    groups: dict = collections.defaultdict(list)
    for c in plan.close_choices:
        groups[pattern(c.name), c.chosen, c.alternative].append(c)
    if not groups or not plan.estimate.step_s:
        return
    rows = table(
        "Closest decisions (the cheapest change of one tensor, all else as planned)",
        [("costs", "right"), ("of step", "right"), ("tensor", "left"), ("planned", "left"), ("instead", "left")],
    )
    for (_, chosen, alternative), items in list(groups.items())[:most]:
        extra, name = items[0].extra_s, folded([c.name for c in items])
        rows.add_row("+" + seconds(extra), f"{extra / plan.estimate.step_s:.2%}", name, chosen, alternative)
    console.print(rows)
    console.print()


def _meshes(console: Console, plan: ProgramPlan) -> None:
    if len(plan.candidates) < 2:
        return
    rows = table(
        "Logical meshes considered", [("mesh", "left"), ("step", "right"), ("bound", "right"), ("verdict", "left")]
    )
    for c in sorted(plan.candidates, key=lambda c: (c.step_s is None, c.step_s or 0.0, c.bound_s)):
        mesh = ", ".join(f"{a}={n}" for a, n in c.axes)
        if c.hardware and len({other.hardware for other in plan.candidates if other.axes == c.axes}) > 1:
            mesh = c.hardware.partition(" as ")[2]
        rows.add_row(
            mesh,
            seconds(c.step_s) if c.step_s is not None else "-",
            seconds(c.bound_s) if math.isfinite(c.bound_s) else "-",
            c.verdict,
        )
    console.print(rows)
    console.print()


def _choice(console: Console, plan: ProgramPlan) -> None:
    """The form of the step, and what else was considered, in the order in which it was."""
    if plan.choice is None or len(plan.choice.candidates) < 2:
        if plan.choice is not None:
            console.print(f"Layers keep for the backward pass: {plan.choice}. {plan.choice.note}\n")
        return
    rows = table(
        "What layers keep for the backward pass, micro-batches and stages: forms considered",
        [("form", "left"), ("step", "right"), ("bound", "right"), ("memory", "right"), ("verdict", "left")],
    )
    for c in plan.choice.candidates:
        rows.add_row(
            c.variant,
            seconds(c.step_s) if c.step_s is not None else "-",
            seconds(c.bound_s) if math.isfinite(c.bound_s) else "-",
            amount(c.needed_bytes) if c.needed_bytes is not None else "-",
            c.verdict,
        )
    console.print(rows)
    console.print(f"Chosen: {plan.choice}. {plan.choice.note}\n")
