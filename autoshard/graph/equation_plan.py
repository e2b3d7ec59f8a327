"""What a plan says of one equation, as plain data: the contract between the planner and execution, which obeys it."""

import dataclasses

from autoshard.graph.layout import SpecEntries

SCATTERING = frozenset({"dot_general", "conv_general_dilated", "reduce_sum"})
"""Operations that execution runs by shards where their partial sums are scattered. XLA, left alone, sums whole first
where two axes go onto two dimensions, and may gather an operand where an axis joins a dimension in front of another.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class EquationPlan:
    """The layouts around one equation; a slot that is not named is left as it comes.

    Attributes:
      operands: (operand slot, the layouts it passes through; the last is the one in which the equation reads it).
      results: (result slot, layout).
      scatters: (mesh axis, dimension of the result): the partial sums over this axis are reduce-scattered onto this
        dimension, one after another. Of an equation in `SCATTERING`, which then runs by shards, all operands are named.
      body: For loops: (input slot of the body, layout inside). A carry has this layout before and after the body too.
      delayed: Operand slots whose copy must not be made before the other operands are there: it would be kept from an
        earlier equation that made the same one, or gathered while nobody needs it yet. Of a scatter, the constant that
        it begins with, which is filled then.
    """

    operands: tuple[tuple[int, tuple[SpecEntries, ...]], ...] = ()
    results: tuple[tuple[int, SpecEntries], ...] = ()
    body: tuple[tuple[int, SpecEntries], ...] = ()
    delayed: tuple[int, ...] = ()
    scatters: tuple[tuple[str, int], ...] = ()
