"""In which type a value travels: a tensor is moved before it is widened, and after it is narrowed.

XLA swaps collectives with conversions that make a tensor larger (OpenXLA, `CollectiveQuantizer` in
xla/hlo/transforms/collectives/collective_quantizer.h). With a conversion behind the move that makes it smaller, XLA:GPU
of jax 0.10.2 does so for some programs and not for others: execution converts first (`EquationPlan.narrows_first`).

XLA:TPU rounds what float32 products read before it moves it, since they read bfloat16 (`DeviceType.rounds_products`),
and also what is only looked up, cut, joined or shaped anew on the way to them (`BFloat16Propagation`,
xla/hlo/transforms/simplifiers/bfloat16_propagation.h).
"""

from collections.abc import Sequence

from autoshard.graph.graph import Graph, OperationKind

_SAME_ELEMENTS = frozenset(
    "broadcast_in_dim concatenate dynamic_slice gather reshape rev slice split squeeze stack transpose unstack".split()
)
"""Operations whose results are elements of their operands."""
_ROUNDED_BYTES = 2


def moved_itemsizes(graph: Graph) -> tuple[int, ...]:
    """For each value, the bytes of an element as it is moved."""
    sizes = [v.itemsize_bytes for v in graph.values]
    for operation in graph.operations:
        if operation.name == "convert_element_type" and operation.operands[0] is not None:
            (result,) = operation.results
            if result is not None and graph.values[result].shape:
                sizes[result] = min(sizes[result], sizes[operation.operands[0]])
    return tuple(sizes)


def is_narrowed(graph: Graph, read_by: Sequence[int]) -> bool:
    """Whether a value that the operations `read_by` of one group read is only made smaller there: it is moved after."""
    operation = graph.operations[read_by[0]]
    if len(read_by) > 1 or operation.name != "convert_element_type":
        return False
    values = graph.values
    return values[operation.result()].itemsize_bytes < values[operation.operand(0)].itemsize_bytes


def rounding_operations(graph: Graph) -> frozenset[int]:
    """The operations that need their operands no more precisely than a product at default precision does: these
    products, and what only hands elements on to such operations.
    """
    precise = {o.value for o in graph.outputs}
    for operation in graph.operations:
        if operation.kind is OperationKind.LOOP_CARRY:  # reads what is made after it
            precise.update(operation.operands)
    found: set[int] = set()
    for operation in reversed(graph.operations):
        is_handed_on = operation.name in _SAME_ELEMENTS and precise.isdisjoint(operation.results)
        if operation.rule.is_rounded or is_handed_on:
            found.add(operation.index)
        else:
            precise.update(operation.operands)
    return frozenset(found)


def rounded_itemsize(
    graph: Graph, value: int, itemsize_bytes: int, rounding: frozenset[int], read_by: Sequence[int]
) -> int:
    """The bytes of an element of `value` as it is moved to the operations `read_by`, of which those in `rounding` round
    what they read; `itemsize_bytes` if any other is among them.
    """
    is_rounded = graph.values[value].dtype == "float32" and rounding.issuperset(read_by)
    return min(itemsize_bytes, _ROUNDED_BYTES) if is_rounded else itemsize_bytes
