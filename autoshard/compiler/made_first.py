"""Which products of a solved program are made first, so that what they read cannot wait for a kernel behind them.

One kernel makes values together that are made of the same (`multi_output_fusion.py`): the activation of a layer that is
computed again, which the gradient of a weight reads, with the gradients of the layer's branches. But where these are
made of a product that waits for that gradient, as the plan orders it (`ordering.py`), the activation is made for it
alone, and is gone before they are there.
"""

from collections.abc import Sequence

from autoshard.cluster import CollectiveKind
from autoshard.compiler.collective_combiner import is_reduced_alone
from autoshard.compiler.early_products import EarlyProduct, frees_more
from autoshard.compiler.ordering import OrderingRules
from autoshard.compiler.schedule import Schedule
from autoshard.compiler.solved import SolvedProgram
from autoshard.cost.collectives import Collective
from autoshard.graph.layout import shard_bytes


def made_first(solved: SolvedProgram, rules: OrderingRules) -> dict[int, int]:
    """The products that would run right behind a kernel that makes what they read with other values, but that what
    this kernel is made of waits for: operation -> group.

    They are among those of `early_products.products_first`. None where collectives hide behind kernels, though products
    are made in turn there, too: copies and sums are then there for longer than is counted (`hiding_spans.py`), and what
    is not there makes up for them.

    Args:
      solved: The program. rules: Which orders its compiler needs.
    """
    delayed, early = solved.analysis.live.delayed, solved.analysis.early_products
    if not delayed or rules.schedule is Schedule.LATENCY_HIDING:
        return {}
    found: dict[int, int] = {}
    for group in solved.analysis.groups:
        for o in delayed.keys() & early.keys() & set(group.operations):
            readers = [c.index for c, _ in solved.analysis.chains.consumers[early[o].operand] if c.rule.is_heavy]
            is_between = any([o < reader < delayed[o] for reader in readers])
            sums = solved.sums[group.index]
            if is_between and _is_made_first(solved, early[o], sums, rules.product_workspace_bytes):
                found[o] = group.index
    return found


def _is_made_first(
    solved: SolvedProgram, product: EarlyProduct, sums: Sequence[Collective], workspace_bytes: float
) -> bool:
    """Whether others wait for a product whose partial sums are reduced by `sums`."""
    if product.is_convolution or product.is_term:
        return product.is_convolution
    partial_bytes = max([c.buffer_bytes for c in sums], default=0.0)
    is_scattered = any([c.kind is CollectiveKind.REDUCE_SCATTER for c in sums])
    if not sums or (is_scattered and is_reduced_alone(partial_bytes)):
        return True
    return frees_more(_ending_bytes(solved, product), partial_bytes, workspace_bytes)


def _ending_bytes(solved: SolvedProgram, product: EarlyProduct) -> float:
    """What the operands that end with a product take on a device as it reads them."""
    operation, values = product.instruction.leaf, solved.analysis.graph.values
    read_as = {**solved.layouts}
    read_as.update((m.value, m.target) for m in solved.moves if operation.index in solved.readers(m))
    ending = {v for slot in product.ending if (v := operation.operands[slot]) is not None and v in read_as}
    return sum([shard_bytes(float(values[v].size_bytes), read_as[v], solved.mesh.shape) for v in ending])
