"""What decisions are and what their choices mean, in words that outlast one problem: see `ProblemKeys`.

Arguments go by their path; groups by the operation and line that they begin with, and by their place among the groups
that begin so. Choices of arguments mean layouts; those of groups, assignments of mesh axes to factors. None of it
changes with the batch size or the budget, and little with the number of layers.
"""

import collections

from autoshard.planner.allowed import ArgumentDecision, ResidualDecision
from autoshard.planner.build import Formulation
from autoshard.planner.choices import Choice
from autoshard.solver.io.problem_keys import ProblemKeys

_PLACES = ("on the devices", "in host memory")


def labels_of(f: Formulation) -> ProblemKeys:
    """The keys of a formulation's nodes."""
    graph, dimensions = f.program.graph, f"{len(f.mesh.axes)} axes"
    seen: collections.Counter[str] = collections.Counter()
    shared: dict[tuple, tuple[str, ...]] = {}
    keys, meanings = [], []
    for decision in f.decisions:
        if isinstance(decision, ArgumentDecision):
            key, choices = graph.arguments[decision.argument].name, f.argument_layouts[decision.argument]
            half = decision.first_in_host or len(choices)
            text = lambda row, c=choices, half=half: f"{c[row]}{' in host memory' if row >= half else ''}"
        elif isinstance(decision, ResidualDecision):
            value = f.all_residuals[decision.residual].value
            kind = f"residual: {f.program.analysis.chains.made_by(value).label}"
            key, choices = f"{kind} #{seen[kind]}", _PLACES
            seen[kind] += 1
            text = lambda row: _PLACES[row]
        else:
            operation = graph.operations[f.program.groups[decision.group].operations[0]]
            kind = f"{operation.name} at {operation.source}"
            key, choices = f"{kind} #{seen[kind]}", f.tables[decision.group].choices
            seen[kind] += 1
            text = lambda row, c=choices: _text(c[row])
        keys.append(f"{dimensions}: {key}")
        place = id(choices), decision.rows
        if place not in shared:
            shared[place] = tuple(text(row) for row in decision.rows)
        meanings.append(shared[place])
    return ProblemKeys(tuple(keys), tuple(meanings))


def _text(choice: Choice) -> str:
    pieces = () if choice.pieces is None else (choice.pieces,)
    return " ".join(map(str, (choice.assignment, choice.scatter, *choice.exchanged, *pieces)))
