"""Whether a loss is a sum over examples beside what depends on none.

Whether it is a mean, so that a step may be run in micro-batches, is then told by what it is divided by
(`autoshard/trace/batch_growth.py`, `autoshard/plans/mean_loss.py`).

Every value of the loss's program stands to the examples of the batch in one of four ways:

    FREE   it depends on none
    EACH   examples are the major part of one dimension, and what stands there depends on its own example alone
    TOTAL  a sum over examples, or linear in such sums
    MIXED  anything else

Where an operation reads examples along one of its factors, and else what depends on none, its result is EACH if it has
the factor, and a TOTAL if it sums over it. Linear operations leave TOTALs; dividing by one does not. What is a TOTAL,
or FREE, is a sum over examples beside what depends on none.

Not seen as a mean, though it can be one: what numbers the examples (`x[jnp.arange(n), labels]`), joins or slices them,
or branches.
"""

import dataclasses
import enum
from collections.abc import Collection, Sequence

from autoshard.graph.graph import Dims, FactorRule, Graph, Nesting, Operation, OperationKind, ValueKind, dim_of


class Dependence(enum.Enum):
    """How a value depends on the examples of a batch; see above."""

    FREE = "free"
    EACH = "each"
    TOTAL = "total"
    MIXED = "mixed"


@dataclasses.dataclass(frozen=True, slots=True)
class _Seen:
    """What is known of a value.

    Attributes:
      dim: Of one that is EACH, the dimension of the examples.
      even: Of one that is FREE, the dimensions along which it is the same, or drawn at random.
      why: Of one that is MIXED, the operation that mixed examples.
    """

    kind: Dependence
    dim: int = 0
    even: frozenset[int] = frozenset()
    why: str = ""


_LINEAR = frozenset(
    "add add_any sub neg convert_element_type copy reshape squeeze transpose broadcast_in_dim reduce_sum slice "
    "concatenate expand_dims split unstack scan_slice scan_stack".split()
)
_BILINEAR = frozenset({"mul", "dot_general"})
_SPREADING = frozenset({"broadcast_in_dim", "random_bits"})
"""Operations whose new dimensions are the same everywhere, or drawn at random."""


def why_no_means(graph: Graph, examples: Collection[int], num_examples: int) -> list[str | None]:
    """Of each result of a program, the operation because of which it is not known to be a sum over examples beside what
    depends on none; None if it is one.

    Args:
      graph: The program of a loss, or of its gradients.
      examples: Values of the batch, which have the examples as their first dimension. num_examples: Their number.
    """
    seen: dict[int, _Seen] = {}
    for value in graph.values:
        if value.index in examples:
            seen[value.index] = _Seen(Dependence.EACH)
        elif value.kind is not ValueKind.INTERMEDIATE:
            seen[value.index] = _Seen(Dependence.FREE)
    deciding = {n.equation: n for n in graph.nestings if n.name in ("while", "cond")}
    changed = True
    while changed:  # what a loop carries is known after its body was seen
        changed = False
        for operation in graph.operations:
            made = _results(graph, operation, seen, num_examples)
            for result, own in [] if made is None else zip(operation.results, made, strict=True):
                if result is None:
                    continue
                if not _is_settled(operation, deciding.get(operation.equation), seen):
                    own = _mixed(operation)
                before = seen.get(result)
                if own != before and (before is None or before.kind is not Dependence.MIXED):
                    seen[result], changed = own, True
    return [None if output.value is None else _why(seen[output.value]) for output in graph.outputs]


def _why(result: _Seen) -> str | None:
    if result.kind in (Dependence.FREE, Dependence.TOTAL):
        return None
    return result.why or "what is not summed over the examples"


def _is_settled(operation: Operation, deciding: Nesting | None, seen: dict[int, _Seen]) -> bool:
    """Whether no example decides which branch runs, or how often a body does; `deciding`: what nests the operation, if
    that is a conditional or a `while` loop. One that nests no operation is not known."""
    if deciding is None:
        return operation.kind is not OperationKind.BRANCH_JOIN
    operands = (seen.get(v) for v in deciding.operands if v is not None)
    return all(o is None or o.kind is Dependence.FREE for o in operands)


def _mixed(operation: Operation) -> _Seen:
    return _Seen(Dependence.MIXED, why=operation.label)


