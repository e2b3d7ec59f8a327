"""Two neighbouring axes of a mesh joined into one: what the smaller problem decides, as a solution of the whole one.

Joined axes cost what the two of them cost where both always go the same way (`cost/reshard.py`, `cost/collectives.py`),
so that whatever a mesh of fewer axes can do, a mesh on which one of them is cut in two can do at the same price. Its
problem is many times smaller: choices grow as a power of the number of axes.
"""

from collections.abc import Iterator, Sequence

from autoshard.cluster import AxisLevel, LogicalMesh, MeshAxis
from autoshard.graph.layout import Layout
from autoshard.planner.allowed import ArgumentDecision, Decision, GroupDecision, ResidualDecision
from autoshard.planner.build import Formulation


def joined_meshes(mesh: LogicalMesh) -> Iterator[tuple[int, LogicalMesh]]:
    """(i, the mesh on which axes i and i + 1 are one), for every i; none if two axes or fewer have several devices."""
    if sum(size > 1 for size in mesh.shape) < 3:
        return
    for i, (major, minor) in enumerate(zip(mesh.axes, mesh.axes[1:], strict=False)):
        if major.size > 1 and minor.size > 1:
            levels = _joined_levels(minor.levels, major.levels)
            axis = MeshAxis(f"{major.name}+{minor.name}", major.size * minor.size, levels)
            yield i, LogicalMesh((*mesh.axes[:i], axis, *mesh.axes[i + 2 :]), mesh.device_type, host=mesh.host)


def _joined_levels(inner: tuple[AxisLevel, ...], outer: tuple[AxisLevel, ...]) -> tuple[AxisLevel, ...]:
    """The levels of an axis that goes on in `outer` where `inner` stops, innermost first."""
    if inner[-1].link != outer[0].link or inner[-1].torus is not None:
        return (*inner, *outer)
    return (*inner[:-1], AxisLevel(inner[-1].size * outer[0].size, inner[-1].link), *outer[1:])


def choices_apart(
    whole: Formulation, joined: Formulation, first: int, choices: Sequence[int]
) -> tuple[int, ...] | None:
    """The choices of `whole` that give every tensor the layout that `choices` of `joined` give it.

    Args:
      whole, joined: The problems of one program on a mesh, and on that whose axis `first` is its axes `first` and
        `first + 1`.

    Returns:
      One choice for each node of `whole.problem`; None where one of them is not allowed there.
    """
    apart = lambda layout: (*layout[: first + 1], *layout[first:])
    known: dict[tuple, dict[tuple[tuple[Layout, ...], bool], int]] = {}
    found = []
    for own, other, choice in zip(whole.decisions, joined.decisions, choices, strict=True):
        if isinstance(own, ResidualDecision) or isinstance(other, ResidualDecision):
            found.append(choice)  # the residuals are those of the program
            continue
        columns = _columns(whole, own)
        key = type(own), tuple(map(id, columns)), own.rows
        if key not in known:
            rows = list(zip(*columns, strict=True)) if columns else [()]
            known[key] = {(rows[row], _is_in_host(own, row)): k for k, row in enumerate(own.rows)}
        row = other.rows[choice]
        wanted = tuple(apart(column[row]) for column in _columns(joined, other))
        place = known[key].get((wanted, _is_in_host(other, row)))
        if place is None:
            return None
        found.append(place)
    return tuple(found)


def _columns(f: Formulation, decision: ArgumentDecision | GroupDecision) -> tuple[tuple[Layout, ...], ...]:
    """The layouts of all tensors of a decision, for each of them by row; no two rows are alike in all, and in where an
    argument lies."""
    if isinstance(decision, ArgumentDecision):
        return (f.argument_layouts[decision.argument],)
    return (*f.tables[decision.group].reads, *f.tables[decision.group].writes)


def _is_in_host(decision: Decision, row: int) -> bool:
    """Whether a decision is about an argument, which lies in the memory of the host in that row."""
    return isinstance(decision, ArgumentDecision) and decision.is_in_host(row)
