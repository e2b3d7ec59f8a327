"""Which values share a buffer, and which buffers are there earlier or later than the program's order tells.

Each law is one of XLA:GPU's, observed in its schedules and buffer assignments.
"""

from collections.abc import Mapping, Sequence, Set

from autoshard.graph.graph import Graph, Operation, OperationKind
from autoshard.planner.reading import Reading

_ALIASING = frozenset(
    {
        "reshape",
        "squeeze",
        "expand_dims",
        "optimization_barrier",
        "sharding_constraint",
        "copy",
        "bitcast_convert_type",
        "loop_carry",
        "branch_join",
        "random_wrap",
        "random_unwrap",
    }
)

SUMS = frozenset({"add", "add_any"})

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


def is_alias(operation: Operation) -> bool:
    """Whether the results are other names of the operands' memory."""
    return operation.name in _ALIASING


def aliases(graph: Graph) -> dict[int, int]:
    """For each value that is another name of a value's memory, the latter."""
    root: dict[int, int] = {}
    for operation in graph.operations:
        if operation.kind is OperationKind.LOOP_CARRY:
            # the loop owns one buffer: the value inside; the value after is its last content
            inside, after = operation.results
            if after is not None and inside is not None:
                root[after] = inside
        elif is_alias(operation) and operation.operands:
            for slot, r in enumerate(operation.results):
                source = operation.operands[slot if slot < len(operation.operands) else 0]
                if r is not None and source is not None:
                    root[r] = root.get(source, source)
    return root


def sums_in_place(reading: Reading, free: Set[int]) -> dict[int, int]:
    """For each sum of a product and another value, the product whose buffer it is made in.

    XLA:GPU hands the other term to the product's kernel, which adds to it (`GemmRewriter`, `ConvRewriter`), if nothing
    else reads the product.
    """
    made_in: dict[int, int] = {}
    values = reading.graph.values
    for operation in reading.graph.operations:
        if operation.name not in SUMS or operation.results[0] is None:
            continue
        result = operation.results[0]
        for o in reversed(operation.operands):
            producer = reading.producer[o] if o is not None else None
            if (
                producer is not None
                and producer.name in PRODUCTS
                and len(reading.consumers[o]) == 1
                and o not in reading.outputs
                and values[o].size_bytes == values[result].size_bytes
                and reading.around[producer.index] == reading.around[operation.index]
                and not any(other in free for other in operation.operands)
            ):
                made_in[result] = o
                break
    return made_in


def scattered_into(reading: Reading, free: Set[int]) -> dict[int, int]:
    """For each scatter into zeros whose result is only added to a value, that value: XLA scatters into it instead.

    The gradient of a table is never there as such where a plain update adds it to the table.
    """
    made_in: dict[int, int] = {}
    for operation in reading.graph.operations:
        result = operation.results[0] if operation.results else None
        if operation.name != "scatter-add" or operation.operands[0] not in free or result is None:
            continue
        consumers = reading.consumers[result]
        if len(consumers) == 1 and consumers[0][0].name in SUMS and result not in reading.outputs:
            others = [o for o in consumers[0][0].operands if o is not None and o != result and o not in free]
            if others:
                made_in[result] = others[0]
    return made_in


def siblings(
    reading: Reading, fused: Sequence[int], sources: Mapping[int, Set[int]], gradients: Set[int]
) -> dict[int, int]:
    """For each value that one kernel makes together with a later one, the operation that makes the latter.

    Kernels that read one value and do not wait for each other become one kernel of several results
    (`MultiOutputFusion`). What only weight gradients read is not waited for: the activation of a layer that is computed
    again in the backward pass is made together with its gradient, of the same value of the same size.
    """
    values = reading.graph.values
    latest: dict[int, int] = {}  # for each source, the last operation that makes something of it which is waited for
    stored = [v for v in sources if not fused[v] and values[v].shape]
    for value in stored:
        if value not in gradients:
            for s in sources[value]:
                latest[s] = max(latest.get(s, 0), reading.producer[value].index)
    later: dict[int, int] = {}
    for value in stored:
        consumers = reading.consumers[value]
        if value in reading.outputs or not consumers:
            continue
        if not all([r is None or r in gradients for c, _ in consumers for r in c.results]):
            continue
        own, shape = reading.producer[value].index, values[value].shape
        at = max((latest.get(s, 0) for s in sources[value] if values[s].shape == shape), default=0)
        if at > own and reading.around[at] == reading.around[own]:
            later[value] = at
    return later


def filled(reading: Reading, free: Set[int], gradients: Set[int], made_in: Mapping[int, int]) -> dict[int, int]:
    """For each gradient that is scattered into a constant, the operation at which the constant is made.

    XLA's schedule for least memory takes first what waits for nothing: the zeros to which the gradients of a look-up
    are added are mostly there as soon as the product from which the first gradient comes. Of partial sums this is so
    where they are added to another gradient: of an embedding that is also the output layer.
    """
    operations = reading.graph.operations
    first = next((o.index for o in operations if o.rule.is_heavy and o.results and o.results[0] in gradients), 0)
    first = next((o.index for o in reversed(operations[:first]) if o.name in PRODUCTS), first)
    return {
        o.results[0]: first
        for o in operations
        if o.name.startswith("scatter")
        and o.results[0] in gradients
        and o.operands[0] in free
        and o.results[0] not in made_in
        and o.index > first
        and reading.around[o.index] == reading.around[first]
    }


def stacks(reading: Reading) -> dict[int, int]:
    """For each stacked output of a loop, the operation at which its buffer is made.

    A loop writes into a buffer of zeros. Those of one type are made by one kernel (XLA:GPU's `MultiOutputFusion`).
    """
    values = reading.graph.values
    alike: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for operation in reading.graph.operations:
        if operation.kind is OperationKind.SCAN_STACK and len(reading.around[operation.index]) == 1:
            for r in operation.results:
                if r is not None:
                    alike.setdefault((values[r].shape, values[r].dtype), []).append(r)
    return {r: min(map(reading.born, stacks)) for stacks in alike.values() for r in stacks}


def is_term(reading: Reading, value: int) -> bool:
    """Whether a value, or the same in another type, is added to another one."""
    readers = [c for c, _ in reading.consumers[value]]
    return any(c.name in SUMS or (c.name == "convert_element_type" and is_term(reading, c.results[0])) for c in readers)


def kernel_copies(reading: Reading) -> list[tuple[int, int, int]]:
    """(argument, start, stop) of each copy of a convolution kernel.

    cuDNN wants kernels with their input features innermost, which the program has elsewhere: a kernel that is an
    argument is transposed once, before its first convolution, and stays for the last one.
    """
    graph = reading.graph
    copies = []
    for argument in graph.arguments:
        uses = [o.index for o, _ in _readers(reading, argument.value) if o.name == "conv_general_dilated"]
        if uses and len(graph.values[argument.value].shape) > 1:
            copies.append((argument.value, min(uses), max(uses) + 1))
    return copies


def is_reversed_kernel(reading: Reading, value: int) -> bool:
    """Whether a value is a reversed kernel, which a convolution for gradients reads as it is."""
    consumers = reading.consumers[value]
    return reading.producer[value].name == "rev" and all(c.name == "conv_general_dilated" for c, _ in consumers)


def _readers(reading: Reading, value: int) -> list[tuple[Operation, int]]:
    """Who reads a value, or the same reversed."""
    found = []
    for operation, slot in reading.consumers[value]:
        if operation.name == "rev":
            found += _readers(reading, operation.results[0])
        else:
            found.append((operation, slot))
    return found