def _results(graph: Graph, operation: Operation, seen: dict[int, _Seen], num_examples: int) -> list[_Seen] | None:
    """What an operation makes of what is known of its operands; None where one of them is made later, in a loop."""
    free = _Seen(Dependence.FREE)
    operands = [free if v is None else seen.get(v) for v in operation.operands]
    known = [o for o in operands if o is not None]
    count = len(operation.results)
    if mixed := next((o for o in known if o.kind is Dependence.MIXED), None):
        return [mixed] * count
    if operation.kind is OperationKind.LOOP_CARRY:
        return [_either(known, operation)] * count
    if len(known) < len(operands):
        return None
    kinds = {o.kind for o in known}
    if kinds <= {Dependence.FREE}:
        return [_free(operation, known, dims) for dims in operation.rule.results]
    if Dependence.TOTAL in kinds:
        is_total = Dependence.EACH not in kinds and _is_linear(graph, operation, known)
        return [_Seen(Dependence.TOTAL) if is_total else _mixed(operation)] * count
    factor = _factor_of_examples(operation.rule, known, num_examples)
    if factor is None or _is_by_number(operation, factor):
        return [_mixed(operation)] * count
    return [_of_examples(operation, factor, dims) for dims in operation.rule.results]


def _either(known: Sequence[_Seen], operation: Operation) -> _Seen:
    """What a loop carries: what it begins with, or what its body makes."""
    kinds = {o.kind for o in known}
    if kinds == {Dependence.FREE}:
        return _Seen(Dependence.FREE, even=frozenset.intersection(*(o.even for o in known)))
    if kinds <= {Dependence.FREE, Dependence.TOTAL}:
        return _Seen(Dependence.TOTAL)
    each = [o for o in known if o.kind is Dependence.EACH]
    others = [o for o in known if o.kind is not Dependence.EACH]
    are_even = all(o.kind is Dependence.FREE and each[0].dim in o.even for o in others)
    return each[0] if are_even and all(o.dim == each[0].dim for o in each) else _mixed(operation)


def _free(operation: Operation, known: Sequence[_Seen], dims: Dims) -> _Seen:
    """A result of operands that depend on no example."""
    rule = operation.rule

    def is_even(factor: int) -> bool:
        dims = [dim_of(factor, own) for own in rule.operands]
        if any(d is not None for d in dims):
            return all(d is None or d in o.even for o, d in zip(known, dims, strict=True))
        return operation.name in _SPREADING or rule.counted not in (None, factor)

    even = (d for d, factors in enumerate(dims) if factors and all(map(is_even, factors)))
    return _Seen(Dependence.FREE, even=frozenset(even))


def _is_linear(graph: Graph, operation: Operation, known: Sequence[_Seen]) -> bool:
    """Whether an operation is linear in its operands that are totals; no other depends on an example."""
    are_totals = [o.kind is Dependence.TOTAL for o in known]
    name = operation.name
    if name in _BILINEAR:
        return sum(are_totals) == 1
    if name == "div":
        return are_totals == [True, False] and not _is_whole(graph, operation.results[0])
    if name == "select_n":
        return not are_totals[0]
    if name == "convert_element_type" and _is_whole(graph, operation.results[0]):
        return _is_whole(graph, operation.operands[0])
    return name in _LINEAR


def _is_whole(graph: Graph, value: int | None) -> bool:
    """Whether a value has whole numbers, to which others are rounded."""
    return value is not None and graph.values[value].dtype.startswith(("int", "uint"))


def _factor_of_examples(rule: FactorRule, known: Sequence[_Seen], num_examples: int) -> int | None:
    """The factor along which an operation reads examples; None if it is not one, or if it reads them otherwise too."""
    found = {_major(rule, own[o.dim]) for o, own in zip(known, rule.operands, strict=True) if o.kind is Dependence.EACH}
    factor = found.pop()
    if factor is None or found or rule.factors[factor].size % num_examples:
        return None
    for o, own in zip(known, rule.operands, strict=True):
        along = [d for d, factors in enumerate(own) if factor in factors]
        if o.kind is Dependence.EACH and along != [o.dim]:
            return None
        if o.kind is Dependence.FREE and not o.even.issuperset(along):
            return None
    return factor


def _is_by_number(operation: Operation, factor: int) -> bool:
    """Whether an operation reads or writes single entries along a factor by their numbers: a look-up among them, or a
    scatter over what has the factor while its updates have not."""
    rule = operation.rule
    has_factor = lambda dims: any(factor in factors for factors in dims)
    if operation.name == "gather":
        return not any(map(has_factor, rule.results))
    return operation.name.startswith("scatter") and has_factor(rule.operands[0]) and not has_factor(rule.operands[-1])


def _of_examples(operation: Operation, factor: int, dims: Dims) -> _Seen:
    """A result of an operation that reads examples along a factor."""
    along = [d for d, factors in enumerate(dims) if factor in factors]
    if len(along) == 1 and _major(operation.rule, dims[along[0]]) == factor:
        return _Seen(Dependence.EACH, along[0])
    is_summed = not along and operation.rule.factors[factor].reduction == "add"
    return _Seen(Dependence.TOTAL) if is_summed else _mixed(operation)


def _major(rule: FactorRule, factors: Sequence[int]) -> int | None:
    """The first factor that has an extent."""
    return next((f for f in factors if rule.factors[f].size > 1), None)
