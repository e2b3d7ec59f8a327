"""Which collectives of a scheduled program can run beside a matrix product: have one between their begin and their end.

XLA:GPU begins a collective with a `-start` and ends it with a `-done`. XLA:TPU does so too, or puts the collective into
every fusion that it runs beside (`carried_collectives.py`).
"""

from autoshard.hlo.carried_collectives import carried_collectives
from autoshard.hlo.collectives import compiled_collectives
from autoshard.hlo.compiled_schedule import collective_in, is_synchronous, start_of
from autoshard.hlo.flops import products_within
from autoshard.hlo.module import Computation, HloModule, Run


def beside_products(module: HloModule, axes: tuple[tuple[str, int], ...]) -> frozenset[str]:
    """The names of the collectives, as in `compiled_collectives`, that have a product between begin and end.

    Args:
      module: The compiled program of one device, in the order in which it runs.
      axes: (name, size) of the mesh that it was compiled for.
    """
    known = frozenset(c.name for c in compiled_collectives(module, axes))
    found: set[str] = set()
    for computation in {run.computation.name: run.computation for run in module.runs()}.values():
        found |= _beside(module, computation, known)
    return frozenset(found)


def _beside(module: HloModule, computation: Computation, known: frozenset[str]) -> set[str]:
    found: set[str] = set()
    begun: dict[str, tuple[str, int]] = {}  # the collective and the products before it, by what begins it
    carried = carried_collectives(module, computation, known)
    products = 0
    for instruction in computation.instructions.values():
        name = collective_in(module, instruction, known)
        before, products = products, products + any(products_within(module, Run(computation, instruction, 1.0, None)))
        for one in carried.get(instruction.name, ()):
            if one.begins:
                begun[one.name] = one.name, before
            elif products > begun[one.name][1]:
                found.add(one.name)
        if name is not None and not is_synchronous(instruction):
            begun[instruction.name] = name, products
        elif instruction.opcode.endswith("-done"):
            name, before = begun.get(start_of(computation, instruction), ("", products))
            if products > before:
                found.add(name)
    return found
