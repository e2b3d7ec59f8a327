"""The data of one program for the page's script: memory and work over time, the tree of modules, the collectives.

Times are whole numbers of ticks, tensors of alike layers fall together, and texts are told once: a program of 96
layers takes about a megabyte.
"""

import collections
import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import pydantic

from autoshard.planner.profile import Run
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.text import layout_text, pattern
from autoshard.report.colours import COLLECTIVES, MEMORY, OTHER, OTHER_KERNELS
from autoshard.report.colours import PRODUCTS as PRODUCTS_COLOUR
from autoshard.report.module_tree import Module, module_tree
from autoshard.report.units import byte_unit, time_unit
from autoshard.trace.rules.products import PRODUCTS

_TICKS = 10_000_000


class TensorRow(NamedTuple):
    """Tensors that agree in the pattern of their name, class, shape and line; class and line by position."""

    name: str
    memory_class: int
    shape: str
    source: int


class HeldRow(NamedTuple):
    """`count` tensors in memory during `start <= instant < stop`, together `size_bytes` on a device."""

    tensor: int
    start: int
    stop: int
    size_bytes: int
    count: int


class KernelKind(NamedTuple):
    """Kernels of one operation and line that read, or make a new version of, the same kind of argument."""

    name: str
    source: int
    argument: str
    is_product: bool


class RunRow(NamedTuple):
    """A kernel or collective at work, by its kind; from tick to tick."""

    kind: int
    start: int
    stop: int


class CollectiveKind(NamedTuple):
    """Collectives alike: what they are, what causes them, and what all of them take in a step."""

    name: str
    axes: str
    tensor: str
    shape: str
    made_by: str
    before: str
    after: str
    argument: str
    source: int
    count: float
    time_s: float
    exposed_s: float
    hidden_s: float
    sent_bytes: float
    colour: str
    layers: int


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramView:
    """A program over one step.

    Attributes:
      step_s: Length of the step. tick_s: Of a tick. budget_bytes: The memory limit; None for none.
      time_unit, byte_unit: Of axes, with their sizes.
      classes, colours: Of memory. product_colour, kernel_colour: Of work.
      sources: Lines of code, to which others refer by position.
      instants: In ticks. tensors, held: What is in memory when.
      kernels, kernel_runs: What is computed when. collectives, waited_runs, hidden_runs: What is sent when.
      modules: The tree of arguments. has_profile: Whether the plan tells times and memory.
    """

    step_s: float
    tick_s: float
    budget_bytes: float | None
    time_unit: tuple[str, float]
    byte_unit: tuple[str, float]
    classes: tuple[str, ...]
    colours: tuple[str, ...]
    product_colour: str
    kernel_colour: str
    sources: tuple[str, ...]
    instants: tuple[int, ...]
    tensors: tuple[TensorRow, ...]
    held: tuple[HeldRow, ...]
    kernels: tuple[KernelKind, ...]
    kernel_runs: tuple[RunRow, ...]
    collectives: tuple[CollectiveKind, ...]
    waited_runs: tuple[RunRow, ...]
    hidden_runs: tuple[RunRow, ...]
    modules: tuple[Module, ...]
    has_profile: bool

    def json(self) -> str:
        """As the page's script reads it."""
        return pydantic.TypeAdapter(ProgramView).dump_json(self).decode()


