"""Which values share a buffer, and which buffers are there earlier or later than the program's order tells.

Each law is one of XLA:GPU's, observed in its schedules and buffer assignments.
"""

import collections
from collections.abc import Collection, Mapping, Sequence, Set

from autoshard.compiler.def_use import DefUse
from autoshard.compiler.primitives import PRODUCTS, SUMS
from autoshard.graph.graph import Graph, Operation, OperationKind

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

_LARGE_BYTES = 2**20
"""From which size on it matters when a buffer is filled."""

_NEAR = 4
"""How many heavy kernels apart operations may be that become one kernel although others wait for the first."""


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


def sums_in_place(chains: DefUse, free: Set[int]) -> dict[int, int]:
    """For each sum of a product and another value, the product whose buffer it is made in.

    XLA:GPU hands the other term to the product's kernel, which adds to it (`GemmRewriter`, `ConvRewriter`), if nothing
    else reads the product.
    """
    made_in: dict[int, int] = {}
    values = chains.graph.values
    for operation in chains.graph.operations:
        if operation.name not in SUMS or operation.results[0] is None:
            continue
        result = operation.results[0]
        for o in reversed(operation.operands):
            producer = chains.producer[o] if o is not None else None
            if (
                producer is not None
                and producer.name in PRODUCTS
                and len(chains.consumers[o]) == 1
                and o not in chains.outputs
                and values[o].size_bytes == values[result].size_bytes
                and chains.loop_nest[producer.index] == chains.loop_nest[operation.index]
                and not any(other in free for other in operation.operands)
            ):
                made_in[result] = o
                break
    return made_in


def scattered_into(chains: DefUse, free: Set[int]) -> dict[int, int]:
    """For each scatter into zeros whose result is only added to a value, that value: XLA scatters into it instead.

    The gradient of a table is never there as such where a plain update adds it to the table.
    """
    made_in: dict[int, int] = {}
    for operation in chains.graph.operations:
        result = operation.results[0] if operation.results else None
        if operation.name != "scatter-add" or operation.operands[0] not in free or result is None:
            continue
        consumers = chains.consumers[result]
        if len(consumers) == 1 and consumers[0][0].name in SUMS and result not in chains.outputs:
            others = [o for o in consumers[0][0].operands if o is not None and o != result and o not in free]
            if others:
                made_in[result] = others[0]
    return made_in


def siblings(
    chains: DefUse, fused: Sequence[int], sources: Mapping[int, Set[int]], gradients: Set[int]
) -> dict[int, int]:
    """For each value that one kernel makes together with others, the operation at which it does, if not its own.

    Kernels that read one value and do not wait for each other become one kernel of several results
    (`MultiOutputFusion`), which holds all it reads and all it makes. The gradients of a gated layer's two branches are
    made together, as soon as what they are made of is there. What only weight gradients read is not waited for: the
    activation of a layer that is computed again in the backward pass is made together with its gradient.
    """
    values, producer, region = chains.graph.values, chains.producer, chains.region
    stored = [v for v in sources if not fused[v] and values[v].shape]
    alike = lambda value: [s for s in sources[value] if values[s].shape == values[value].shape]
    moved: dict[int, int] = {}
    first: dict[int, int] = {}  # for each source, when the latest kernel that makes what is waited for runs
    waited = lambda value: (
        value in chains.outputs
        or not all([r is None or r in gradients for c, _ in chains.consumers[value] for r in c.results])
    )
    for value in stored:
        own = producer[value].index
        if not waited(value) or value in gradients:
            continue
        there = max(map(chains.defined_at, sources[value]), default=own)
        for s in alike(value):
            at = first.get(s, -1)
            if there < at and chains.loop_nest[at] == chains.loop_nest[own] and region[own] - region[at] <= _NEAR:
                moved[value] = min(at, moved.get(value, own))
        for s in alike(value):
            first[s] = moved.get(value, own)
    for value in stored:
        own = producer[value].index
        if waited(value) or not chains.consumers[value]:
            continue
        at = max((first.get(s, 0) for s in alike(value)), default=0)
        if at > own and chains.loop_nest[at] == chains.loop_nest[own]:
            moved[value] = at
    return moved


