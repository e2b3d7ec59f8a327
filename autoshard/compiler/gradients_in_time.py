"""Which gradients must be there, summed, before what comes later reads its weights: for XLA:TPU, where collectives run
behind kernels.

Its latency-hiding scheduler, built from the end, puts what only the update of the state needs as late as it may: the
products that make gradients of weights, whose operands stay until then, and their exchanges; what these receive is
summed by the update's own kernel, and takes as much as the whole gradient until then. Of a Llama of two layers and of
experts on 16 TPU v5e the logits' gradient stayed through the whole backward pass, and they took half as much again as
was predicted. XLA:TPU computes what reads an activation, or the result of a product, inside a kernel, so that to hold
these back costs kernels (experts: 48 ms a step instead of 38). Weights no kernel makes: so a weight that is read later
waits for the sum.

Where layers are recomputed: what waits there adds to what is in use through all of the backward pass. Where activations
are kept, less and less is in use in it, and the same orders took a GPT of 8 layers 270 ms instead of 250, and 0.5 GB
more.
"""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence, Set

from autoshard.compiler.early_products import has_product, num_products
from autoshard.compiler.hiding_spans import EXCHANGED_WITHIN
from autoshard.compiler.prefetches import given_form
from autoshard.graph.computations import Computation, Instruction


@dataclasses.dataclass(frozen=True, slots=True)
class LateWeight:
    """An operand `slot` of the equation `reader`, a weight, that is read only when the results of `made` are summed;
    equations `along` that widen these come after."""

    made: int
    reader: int
    slot: int
    along: tuple[int, ...] = ()


def late_weights(order: Computation, awaited: Set[int | None], sizes_bytes: Sequence[float]) -> Iterator[LateWeight]:
    """For each product of one computation that nobody waits for, the largest weight of what is or contains the awaited
    product that is `EXCHANGED_WITHIN` after it, or of a later one.

    What contains products, such as a checkpointed layer, has sums of its own: it gets the time of the one after it.

    Args:
      order: The instructions of the computation in program order. awaited: What products are made of.
      sizes_bytes: Of each value.
    """
    made_at = {r: at for at, i in enumerate(order) for r in i.results if r is not None}
    products = [at for at, i in enumerate(order) if _is_counted(i, awaited)]
    passed = [0, *itertools.accumulate(num_products(order[at]) for at in products)]

    def is_weight(value: int | None, before: int) -> bool:
        """Whether a value is an argument of the computation in another form, made before a position."""
        while value is not None and (at := made_at.get(value)) is not None:
            value = given_form(order[at]) if at < before else None
        return value is not None

    readers: dict[int, list[int]] = collections.defaultdict(list)
    for at, instruction in enumerate(order):
        for o in dict.fromkeys(instruction.operands):
            if o is not None:
                readers[o].append(at)

    def forms(at: int, before: int) -> list[int]:
        """The positions of what a position makes and of the forms that it is given one after another before another."""
        found = [at]
        while True:
            read_at = [k for r in order[found[-1]].results if r is not None for k in readers[r]]
            if len(read_at) != 1 or read_at[0] >= before or given_form(order[read_at[0]]) is None:
                return found
            found.append(read_at[0])

    def late(at: int, later: int, slot: int) -> LateWeight:
        if order[at].nested:
            return LateWeight(order[at].equation, order[later].equation, slot)
        made = forms(at, later)
        least_bytes = sizes_bytes[order[at].result()]
        kept = next((k for k, form in enumerate(made) if sizes_bytes[order[form].result()] > least_bytes), len(made))
        if min(readers[order[made[-1]].result()], default=later) < later:  # then what widens it is read before
            kept = len(made)
        along = tuple(order[form].equation for form in made[kept:])
        return LateWeight(order[made[kept - 1]].equation, order[later].equation, slot, along)

    for at, instruction in enumerate(order):
        if not has_product(instruction) or all(r is None or r in awaited for r in instruction.results):
            continue
        number = bisect.bisect_right(products, at)
        first = number + 1 if instruction.nested else bisect.bisect_left(passed, passed[number] + EXCHANGED_WITHIN) - 1
        for later in products[first:]:
            operands = order[later].operands
            weights = {slot: o for slot, o in enumerate(operands) if o is not None and is_weight(o, at)}
            if weights:
                yield late(at, later, max(weights, key=lambda slot: sizes_bytes[weights[slot]]))
                break


def _is_counted(instruction: Instruction, awaited: Set[int | None]) -> bool:
    """Whether other products wait for one, or it contains products."""
    return has_product(instruction) and (bool(instruction.nested) or not awaited.isdisjoint(instruction.results))
