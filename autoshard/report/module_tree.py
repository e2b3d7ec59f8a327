"""The arguments of a program as a tree of modules, layers that are alike folded into one."""

import dataclasses
import itertools
import math
import re

import jax.numpy as jnp

from autoshard.graph.layout import spec_shard_bytes
from autoshard.plans.program_plan import PlannedTensor, ProgramPlan
from autoshard.plans.text import layout_text, pattern

_NUMBERED = re.compile(r"(.*?)(\d+)\Z")


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """What tensors take: bytes whole and on a device; of a step, time of kernels and collectives, and bytes sent.

    Of alike layers, those of all.
    """

    whole_bytes: float = 0.0
    device_bytes: float = 0.0
    compute_s: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    sent_bytes: float = 0.0

    def __add__(self, other: "Costs") -> "Costs":
        return Costs(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """A module or a tensor.

    Attributes:
      name: The last part of its path; `0-23` for alike layers, of which there are `count`.
      path: Its path with numbers as `*`, as other tables write it.
      shape, layout, source: Of a tensor, as text; empty for modules. `source`: the line that reads it first.
      costs: Of all tensors in it. children: What is in it.
    """

    name: str
    path: str
    count: int
    shape: str
    layout: str
    source: str
    costs: Costs
    children: tuple["Module", ...]


def itemsize_bytes(dtype: str) -> int:
    """Bytes of an element; 0 for what has none of its own, such as random keys."""
    try:
        return jnp.dtype(dtype).itemsize
    except TypeError:
        return 0


def whole_bytes(tensor: PlannedTensor) -> float:
    """Bytes of a whole tensor."""
    return float(math.prod(tensor.shape) * itemsize_bytes(tensor.dtype))


def module_tree(plan: ProgramPlan) -> tuple[Module, ...]:
    """The tree of a program's arguments, with what a step spends on each."""
    costs = _costs(plan)
    sources = plan.profile.sources if plan.profile is not None else ("",) * len(plan.arguments)
    leaves = [
        (tuple(a.name.split(".")), a, cost, source)
        for a, cost, source in zip(plan.arguments, costs, sources, strict=True)
    ]
    return _children(leaves, "")


def _costs(plan: ProgramPlan) -> list[Costs]:
    sums = [Costs(whole_bytes(a), spec_shard_bytes(whole_bytes(a), a.entries, plan.mesh_axes)) for a in plan.arguments]
    if plan.profile is None:
        return sums
    for item, argument in zip(plan.estimate.compute, plan.profile.work_for, strict=True):
        if argument >= 0:
            sums[argument] += Costs(compute_s=item.compute_s)
    for item, argument in zip(plan.estimate.communication, plan.profile.parameter_of, strict=True):
        if argument >= 0:
            sums[argument] += Costs(exposed_s=item.exposed_s, hidden_s=item.hidden_s, sent_bytes=item.wire_bytes)
    return sums


_Leaf = tuple[tuple[str, ...], PlannedTensor, Costs, str]


def _children(leaves: list[_Leaf], above: str) -> tuple[Module, ...]:
    """The modules and tensors of one level, in their order; `above` is the path so far."""
    groups: dict[str, list[_Leaf]] = {}
    for names, tensor, cost, source in leaves:
        groups.setdefault(names[0], []).append((names[1:], tensor, cost, source))
    made = []
    for name, inner in groups.items():
        path = f"{above}.{name}" if above else name
        (_, tensor, cost, source), *_ = inner
        if len(inner) == 1 and not inner[0][0]:
            shape = f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {tensor.dtype}"
            layout = layout_text(tensor.entries) if tensor.shape else ""
            made.append(Module(name, pattern(path), 1, shape, layout, source, cost, ()))
            continue
        children = _children([leaf for leaf in inner if leaf[0]], path)
        total = sum((c.costs for c in children), Costs())
        made.append(Module(name, pattern(path), 1, "", "", "", total, children))
    return _folded(made)


def _folded(modules: list[Module]) -> tuple[Module, ...]:
    """Numbered ones that are alike but for their costs, as one."""
    alike: dict[object, list[Module]] = {}
    for n, module in enumerate(modules):
        numbered = _NUMBERED.match(module.name)
        key = (numbered[1], _form(module)) if numbered else n
        alike.setdefault(key, []).append(module)
    return tuple(_one(group) for group in alike.values())


def _form(module: Module) -> tuple:
    """What must be equal for modules to be alike."""
    inner = tuple((c.name, c.count, _form(c)) for c in module.children)
    return module.shape, module.layout, module.source, inner


def _one(group: list[Module]) -> Module:
    first = group[0]
    if len(group) == 1:
        return first
    stem = _NUMBERED.match(first.name)
    assert stem is not None
    numbers = [int(m.name[len(stem[1]) :]) for m in group]
    columns = zip(*(m.children for m in group), strict=True)
    children = tuple(dataclasses.replace(_one_below(column), count=sum(c.count for c in column)) for column in columns)
    total = sum((m.costs for m in group), Costs())
    count = sum(m.count for m in group)
    return dataclasses.replace(first, name=stem[1] + _ranges(numbers), count=count, costs=total, children=children)


def _one_below(column: tuple[Module, ...]) -> Module:
    """Modules of the same name in alike layers."""
    children = tuple(
        dataclasses.replace(_one_below(inner), count=sum(c.count for c in inner))
        for inner in zip(*(m.children for m in column), strict=True)
    )
    return dataclasses.replace(column[0], costs=sum((m.costs for m in column), Costs()), children=children)


def _ranges(numbers: list[int]) -> str:
    """`0-23`, or `0-3, 8` where some are missing."""
    runs = []
    for _, run in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        ends = [number for _, number in run]
        runs.append(str(ends[0]) if len(ends) == 1 else f"{ends[0]}-{ends[-1]}")
    return ", ".join(runs) if len(runs) <= 3 else f"{numbers[0]} .. {numbers[-1]}"