def behind(chains: DefUse, together: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """(operation, when) of the products that run later than where the program does them, right behind the kernel that
    makes what they read together with other values.

    Args:
      chains: The graph. together: What `siblings` found.
    """
    when: dict[int, int] = {}
    last = len(chains.graph.operations) - 1
    for value, at in together.items():
        for operation, _ in chains.consumers[value]:
            if operation.rule.is_heavy and operation.index < at:
                when[operation.index] = max(min(at + 1, last), when.get(operation.index, 0))
    return tuple(sorted(when.items()))


def filled_late(chains: DefUse, made_in: Mapping[int, int]) -> tuple[tuple[int, bool], ...]:
    """The scatters into a broadcast scalar that execution fills when what is scattered is there: (operation, only if
    the sum is partial).

    Left alone, XLA's schedule for least memory takes first what waits for nothing, and one kernel makes all constants
    of one type (`MultiOutputFusion`): the zeros of all rounds of a program would be there from the first one on.
    `made_in`: results that are scattered into another value; they need zeros only where they are partial sums.
    """
    found = []
    for operation in chains.graph.operations:
        if operation.name.startswith("scatter") and not chains.loop_nest[operation.index]:
            filled = chains.producer[operation.operands[0]] if operation.operands[0] is not None else None
            sizes_bytes = [chains.graph.values[r].size_bytes for r in operation.results if r is not None]
            is_constant = filled is not None and filled.name == "broadcast_in_dim" and filled.operands == (None,)
            if is_constant and max(sizes_bytes, default=0) >= _LARGE_BYTES:
                found.append((operation.index, operation.results[0] in made_in))
    return tuple(found)


def zeros(
    chains: DefUse, free: Set[int], gradients: Set[int], made_in: Mapping[int, int], late: Collection[int] = ()
) -> dict[int, int]:
    """For each value whose buffer is filled with a constant before something is written into it, the operation at which
    that happens: results of scatters into constants that are not in `late` (`filled_late`), and the stacked outputs
    of loops.

    XLA's schedule for least memory takes first what waits for nothing: the zeros to which the gradients of a look-up
    are added are mostly there as soon as the product from which the first gradient comes. And one kernel makes all
    constants of one type (`MultiOutputFusion`). The gradient of a maximum over windows becomes such a scatter
    (`SelectAndScatterExpander`); its zeros are made with what the windows slide over, which has the same shape and,
    behind a ReLU, is compared to zeros.
    """
    operations, values = chains.graph.operations, chains.graph.values
    first = next((o.index for o in operations if o.rule.is_heavy and o.results and o.results[0] in gradients), 0)
    first = next((o.index for o in reversed(operations[:first]) if o.name in PRODUCTS), first)
    found: dict[int, int] = {}
    for o in operations:
        for value in o.results:
            if value is None or value in made_in or not values[value].shape:
                continue
            if o.index in late:
                continue
            if o.kind is OperationKind.SCAN_STACK:
                if len(chains.loop_nest[o.index]) == 1:
                    found[value] = chains.defined_at(value)
            elif o.name == "select_and_scatter_add":
                found[value] = chains.defined_at(o.operands[1])
            elif o.name.startswith("scatter") and o.operands[0] in free and not chains.loop_nest[o.index]:
                found[value] = min(o.index, first) if value in gradients else o.index
    together: dict[tuple[tuple[int, ...], str], int] = {}
    for value, at in found.items():
        key = values[value].shape, values[value].dtype
        together[key] = min(at, together.get(key, at))
    return {value: together[values[value].shape, values[value].dtype] for value in found}


def early_terms(chains: DefUse, made: Mapping[int, int], gradients: Set[int]) -> frozenset[int]:
    """Those of `zeros` that are made early even where they are only to hold partial sums: gradients that are added to
    another one, such as of an embedding that is also the output layer, and those made together with others.
    """
    values = chains.graph.values
    kind = lambda value: (values[value].shape, values[value].dtype)
    num = collections.Counter(map(kind, made))
    return frozenset(v for v in made if num[kind(v)] > 1 or (v in gradients and is_term(chains, v)))


def is_term(chains: DefUse, value: int) -> bool:
    """Whether a value, or the same in another type, is added to another one."""
    readers = [c for c, _ in chains.consumers[value]]
    return any(c.name in SUMS or (c.name == "convert_element_type" and is_term(chains, c.results[0])) for c in readers)


def kernel_copies(chains: DefUse) -> list[tuple[int, int, int]]:
    """(argument, start, stop) of each copy of a convolution kernel.

    cuDNN wants kernels with their input features innermost, which the program has elsewhere: a kernel that is an
    argument is transposed once, before its first convolution, and stays for the last one.
    """
    graph = chains.graph
    copies = []
    for argument in graph.arguments:
        uses = [o.index for o, _ in _readers(chains, argument.value) if o.name == "conv_general_dilated"]
        if uses and len(graph.values[argument.value].shape) > 1:
            copies.append((argument.value, min(uses), max(uses) + 1))
    return copies


def is_reversed_kernel(chains: DefUse, value: int) -> bool:
    """Whether a value is a reversed kernel, which a convolution for gradients reads as it is."""
    consumers = chains.consumers[value]
    return chains.producer[value].name == "rev" and all(c.name == "conv_general_dilated" for c, _ in consumers)


def _readers(chains: DefUse, value: int) -> list[tuple[Operation, int]]:
    """Who reads a value, or the same reversed."""
    found = []
    for operation, slot in chains.consumers[value]:
        if operation.name == "rev":
            found += _readers(chains, operation.results[0])
        else:
            found.append((operation, slot))
    return found
