"""State in host memory: what of it may lie there, and in which order it is updated.

Optimizer moments are read by the update alone. One that lies in the memory of the host is copied to the device for its
update, and the new one back. Left alone, XLA:GPU begins with all these copies when the step begins: what lies on the
host would be on the device all the time. So updates come in turn, in the order of the program: a copy waits until the
update before it is made, and the first one for the last gradient, or the norm of all. At most the new state of one
update, on its way out, and the state of the next one are on the device together.

The order does not depend on the mesh, nor on what lies where: updates whose state stays on the device take their turns
as well, since what is copied waits for them.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.compiler.def_use import DefUse
from autoshard.graph.computations import first_operation, last_operation
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.graph import Operation
from autoshard.graph.groups import Group
from autoshard.graph.pointwise import pointwise_operations

LEAST_BYTES = 2**20
"""State of less stays on the device: copying it takes latency, and keeping it next to nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class StateRead:
    """The first read of a state argument: its index, and the equation and operand slot."""

    argument: int
    equation: int
    slot: int


@dataclasses.dataclass(frozen=True, slots=True)
class StateUpdate:
    """The update of state that nothing else reads.

    Attributes:
      reads: What it reads of it, argument by argument.
      equations: All that it makes of that, rising; they are evaluated where the last of them is.
      after: The equation whose results are there before it begins: the last one of the update before; of the first
        update, the last one that makes a gradient.
      start, stop: The operations during which what it reads, or makes of that, is on the device where it lies on the
        host.
    """

    reads: tuple[StateRead, ...]
    equations: tuple[int, ...]
    after: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """An update before its turn is known: what it reads, its operations, and one past the last that needs the new."""

    reads: tuple[StateRead, ...]
    operations: tuple[Operation, ...]
    until: int

    @property
    def last(self) -> Operation:
        return self.operations[-1]


def state_updates(analysis: ProgramAnalysis) -> tuple[StateUpdate, ...]:
    """The updates whose state may lie on the host, in the order in which they are made.

    These are donated arguments of `LEAST_BYTES` or more that have a successor, and that one group of pointwise
    operations alone reads and makes the successor of, outside of all nested computations.
    """
    graph, chains = analysis.graph, analysis.chains
    entry = {i.operation.index for i in analysis.entry if i.operation is not None}
    pointwise = pointwise_operations(graph)
    group_of = {o: group for group in analysis.groups for o in group.operations}
    successor = {o.successor_of: o.value for o in graph.outputs if o.successor_of is not None and o.value is not None}
    arguments: dict[int, list[int]] = {}  # by group
    for i, argument in enumerate(graph.arguments):
        made, own = successor.get(i), argument.value
        if not argument.donated or made is None or graph.values[own].size_bytes < LEAST_BYTES:
            continue
        group = _only_reader(chains, own, group_of)
        producer = chains.producer[made]
        if group is not None and producer is not None and group_of.get(producer.index) is group:
            arguments.setdefault(group.index, []).append(i)
    groups = {group.index: group for group in group_of.values()}
    found = []
    for index, read in arguments.items():
        operations = _made_of(groups[index], [graph.arguments[i].value for i in read], analysis)
        if all(o.index in entry and pointwise[o.index] for o in operations) and _can_wait(operations, chains):
            new = {successor[i] for i in read}
            until = max([operations[-1].index, *(c.index for v in new for c, _ in chains.consumers[v])]) + 1
            found.append(_Found(tuple(_first_read(i, operations, analysis) for i in read), operations, until))
    found.sort(key=lambda update: update.last.index)
    return _in_turn(found, analysis)


def ordered_updates(
    equations: Mapping[int, EquationPlan], updates: Sequence[StateUpdate], in_host: Collection[int]
) -> dict[int, EquationPlan]:
    """What a plan says of each equation, with updates in turn where any of the arguments `in_host` lies on the host."""
    found = dict(equations)
    if not in_host:
        return found
    for update in updates:
        for number in update.equations[:-1]:
            found[number] = dataclasses.replace(
                found.get(number, EquationPlan()),
                evaluated_at=update.equations[-1] - number,
                evaluated_with_room=update.equations[-1] - number,
            )
        for read in update.reads:
            own = found.get(read.equation, EquationPlan())
            in_turn = tuple(sorted({*own.in_turn, (read.equation - update.after, read.slot)}))
            fetches = tuple(sorted({*own.fetches, read.slot})) if read.argument in in_host else own.fetches
            found[read.equation] = dataclasses.replace(own, in_turn=in_turn, fetches=fetches)
    return dict(sorted(found.items()))


