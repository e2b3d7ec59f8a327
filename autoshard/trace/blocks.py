"""The annotated blocks that an equation stands in, read from its name stack.

A scope's name passes through differentiation, transposition, batching, loops and checkpoints. Equations of a nested
program carry the scopes inside it; those around it are on the equation that nests it.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from autoshard.annotations.block import Block, BlockKind, block_of_scope, joined_blocks
from autoshard.trace.walk import nested_programs, open_jaxpr


class Blocks:
    """The blocks of many equations; each distinct name stack is read once."""

    def __init__(self):
        self.known: dict[int, tuple[Any, tuple[Block, ...]]] = {}
        """By the identity of a name stack, which is kept so that no other can take it over."""

    def of(self, equation: jex.JaxprEqn) -> tuple[Block, ...]:
        """The blocks around an equation within its own program, the outermost first."""
        stack = equation.source_info.name_stack
        found = self.known.get(id(stack))
        if found is None:
            names = (getattr(scope, "name", None) for scope in stack.stack)
            blocks = (block_of_scope(name) for name in names if isinstance(name, str))
            found = self.known[id(stack)] = stack, joined_blocks((), (b for b in blocks if b is not None))
        return found[1]


def standing_in(equation: jex.JaxprEqn, around: Any) -> jex.JaxprEqn:
    """An equation of a nested program put among those around it: with the scopes of `around`, a name stack, too."""
    info = equation.source_info
    if not around.stack:
        return equation
    return equation.replace(source_info=info.replace(name_stack=around + info.name_stack))


def without_blocks(equation: jex.JaxprEqn, outer: Sequence[Block]) -> jex.JaxprEqn:
    """An equation without the scopes of some blocks."""
    info = equation.source_info
    kept = tuple(s for s in info.name_stack.stack if block_of_scope(str(getattr(s, "name", ""))) not in outer)
    if len(kept) == len(info.name_stack.stack):
        return equation
    return equation.replace(source_info=info.replace(name_stack=type(info.name_stack)(kept)))


def program_blocks(closed: jex.ClosedJaxpr) -> list[tuple[Block, ...]]:
    """The blocks around the equations of a program, those that ask something of operations: each nesting once."""
    reader, found = Blocks(), dict[tuple[Block, ...], None]()

    def visit(jaxpr: jex.Jaxpr, around: tuple[Block, ...]) -> None:
        for equation in jaxpr.eqns:
            blocks = joined_blocks(around, reader.of(equation))
            found.setdefault(tuple(b for b in blocks if b.kind in (BlockKind.REPLICATE, BlockKind.SPLIT)))
            for nested in nested_programs(equation):
                visit(open_jaxpr(nested), blocks)

    visit(closed.jaxpr, ())
    return list(found)


def asks_for_stages(blocks: tuple[Block, ...]) -> Block | None:
    """The first of some blocks that only a step in stages can obey."""
    return next((b for b in blocks if b.kind in (BlockKind.PIPELINE, BlockKind.STAGE)), None)
