"""Naming the dimensions of arguments, and the rules that lay them out as planned, or as near as names allow."""

import collections
import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence

from autoshard.errors import ExportError
from autoshard.execution.placement import partition_spec
from autoshard.plans.logical import Axes, Deviation, LogicalAxes, Names
from autoshard.plans.program_plan import PlannedTensor, ProgramPlan
from autoshard.plans.text import pattern


def logical_axes(
    plan: ProgramPlan,
    names: Mapping[str, Sequence[str | None]] | None = None,
    inherit: bool = False,
    nearest: bool = False,
) -> LogicalAxes:
    """Names every dimension of a plan's arguments, and makes the rules that lay them out as planned.

    Args:
      plan: The plan, fresh or read from a file.
      names: Names that exist already: shell-style path pattern (`*.mlp.up.kernel`) to a name for each dimension, None
        for one that is never split, as are those behind the last name. The names that a Flax model carries itself:
        `autoshard.logical_names`. The first pattern that matches counts. All other dimensions get names of their own.
      inherit: Whether optimizer moments bear the names of their parameter in any case, as those do that Flax makes of
        boxed parameters. Otherwise they do where they are planned alike, and have names of their own where not.
      nearest: Where tensors of one name are planned differently, follow the one with the most elements and list what
        deviates, instead of failing.

    Raises:
      ExportError: Tensors of one name are planned differently; or `names` does not fit a tensor.
    """
    tensors = sorted((a for a in plan.arguments if a.shape), key=lambda a: "params" not in a.name.split("."))
    named = _named(tensors, names or {}, inherit)
    axes = _rules(tensors, named, plan.mesh_axes)
    deviations = _deviations(tensors, named, axes)
    if deviations and not nearest:
        raise ExportError(_conflict(deviations))
    return LogicalAxes(plan.axes, tuple(axes.items()), _folded(tensors, named), deviations)


# ---- names


@dataclasses.dataclass(frozen=True, slots=True)
class _Named:
    """The names of a tensor's dimensions; `follows` if they are those of the parameter whose moment it is."""

    names: Names
    follows: bool


def _named(
    tensors: Sequence[PlannedTensor], given: Mapping[str, Sequence[str | None]], inherit: bool
) -> dict[str, _Named]:
    """The names of each tensor's dimensions, by its path."""
    own = _own_names(tensors)
    found: dict[str, _Named] = {}
    leaders: dict[tuple, PlannedTensor] = {}
    moments: dict[tuple, str] = {}
    for tensor in tensors:
        key = next((k for k in given if fnmatch.fnmatchcase(tensor.name, k)), None)
        leader = _leader(tensor, leaders)
        if leader is None:
            leaders[tensor.shape, ".".join(tensor.name.split(".")[2:])] = tensor
        if key is not None:
            names = _checked(tensor, key, given[key])
        elif leader is None:
            names = own[tensor.name]
        elif inherit or leader.entries == tensor.entries:
            names = found[leader.name].names
        else:  # moments of one parameter share theirs
            names = own[moments.setdefault((leader.name, tensor.entries), tensor.name)]
        found[tensor.name] = _Named(names, leader is not None and names == found[leader.name].names)
    return found


def _leader(tensor: PlannedTensor, leaders: Mapping[tuple, PlannedTensor]) -> PlannedTensor | None:
    """The parameter that `tensor` is a moment of: of one shape, in another branch of the state, with the same rest of
    the path.
    """
    parts = tensor.name.split(".")
    for k in range(1, len(parts)):
        leader = leaders.get((tensor.shape, ".".join(parts[k:])))
        if leader is not None and leader.name.split(".")[:2] != parts[:2]:
            return leader
    return None


def _checked(tensor: PlannedTensor, key: str, names: Sequence[str | None]) -> Names:
    told = [name for name in names if name is not None]
    if len(names) > len(tensor.shape) or len(set(told)) != len(told):
        raise ExportError(
            f"Each dimension has at most one name, no two the same, but `{key}` gives {list(names)} and "
            f"`{tensor.name}` has shape {list(tensor.shape)}. Correct the names."
        )
    return (*names, *[None] * (len(tensor.shape) - len(names)))


