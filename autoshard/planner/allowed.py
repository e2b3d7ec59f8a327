"""The choices that each decision may take: all legal ones, less what pins, annotations and restrictions forbid."""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence

from autoshard.cluster import LogicalMesh
from autoshard.cost.in_pieces import InPieces
from autoshard.cost.lookups import Lookups
from autoshard.errors import AnnotationError, LayoutError
from autoshard.graph.graph import FixedLayout, Operation
from autoshard.graph.groups import Group, map_dims
from autoshard.graph.layout import Layout
from autoshard.planner.asked import Asked, Demands, obeying
from autoshard.planner.choices import Choice, ChoiceTable, satisfies
from autoshard.planner.mesh_prices import MeshPrices
from autoshard.planner.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class Restrictions:
    """What a plan may not do, beyond what is legal. Baselines are plans under restrictions.

    Attributes:
      argument: (argument index, layout) -> allowed; None where all are.
      group: (group index, choice) -> allowed; None where all are.
      asked: What annotated blocks ask for; None for nothing.
    """

    argument: Callable[[int, Layout], bool] | None = None
    group: Callable[[int, Choice], bool] | None = None
    asked: Asked | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentDecision:
    """The node that decides the layout of an argument, and where it lies.

    Attributes:
      argument: Index into `graph.arguments`.
      rows: The choices that are allowed, as indices into the argument's layouts.
      first_in_host: The layouts from this one on are those of the argument in the memory of the host; None where it
        stays on the devices.
    """

    argument: int
    rows: tuple[int, ...]
    first_in_host: int | None = None

    def is_in_host(self, row: int) -> bool:
        """Whether the argument lies in the memory of the host under one of `rows`."""
        return self.first_in_host is not None and row >= self.first_in_host


@dataclasses.dataclass(frozen=True, slots=True)
class GroupDecision:
    """The node that decides how a group is split.

    Attributes:
      group: Index into the groups.
      rows: The choices that are allowed, as indices into the group's table.
    """

    group: int
    rows: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ResidualDecision:
    """The node that decides whether a residual stays on the devices (0) or lies in the memory of the host (1).

    Attributes:
      residual: Its number.
      rows: The choices.
    """

    residual: int
    rows: tuple[int, ...] = (0, 1)


Decision = ArgumentDecision | GroupDecision | ResidualDecision
"""One node of the problem."""


def argument_choices(
    program: Program,
    prices: MeshPrices,
    pins: Sequence[FixedLayout | None],
    restrictions: Restrictions,
    may_be_in_host: Collection[int] = (),
) -> tuple[list[tuple[Layout, ...]], list[ArgumentDecision]]:
    """The layouts of every argument, and which of them it may have.

    Arguments in `may_be_in_host` have each of them once more, in the memory of the host.

    Raises:
      LayoutError: If none is left for an argument.
    """
    mesh = prices.mesh
    names = mesh.axis_names
    all_rows: dict[int, tuple[int, ...]] = {}
    layouts, decisions = [], []
    for i, argument in enumerate(program.graph.arguments):
        value = program.graph.values[argument.value]
        shape = () if value.dtype.startswith("key") else value.shape
        own = prices.layouts(shape)
        rows = all_rows.setdefault(len(own), tuple(range(len(own))))
        if restrictions.argument is not None:
            rows = tuple(k for k in rows if restrictions.argument(i, own[k]))
        for fixed in (as_held(argument.fixed, value.shape, mesh), pins[i]):
            if fixed is not None:
                rows = tuple(k for k in rows if satisfies(own[k], fixed[: len(shape)], names))
                if not rows:
                    raise LayoutError(
                        f"No legal layout of `{argument.name}` with shape {value.shape} on mesh {mesh} satisfies "
                        f"the demanded sharding {fixed}: {_why_unfit([fixed], mesh)}. Change the pin or annotation, "
                        "or the mesh."
                    )
        if not rows:
            raise LayoutError(f"The restrictions leave no layout for `{argument.name}` with shape {value.shape}.")
        if i in may_be_in_host:
            layouts.append(prices.layouts(shape, times=2))
            decisions.append(ArgumentDecision(i, (*rows, *(len(own) + k for k in rows)), len(own)))
        else:
            layouts.append(own)
            decisions.append(ArgumentDecision(i, rows))
    return layouts, decisions


