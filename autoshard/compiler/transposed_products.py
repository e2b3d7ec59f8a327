"""Which products are transposed right away, so that the compiler may make them as they are wanted.

The gradient of the weights of several experts comes out of its product with rows and columns exchanged, and a
transposition puts them right. XLA makes the product the other way round instead, if nothing is between the two. Where
the product's result is to have a layout, its partial sums are added there, and the transposition moves on into the
update: all that the optimizer keeps of the weight is turned, changed, and turned back, and not changed in place.
XLA:TPU does so with the gradient of every weight, which is a product without batches; XLA:GPU with none of those.
"""

from autoshard.compiler.planned_graph import PlannedGraph
from autoshard.graph.computations import Computation, Instruction
from autoshard.graph.graph import Dims, FactorRule


def transposed_at_once(planned: PlannedGraph, computation: Computation, without_batches: bool) -> frozenset[int]:
    """The products, by equation, whose result only a transposition of rows and columns reads, as it is laid out.

    Its own result has that layout as well, so that none needs to be demanded of the product. Sums that are scattered
    are made by shards, and are left alone.

    Args:
      planned: The graph and the plan. computation: One of its computations.
      without_batches: Whether to look for all such products, and not for those over batches alone.
    """
    readers: dict[int | None, list[Instruction]] = {}
    for instruction in computation:
        for o in instruction.operands:
            if o is not None:
                readers.setdefault(o, []).append(instruction)
    found: set[int] = set()
    for product in computation:
        after = readers.get(product.results[0], []) if product.name == "dot_general" else []
        if len(after) != 1 or not _exchanges_rows(product, after[0], without_batches):
            continue
        own, then = planned.plan_of(product), planned.plan_of(after[0])
        layout, transposed = dict(own.results).get(0), dict(then.results).get(0)
        if layout is None or transposed is None or own.scatters or then.operands:
            continue
        rule = after[0].leaf.rule
        axes = {f: entries for dim, entries in zip(rule.operands[0], layout, strict=True) for f in dim}
        if transposed == tuple(axes[dim[0]] if dim else () for dim in rule.results[0]):
            found.add(product.equation)
    return frozenset(found)


def _exchanges_rows(product: Instruction, after: Instruction, without_batches: bool) -> bool:
    """Whether `after` transposes a product, over batches unless `without_batches`, and leaves the batches in front."""
    if after.name != "transpose":
        return False
    num_batch = _num_batch_dims(product.leaf.rule)
    rule = after.leaf.rule
    in_front = lambda dims: _factors(dims)[:num_batch]
    return bool(num_batch or without_batches) and in_front(rule.operands[0]) == in_front(rule.results[0])


def _num_batch_dims(rule: FactorRule) -> int:
    """How many dimensions of more than one element a matrix product batches over."""
    left, right = ({*_factors(dims)} for dims in rule.operands)
    return sum(f in left and f in right for f in _factors(rule.results[0]))


def _factors(dims: Dims) -> list[int]:
    return [f for dim in dims for f in dim]