class _Texts:
    """Texts by position."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {"": 0}

    def position(self, text: str) -> int:
        return self.known.setdefault(text, len(self.known))


def program_view(plan: ProgramPlan) -> ProgramView:
    """What the page shows of a program."""
    e, profile, sources = plan.estimate, plan.profile, _Texts()
    tick_s = (e.step_s or 1.0) / _TICKS
    tick = lambda time_s: round(time_s / tick_s)
    kernels, kernel_of = _kernel_kinds(plan, sources)
    collectives, collective_of = _collective_kinds(plan, sources)
    classes = list(MEMORY)
    tensors, held = _held(plan, sources, classes)
    runs = lambda listed, kinds: _runs(listed, kinds, tick_s)
    unit, bytes_unit = time_unit(e.step_s), byte_unit(e.peak_bytes)
    return ProgramView(
        step_s=e.step_s,
        tick_s=tick_s,
        budget_bytes=plan.budget_bytes,
        time_unit=(unit.name, unit.size),
        byte_unit=(bytes_unit.name, bytes_unit.size),
        classes=tuple(classes),
        colours=tuple(MEMORY.get(c, OTHER) for c in classes),
        product_colour=PRODUCTS_COLOUR,
        kernel_colour=OTHER_KERNELS,
        sources=tuple(sources.known),
        instants=() if profile is None else tuple(map(tick, profile.instants_s)),
        tensors=tensors,
        held=held,
        kernels=kernels,
        kernel_runs=() if profile is None else runs(profile.kernels, kernel_of),
        collectives=collectives,
        waited_runs=() if profile is None else runs(profile.waited, collective_of),
        hidden_runs=() if profile is None else runs(profile.hidden, collective_of),
        modules=module_tree(plan),
        has_profile=profile is not None,
    )


def _runs(runs: Iterable[Run], kinds: list[int], tick_s: float) -> tuple[RunRow, ...]:
    """Those that follow each other and are of one kind, as one."""
    found: list[RunRow] = []
    for item, start_s, stop_s in runs:
        row = RunRow(kinds[item], round(start_s / tick_s), round(stop_s / tick_s))
        if found and found[-1].kind == row.kind and found[-1].stop == row.start:
            row = found.pop()._replace(stop=row.stop)
        found.append(row)
    return tuple(found)


def _kernel_kinds(plan: ProgramPlan, sources: _Texts) -> tuple[tuple[KernelKind, ...], list[int]]:
    kinds: dict[KernelKind, int] = {}
    work_for = plan.profile.work_for if plan.profile is not None else (-1,) * len(plan.estimate.compute)
    place = []
    for item, argument in zip(plan.estimate.compute, work_for, strict=True):
        path = "" if argument < 0 else pattern(plan.arguments[argument].name)
        kind = KernelKind(item.name, sources.position(item.source), path, item.name in PRODUCTS)
        place.append(kinds.setdefault(kind, len(kinds)))
    return tuple(kinds), place


def _collective_kinds(plan: ProgramPlan, sources: _Texts) -> tuple[tuple[CollectiveKind, ...], list[int]]:
    """The kinds, those that are waited for longest first; and of each collective its kind."""
    items, profile = plan.estimate.communication, plan.profile
    keys = []
    for n, c in enumerate(items):
        cause = profile.causes[profile.cause_of[n]] if profile is not None else None
        argument = profile.parameter_of[n] if profile is not None else -1
        made_by = before = after = ""
        if cause is not None:
            is_line = " at " in cause.made_by
            made_by, after = cause.made_by if is_line else pattern(cause.made_by), layout_text(cause.after)
            before = "partial sums" if cause.before is None else layout_text(cause.before)
            if cause.before == cause.after:
                before = after = "split by hand"
        path = "" if argument < 0 else pattern(plan.arguments[argument].name)
        shape = "x".join(map(str, c.shape))
        keys.append((c.kind, "+".join(c.axes), pattern(c.value), shape, made_by, before, after, path, c.source))
    groups: dict[tuple[str, ...], list[int]] = collections.defaultdict(list)
    for n, key in enumerate(keys):
        groups[key].append(n)
    total = lambda numbers, field: sum(getattr(items[n], field) for n in numbers)
    ordered = sorted(groups.items(), key=lambda g: (-total(g[1], "exposed_s"), -total(g[1], "time_s")))
    place, kinds = [0] * len(items), []
    for position, (key, numbers) in enumerate(ordered):
        for n in numbers:
            place[n] = position
        kinds.append(
            CollectiveKind(
                *key[:-1],
                source=sources.position(key[-1]),
                count=total(numbers, "count"),
                time_s=total(numbers, "time_s"),
                exposed_s=total(numbers, "exposed_s"),
                hidden_s=total(numbers, "hidden_s"),
                sent_bytes=total(numbers, "wire_bytes"),
                colour=COLLECTIVES.get(key[0], OTHER),
                layers=len(numbers),
            )
        )
    return tuple(kinds), place


def _held(plan: ProgramPlan, sources: _Texts, classes: list[str]) -> tuple[tuple[TensorRow, ...], tuple[HeldRow, ...]]:
    """What is in memory; `classes` grows by those that have no colour of their own."""
    if plan.profile is None:
        return (), ()
    rows: dict[TensorRow, int] = {}
    place = []
    for tensor in plan.profile.tensors:
        if tensor.memory_class not in classes:
            classes.append(tensor.memory_class)
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        name = _name_without_line(tensor.name, tensor.source)
        row = TensorRow(pattern(name), classes.index(tensor.memory_class), shape, sources.position(tensor.source))
        place.append(rows.setdefault(row, len(rows)))
    sums: dict[tuple[int, int, int], list[int]] = collections.defaultdict(lambda: [0, 0])
    for tensor, start, stop, size_bytes in plan.profile.held:
        one = sums[place[tensor], start, stop]
        one[0] += size_bytes
        one[1] += 1
    return tuple(rows), tuple(HeldRow(*key, *one) for key, one in sums.items())


def _name_without_line(name: str, source: str) -> str:
    """`dot_general at f.py:3 (f)` with its line told apart is `dot_general`."""
    return name.removesuffix(f" at {source}") if source else name