def as_held(fixed: FixedLayout | None, shape: Sequence[int], mesh: LogicalMesh) -> FixedLayout | None:
    """An annotation of an argument, but whole where its axes do not divide the dimension, as Flax makes it, too."""
    if fixed is None:
        return None
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    parts = lambda entry: math.prod(sizes.get(axis, 1) for axis in entry)
    return tuple(() if entry and length % parts(entry) else entry for entry, length in zip(fixed, shape, strict=False))


def group_choices(
    program: Program,
    prices: MeshPrices,
    restrictions: Restrictions,
    lookups: Lookups = Lookups(),  # noqa: B008 - frozen
    in_pieces: InPieces = InPieces(),  # noqa: B008 - frozen
) -> tuple[list[ChoiceTable], list[GroupDecision]]:
    """The choice table of every group, one object for groups of equal shape, and which rows of it are allowed.

    Args:
      program, prices, restrictions, lookups: As for `formulate`. in_pieces: As for `choice_table`.

    Raises:
      LayoutError: If none is left for a group.
    """
    mesh = prices.mesh
    cache: dict[int, tuple[ChoiceTable, tuple[int, ...]]] = {}
    tables, decisions = [], []
    for group, shape in zip(program.groups, program.shapes, strict=True):
        if id(shape) not in cache:
            table = prices.table(shape, lookups, in_pieces)
            cache[id(shape)] = table, tuple(range(len(table.choices)))
        table, rows = cache[id(shape)]
        if restrictions.group is not None:
            allowed = restrictions.group
            rows = tuple(k for k in rows if allowed(group.index, table.choices[k]))
        demands: Demands = ()
        if restrictions.asked is not None and (demands := restrictions.asked.of_groups[group.index]):
            assignments = [choice.assignment for choice in table.choices]
            rows = obeying(demands, assignments, rows, mesh.shape, must=group.index in restrictions.asked.binding)
        operation = program.graph.operations[group.operations[0]]
        if operation.fixed_operands is not None or operation.fixed_results is not None:
            rows = _as_demanded(group, operation, table, rows, mesh)
        if not rows:
            demanded = [*(operation.fixed_operands or ()), *(operation.fixed_results or ())]
            of_pmap = ", or, where it is made by jax.pmap, pass the function inside and the whole batch"
            if demands:
                asking = " and ".join(d.block.at_line for d in demands)
                raise AnnotationError(
                    f"Annotations contradict a sharding that the program demands itself: {asking} ask for something "
                    f"else than `{operation.name}` at {operation.source or 'an unknown line'} on mesh {mesh}. Drop one "
                    "of them."
                )
            raise LayoutError(
                f"No legal choice is left for `{operation.name}` at {operation.source or 'an unknown line'} on "
                f"mesh {mesh}, which demands shardings of its own: {_why_unfit(demanded, mesh)}. Pass mesh= with the "
                f"axes that it names, drop it{of_pmap if operation.name == 'shard_map' else ''}."
            )
        tables.append(table)
        decisions.append(GroupDecision(group.index, rows))
    return tables, decisions


def _why_unfit(demanded: Sequence[FixedLayout | None], mesh: LogicalMesh) -> str:
    """What is wrong with shardings that pins, annotations or regions demand."""
    named = dict.fromkeys(axis for fixed in demanded if fixed for entry in fixed if entry for axis in entry)
    lacking = [f"`{axis}`" for axis in named if axis not in mesh.axis_names]
    if lacking:
        return f"the mesh lacks {'axis' if len(lacking) == 1 else 'axes'} {', '.join(lacking)}"
    return "the mesh axes on a dimension must divide it, and each axis may appear once"


def _as_demanded(
    group: Group, operation: Operation, table: ChoiceTable, rows: tuple[int, ...], mesh: LogicalMesh
) -> tuple[int, ...]:
    """Those of `rows` that give the group's first operation the layouts that the program itself demands."""
    for fixed, values, dims, accesses, layouts in (
        (operation.fixed_operands, operation.operands, operation.rule.operands, group.reads, table.reads),
        (operation.fixed_results, operation.results, operation.rule.results, group.writes, table.writes),
    ):
        for want, value, own in zip(fixed or (), values, dims, strict=False):
            mapped = map_dims(own, group.factor_maps[0])
            position = next((n for n, a in enumerate(accesses) if (a.value, a.dims) == (value, mapped)), None)
            if want is not None and position is not None:
                rows = tuple(k for k in rows if satisfies(layouts[position][k], want, mesh.axis_names))
    return rows
