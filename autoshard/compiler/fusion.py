"""What the compiler computes inside the kernels that read it, instead of storing it.

The laws are those of XLA:GPU's fusion, which compares times (OpenXLA, xla/backends/gpu/transforms/priority_fusion.cc):
kernels of this kind take as long as the bytes that they move.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence, Set

from autoshard.compiler.aliasing import is_alias
from autoshard.compiler.def_use import DefUse
from autoshard.compiler.dimension_orders import lies_in, read_orders
from autoshard.compiler.memory_orders import Order, memory_orders, turned_values
from autoshard.compiler.primitives import SUMS
from autoshard.compiler.read_again import stored_for_parts
from autoshard.compiler.split_parts import stored_parts
from autoshard.graph.graph import Graph, Operation, OperationKind
from autoshard.graph.pointwise import is_key_or_random

_CYCLES = {"tanh": 467, "expm1": 190, "log1p": 229, "log": 166, "exp": 79, "logistic": 105, "sqrt": 75, "rsqrt": 75}
"""What XLA:GPU takes for functions of an H100 in float32 (`kDeviceHloOpProfiles` in OpenXLA,
xla/service/gpu/model/hlo_op_profiles_data.h); of a logistic function, for its exponential, division and addition."""

_CYCLES_PER_BYTE = 2 * 132 * 128 * 1.98e9 / 3.35e12
"""How many of these an H100 does in the time in which it moves a byte: two in each unit for float32 (the figures are
those of autoshard/cluster/catalogue.yaml)."""

COSTLY_BYTES = {name: cycles / _CYCLES_PER_BYTE for name, cycles in _CYCLES.items()} | {"erf": 40.0, "erfc": 40.0}
"""What takes XLA:GPU as long to compute as moving so many bytes for each element. A tangent is worth 23; read off
programs for H100, it is worth 18 to 24: a layer of `gelu` keeps its tanh where values have 2 bytes, and computes it
twice where they have 4. It keeps its erf or erfc, which are polynomials, in either case: these are worth more than
24."""

_MOST_KERNELS = 6
"""Up to how many kernels that read a value are told apart; more are as many."""

_WORTH_A_LAUNCH = 1.02
"""How many times more must be moved without a kernel that stores a value, since its launch takes time, too. Making the
gradient of grouped scores in both orders that products need moves as much if it is stored before and if not. Where it
lies in neither, it is stored: each kernel would have to turn all that it is made of."""

_MANY_SOURCES = 20
"""What is made of more stored values than this, as the sums of an associative scan are, is stored for several readers:
computing all of it in each takes long. Read off programs of state-space layers, where what has 24 is. Of the models in
`configs/` those of 24 decoders that attend to an encoder have more, 25, in the sum of its gradients; in others nothing
has more than 13 (a script that is not kept)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fusion:
    """What is stored and what is not.

    Attributes:
      fused: For each value, whether it is computed inside its consumers.
      sources: For each result of a pointwise operation, the stored values that it is made of.
      added: The values among `fused` that are reductions, or names of these, in the kernel that adds two of them.
      fetched: The values that are stored since computing them again takes long.
      parts: The parts of split values that execution stores (`split_parts.py`).
      again: Those that are stored since one kernel would compute them several times (`read_again.py`).
      turned: Those that are stored since several kernels need them in another order of dimensions.
      orders: In which each value lies in memory (`memory_orders.py`).
    """

    fused: Sequence[int]
    sources: Mapping[int, frozenset[int]]
    added: frozenset[int]
    fetched: frozenset[int]
    parts: frozenset[int]
    again: frozenset[int]
    turned: frozenset[int]
    orders: Sequence[Order | None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Computed:
    """`fused`, `sources` and `fetched` of `Fusion`."""

    fused: bytearray
    sources: Mapping[int, frozenset[int]]
    fetched: frozenset[int]


def _kernels(
    chains: DefUse, can_fuse: Sequence[int], place: Sequence[int], num_orders: Callable[[int], int]
) -> list[frozenset[int]]:
    """For each value, the places in which it is needed, if all that can be fused is. `place`: That of each operation,
    such as its region. `num_orders`: In how many orders of dimensions a value is read.
    """
    kernels: list[frozenset[int]] = [frozenset()] * len(chains.graph.values)
    for operation in reversed(chains.graph.operations):
        for value in operation.results:
            if value is None:
                continue
            found: set[int] = set()
            for c, _ in chains.consumers[value]:
                if len(found) >= _MOST_KERNELS:
                    break
                inner = [r for r in c.results if r is not None and can_fuse[r]] if c.index > operation.index else []
                if inner:
                    for r in inner:
                        found |= kernels[r]
                else:
                    found.add(place[c.index])
                    for r in c.results:  # each order of dimensions that a result is needed in is a kernel of its own
                        others = num_orders(r) - 1 if r is not None else 0
                        found.update(-1 - c.index - k * len(chains.region) for k in range(others))
            kernels[value] = frozenset(found)
    return kernels


def _between_sums(chains: DefUse) -> list[int]:
    """For each operation, a number that it shares with those of its region that wait for as many sums in turn."""
    waits: list[int] = []
    for operation in chains.graph.operations:
        made = [chains.producer[o] for o in operation.operands if o is not None]
        near = [p for p in made if p is not None and chains.region[p.index] == chains.region[operation.index]]
        waits.append(max([waits[p.index] + _sums(p) for p in near if p.index < operation.index], default=0))
    return [region + num * len(waits) for region, num in zip(chains.region, waits, strict=True)]


def _sums(operation: Operation) -> bool:
    """Whether an operation makes one element of many, and is no product."""
    return not operation.rule.is_heavy and any(f.reduction and f.size > 1 for f in operation.rule.factors)


def fuse(
    chains: DefUse, pointwise: Sequence[bool], free: Set[int], in_place: Mapping[int, int], changed: Set[int]
) -> Fusion:
    """Decides for each value whether it is stored.

    A pointwise result that only fusible operations read is not, if one kernel needs it, or if the kernels that need it
    move fewer bytes when each of them computes it again from what it is made of than when it is written once and read
    by each. What several kernels need in another order than it lies in is stored in that order (`memory_orders.py`).
    What enters a checkpointed function is stored anyway, and so are parts of split values (`split_parts.py`). Rows that
    are looked up in a table are like a pointwise result, unless the table is a parameter: these are sharded by rows,
    too, and the rows are then summed.

    Args:
      chains: The graph. pointwise: For each operation, whether it is. free: Values that are rebuilt from nothing.
      in_place: Results that an operand's buffer receives; these are stored there (`aliasing.sums_in_place`).
      changed: Values that others are scattered into where they are stored (`aliasing.scattered_into`).
    """
    graph = chains.graph
    can_fuse = bytearray(len(graph.values))
    held = chains.outputs | _held_by_barriers(graph) | changed
    fusible = _fusible(graph, pointwise)
    for operation in graph.operations:
        if fusible[operation.index]:
            for value in operation.results:
                if value is not None and value not in held and value not in in_place:
                    can_fuse[value] = all([_computes_operand(c, value) for c, _ in chains.consumers[value]])
    _keep_what_is_stored_under_another_name(graph, can_fuse)
    parts = stored_parts(chains, can_fuse)
    for value in parts:
        can_fuse[value] = False
    orders = memory_orders(chains, pointwise, {})
    num_orders, between = functools.cache(lambda value: len(read_orders(chains, value))), _between_sums(chains)
    computed = _computed(chains, can_fuse, fusible, free, orders, between, num_orders)
    turned = turned_values(chains, pointwise, orders, computed.fused)
    if turned:
        kernels = _kernels(chains, can_fuse, between, num_orders)
        turned = {value: order for value, order in turned.items() if len(kernels[value]) > 1}
        for value in turned:
            can_fuse[value] = False
        orders = memory_orders(chains, pointwise, turned)
        computed = _computed(chains, can_fuse, fusible, free, orders, between, num_orders)
    again = stored_for_parts(chains, computed.fused, free)
    if again:
        for value in again:
            can_fuse[value] = False
        computed = _computed(chains, can_fuse, fusible, free, orders, between, num_orders)
    fused = computed.fused
    added: set[int] = set()
    for operation in graph.operations:
        if operation.name in SUMS:
            terms = [_summed(chains, o) for o in operation.operands]
            if all(terms):  # both reductions are part of the kernel that adds them
                added.update(v for term in terms for v in term)
    for value in added:
        fused[value] = True
    return Fusion(fused, computed.sources, frozenset(added), computed.fetched, parts, again, frozenset(turned), orders)


def _computed(
    chains: DefUse,
    can_fuse: Sequence[int],
    fusible: Sequence[bool],
    free: Set[int],
    orders: Sequence[Order | None],
    between: Sequence[int],
    num_orders: Callable[[int], int],
) -> _Computed:
    """Decides which of the values that can be computed inside their readers are.

    Args:
      chains, free: As for `fuse`. can_fuse, num_orders: As for `_kernels`. fusible: Whether each operation can be.
      orders: How all lie in memory. between: Of `_between_sums`.
    """
    graph, region = chains.graph, chains.region
    size = lambda value: graph.values[value].size_bytes
    kernels = _kernels(chains, can_fuse, region, num_orders)
    has_costly = any(o.name in COSTLY_BYTES for o in graph.operations)
    parts = _kernels(chains, can_fuse, between, num_orders) if has_costly else kernels
    fused = bytearray(len(graph.values))
    sources: dict[int, frozenset[int]] = {}
    fetched: set[int] = set()
    costly: dict[int, float] = {}  # what computing an element again takes, in bytes moved, if it is much
    for operation in graph.operations:
        if not fusible[operation.index]:
            continue
        made_of: set[int] = set()
        costly_bytes = COSTLY_BYTES.get(operation.name, 0)
        for o in operation.operands:
            if o is not None and o not in free:
                made_of.update(sources[o] if fused[o] else (o,))
                costly_bytes += costly.get(o, 0) if fused[o] else 0
        own = frozenset(made_of)
        for value in operation.results:
            if value is None:
                continue
            sources[value] = own
            if not can_fuse[value]:
                continue
            if costly_bytes:
                costly[value] = costly_bytes
                if _is_fetched(chains, value, own, costly_bytes, len(parts[value])):
                    fetched.add(value)
                    continue
            if len(own) > _MANY_SOURCES and _num_readers(chains, value) > 1:
                continue
            num = len(kernels[value])
            if num > 1 and not is_alias(operation) and value not in free:
                if is_key_or_random(operation) and kernels[value] != {region[operation.index]}:
                    continue
                worth = 1 / _WORTH_A_LAUNCH if _lies_in_no_order(chains, value, orders) else _WORTH_A_LAUNCH
                if sum(map(size, own)) * (num - 1) > worth * size(value) * (num + 1):
                    continue
            fused[value] = True
    return _Computed(fused, sources, frozenset(fetched))


def _lies_in_no_order(chains: DefUse, value: int, orders: Sequence[Order | None]) -> bool:
    """Whether products need the transposition of a value in several orders, of which it lies in none."""
    turned = [r for c, _ in chains.consumers[value] if c.name == "transpose" for r in c.results if r is not None]
    wanted = [(r, read_orders(chains, r)) for r in turned]
    return any(len(own) > 1 and not any(lies_in(one, orders[r]) for one in own) for r, own in wanted)


def _is_fetched(chains: DefUse, value: int, sources: Set[int], costly_bytes: float, num: int) -> bool:
    """Whether `num` kernels take less time if one stores a value and they fetch it, than if each computes it again.

    A kernel takes as long as its arithmetic or as what it moves, whichever is longer: here the value or `costly_bytes`
    for each element, what the value is made of, and a result as narrow as the narrowest of these. What has one reader
    is part of that.
    """
    values = chains.graph.values
    if _num_readers(chains, value) == 1:
        return False
    own, elements = values[value].size_bytes, math.prod(values[value].shape)
    alike = [values[s].size_bytes for s in sources if math.prod(values[s].shape) == elements]
    moved_bytes = own + max(alike, default=0) + min([own, *alike])
    return (num - 1) * costly_bytes * elements > num * moved_bytes


def _num_readers(chains: DefUse, value: int) -> int:
    """How many operations read a value."""
    return len({c.index for c, _ in chains.consumers[value]})


def _fusible(graph: Graph, pointwise: Sequence[bool]) -> list[bool]:
    """For each operation, whether its readers can compute it: the pointwise ones, and gathers from what is computed."""
    given = {argument.value for argument in graph.arguments}
    fusible = []
    for operation in graph.operations:
        is_pointwise = pointwise[operation.index]
        if is_pointwise and all([o is None or o in given for o in operation.operands]):
            given.update(r for r in operation.results if r is not None)
        fusible.append(is_pointwise or (operation.name == "gather" and operation.operands[0] not in given))
    return fusible


def _keep_what_is_stored_under_another_name(graph: Graph, can_fuse: bytearray) -> None:
    """Takes back that values are computed by their readers which are read under another name by what does not."""
    for operation in reversed(graph.operations):
        if is_alias(operation):
            for operand, result in zip(operation.operands, operation.results, strict=False):
                if operand is not None and result is not None and not can_fuse[result]:
                    can_fuse[operand] = False


def _computes_operand(operation: Operation, value: int) -> bool:
    """Whether an operation can compute a value that it reads: a gather does so for the elements that it takes."""
    is_taken_from = operation.name == "gather" and operation.operands[0] == value
    return operation.kind is OperationKind.EQUATION and (is_taken_from or not operation.rule.is_heavy)


def _held_by_barriers(graph: Graph) -> frozenset[int]:
    """The values that a checkpointed function takes: JAX puts a barrier around them, across which nothing is fused."""
    made_at = {r: o.index for o in graph.operations for r in o.results if r is not None}
    held: set[int] = set()
    for start, stop in graph.checkpoints:
        for operation in graph.operations[start:stop]:
            held.update(o for o in operation.operands if o is not None and made_at.get(o, start) < start)
    return frozenset(held)


def _summed(chains: DefUse, value: int | None) -> list[int]:
    """A value that is a sum over a dimension and what it is another name of, if each of them has one reader."""
    names: list[int] = []
    while value is not None and value not in chains.outputs and len(chains.consumers[value]) == 1:
        operation = chains.producer[value]
        if operation is None or operation.name not in ("reduce_sum", "reshape"):
            return []
        names.append(value)
        if operation.name == "reduce_sum" and any(f.reduction and f.size > 1 for f in operation.rule.factors):
            return names if chains.graph.values[value].shape else []
        value = operation.operands[0]
    return []