def _only_reader(chains: DefUse, value: int, group_of: Mapping[int, Group]) -> Group | None:
    """The group that alone reads a value; None if several do, or none."""
    readers = [group_of.get(operation.index) for operation, _ in chains.consumers[value]]
    first = readers[0] if readers else None
    return first if all(reader is first for reader in readers) else None


def _made_of(group: Group, values: Sequence[int], analysis: ProgramAnalysis) -> tuple[Operation, ...]:
    """The operations of a group that are made of any of `values`."""
    made, found = set(values), []
    for operation in (analysis.graph.operations[o] for o in group.operations):
        if not made.isdisjoint(operation.operands):
            made.update(r for r in operation.results if r is not None)
            found.append(operation)
    return tuple(found)


def _can_wait(operations: Sequence[Operation], chains: DefUse) -> bool:
    """Whether nothing else needs their results before the last of them runs."""
    own, last = {o.index for o in operations}, operations[-1].index
    readers = (c.index for o in operations for r in o.results if r is not None for c, _ in chains.consumers[r])
    return all(reader in own or reader > last for reader in readers)


def _first_read(argument: int, operations: Sequence[Operation], analysis: ProgramAnalysis) -> StateRead:
    value = analysis.graph.arguments[argument].value
    first = next(o for o in operations if value in o.operands)
    return StateRead(argument, first.equation, first.operands.index(value))


def _in_turn(found: Sequence[_Found], analysis: ProgramAnalysis) -> tuple[StateUpdate, ...]:
    """Updates with their turns; none where no gradient comes before them."""
    if not found or (first := _last_gradient(found, analysis)) is None:
        return ()
    updates = []
    after, start = first
    stops = [max(update.until, following.last.index + 1) for update, following in zip(found, found[1:], strict=False)]
    for update, stop in zip(found, [*stops, found[-1].until], strict=True):
        equations = tuple(sorted({o.equation for o in update.operations}))
        updates.append(StateUpdate(update.reads, equations, after, start, stop))
        after, start = update.last.equation, update.last.index + 1
    return tuple(updates)


def _last_gradient(found: Sequence[_Found], analysis: ProgramAnalysis) -> tuple[int, int] | None:
    """The last product, sum or the like of which an update is made, such as a gradient, before all updates: its
    equation, and the operation behind it; None if there is none.

    Where numbers are made of it, such as the norm of all gradients of the sum of one's squares, it is the last of these
    that an update needs. The program sums the squares in the order of the parameters' names, but XLA:GPU, when it hides
    collectives, each as soon as its gradient is there: the sum that the program makes last may be one of the first.
    """
    chains = analysis.chains
    own = {o.index for update in found for o in update.operations}
    ahead = [v for update in found for o in update.operations for v in o.operands if v is not None]
    seen: set[int | None] = set(ahead)
    made, between = set[int](), set[int]()
    while ahead:
        operation = chains.producer[ahead.pop()]
        if operation is None or operation.index in own:
            continue
        if operation.rule.is_heavy or any(f.reduction is not None for f in operation.rule.factors):
            made.add(operation.index)
            continue
        between.add(operation.index)
        ahead += [v for v in operation.operands if v is not None and v not in seen]
        seen.update(operation.operands)
    until = found[0].last.index
    last = max((o for o in made if o < until), default=None)
    if last is None:
        return None
    last = _last_number(last, sorted(o for o in between if last < o < until), analysis)
    maker = next(i for i in analysis.entry if first_operation(i) <= last <= last_operation(i))
    return maker.equation, last_operation(maker) + 1


def _last_number(index: int, later: Sequence[int], analysis: ProgramAnalysis) -> int:
    """Which of the operations `later` makes a number of what operation `index` makes, the last of them; `index` if none
    does."""
    operations, values = analysis.graph.operations, analysis.graph.values
    last, made = index, {r for r in operations[index].results if r is not None}
    for operation in (operations[o] for o in later):
        numbers = [r for r in operation.results if r is not None and not values[r].shape]
        if numbers and not made.isdisjoint(operation.operands):
            made.update(numbers)
            last = operation.index
    return last