def _own_names(tensors: Sequence[PlannedTensor]) -> dict[str, Names]:
    """Invented names: the path without its root and numbers, and the dimension; layers share them where they can."""
    kinds: dict[str, dict[tuple, list[PlannedTensor]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for tensor in tensors:
        kinds[pattern(tensor.name)][len(tensor.shape), tensor.entries].append(tensor)
    names, taken = {}, set()
    for path, layouts in kinds.items():
        parts = [p.replace("*", "").strip("_") for p in path.split(".")]
        # what is below `params` says enough; of other branches, all that is below the argument
        parts = parts[2:] if parts[1:2] == ["params"] else parts[1:] or parts
        for members in layouts.values():
            base = free = ".".join(p for p in parts if p) or "argument"
            while free in taken:
                free = f"{base}~{int(free.rpartition('~')[2]) + 1 if '~' in free[len(base) :] else 2}"
            taken.add(free)
            for tensor in members:
                names[tensor.name] = tuple(f"{free}.{d}" for d in range(len(tensor.shape)))
    return names


def _folded(tensors: Sequence[PlannedTensor], named: Mapping[str, _Named]) -> tuple[tuple[str, Names], ...]:
    """The names by path pattern where all tensors of the pattern agree, else by path."""
    kinds: dict[str, dict[str, Names]] = collections.defaultdict(dict)
    for tensor in tensors:
        kinds[pattern(tensor.name)][tensor.name] = named[tensor.name].names
    rows: list[tuple[str, Names]] = []
    for path, members in kinds.items():
        agreed = set(members.values())
        rows += [(path, next(iter(agreed)))] if len(agreed) == 1 else list(members.items())
    return tuple(rows)


# ---- rules


def _rules(tensors: Sequence[PlannedTensor], named: Mapping[str, _Named], mesh: Mapping[str, int]) -> dict[str, Axes]:
    """For each name, the axes that the most elements ask for; fewer where a tensor could not be laid out so.

    Moments that bear their parameter's names have no say: where the parameter is decides how the step runs.
    """
    votes: dict[str, collections.Counter[Axes]] = collections.defaultdict(collections.Counter)
    for tensor in tensors:
        for name, axes in zip(named[tensor.name].names, tensor.entries, strict=True):
            if name is not None and not named[tensor.name].follows:
                votes[name][axes] += math.prod(tensor.shape)
    rules = {name: max(counter, key=lambda axes: (counter[axes], axes)) for name, counter in votes.items()}  # noqa: B023
    weight = {name: counter[rules[name]] for name, counter in votes.items()}
    is_legal = False
    while not is_legal:  # each round takes the axes of one name away
        is_legal = True
        for tensor in tensors:
            dims = [(name, extent) for name, extent in zip(named[tensor.name].names, tensor.shape, strict=True) if name]
            used: set[str] = set()
            for name, extent in sorted(dims, key=lambda dim: -weight[dim[0]]):
                axes = rules[name]
                if used & set(axes) or extent % math.prod(mesh[a] for a in axes):
                    rules[name], is_legal = (), False
                used |= set(rules[name])
    return rules


def _deviations(
    tensors: Sequence[PlannedTensor], named: Mapping[str, _Named], rules: Mapping[str, Axes]
) -> tuple[Deviation, ...]:
    """The tensors that the rules lay out otherwise than planned, layers folded."""
    counts: collections.Counter[tuple] = collections.Counter()
    for tensor in tensors:
        names = named[tensor.name].names
        ruled = tuple(() if name is None else rules[name] for name in names)
        if ruled != tensor.entries:
            counts[pattern(tensor.name), names, tensor.entries, ruled] += 1
    return tuple(Deviation(path, n, names, planned, ruled) for (path, names, planned, ruled), n in counts.items())


def _conflict(deviations: Sequence[Deviation], most: int = 8) -> str:
    lines = [f"  {deviation}" for deviation in deviations[:most]]
    if deviations[most:]:
        lines.append(f"  and {len(deviations) - most} more")
    pins = ", ".join(f"'{d.path}': {partition_spec(d.ruled)}" for d in deviations[:3])
    return "\n".join(
        (
            "Tensors of one logical name have one layout, but the plan lays out some of the same name differently:",
            *lines,
            "Give their dimensions names of their own (names=, or --names FILE), or accept the rules that come nearest "
            "(nearest=True, --nearest), or plan again with the arguments pinned to what those rules say, so that the "
            f"plan keeps to the names: pins=logical_axes(plan, names, nearest=True).pins, such as {{{pins}}}.",
        )
    )
