"""Collectives that the compiler spares, on hand-made layouts."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.compiler.emitted_collectives import emitted, requested
from autoshard.cost.collectives import CollectiveKind, all_gather, all_reduce
from autoshard.graph.layout import WHOLE
from autoshard.planner.decode import estimate


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def two_products(x, v, y, w):
    """Products of different factors, which are added."""
    return jnp.sum(x @ v + jax.lax.dot_general(y, w, (((1, 2), (0, 1)), ((), ()))))


TERMS = (f32(64, 64), f32(64, 64), f32(64, 4, 8), f32(4, 8, 64))


def whole(f, layout=(WHOLE,)) -> dict:
    """One layout for all values."""
    return dict.fromkeys(range(len(f.program.graph.values)), layout)


def summed(f, name: str) -> list:
    """The collectives of groups of which the operations `name` make partial sums of 4096 bytes, all-reduced."""
    operations = f.program.graph.operations
    step = all_reduce(f.mesh.axes, 4096.0)
    return [(step,) if operations[g.operations[0]].name == name else () for g in f.program.groups]


def sums_of(f, name: str) -> list[int]:
    """The values that the operations `name` make."""
    return [g.writes[-1].value for g, steps in zip(f.program.groups, summed(f, name), strict=True) if steps]


def test_two_copies_that_are_added_are_gathered_as_one(formulated, mesh_of, solved):
    """a + b of two gathered arguments: the sum is gathered. Where a is read again, or b is held otherwise, nothing is
    spared.
    """
    for fn, held, expected in (
        (lambda a, b: a + b, 0, 1),
        (lambda a, b: (a + b, jnp.sort(a)), 0, 3),
        (lambda a, b: a + b, 1, 2),
    ):
        f = formulated(fn, (f32(64, 64), f32(64, 64)), mesh_of(8))
        a, b = (x.value for x in f.program.graph.arguments)
        gather = (all_gather(f.mesh.axes, 64.0 * 64 * 4),)
        moves = tuple(gather if flow.value in (a, b) else () for flow in f.flows)
        c = solved(f, {**whole(f), a: (0,), b: (held,)}, [(WHOLE,)] * len(f.flows), collectives=moves)
        assert sum(map(len, emitted(c).moves)) == expected
        assert requested(c).moves == moves


def test_a_copy_that_is_spared_takes_no_memory(formulated, mesh_of):
    """An eighth of both arguments and the whole sum are there, and one copy: the solver counts both."""
    f = formulated(lambda a, b: a + b, (f32(64, 64), f32(64, 64)), mesh_of(8), pins=[(("a",), ())] * 2)
    whole = next(k for k, row in enumerate(f.decisions[2].rows) if f.tables[0].writes[0][row] == (WHOLE,))
    peaks = [estimate(f, (0, 0, whole), as_compiled=known).peak_bytes for known in (False, True)]
    assert peaks == [64 * 64 * 4 * (2 / 8 + 1 + n) for n in (2, 1)]


@pytest.mark.parametrize(("held", "expected"), [((WHOLE, 1), (1, 1)), ((WHOLE, 0), (2, 2))])
def test_sums_that_are_added_behind_one_gather_are_reduced_once(formulated, mesh_of, solved, held, expected):
    """Two products, each summed over a, held along b and read whole by their addition: pieces are added, reduced once
    and gathered once. Where the second is held along another dimension, nothing is spared.
    """
    f = formulated(two_products, TERMS, mesh_of(2, 4))
    one, two = sums_of(f, "dot_general")
    gather = (all_gather(f.mesh.axes[1:], 64.0 * 64 * 4),)
    layouts = {**whole(f, (WHOLE, WHOLE)), one: (WHOLE, 1), two: held}
    moves = [gather if flow.value in (one, two) else () for flow in f.flows]
    made = emitted(solved(f, layouts, [(WHOLE, WHOLE)] * len(f.flows), summed(f, "dot_general"), moves))
    assert (sum(map(len, made.sums)), sum(map(len, made.moves))) == expected


@pytest.mark.parametrize("use", ["carry", "carry and stack"])
def test_a_sum_that_a_loop_only_accumulates_is_reduced_behind_it(formulated, mesh_of, solved, use):
    """Four products are added to what the loop carries: one all-reduce of their sum; four if each is read besides."""

    def body(carry, x):
        row = jnp.tanh(x)  # larger than the sum, so that the product stays in the loop
        term = row @ row.T
        return carry + term.T, (term if use == "carry and stack" else None)

    f = formulated(lambda xs: jax.lax.scan(body, jnp.zeros((32, 32)), xs), (f32(4, 32, 64),), mesh_of(8))
    c = solved(f, whole(f), [(WHOLE,)] * len(f.flows), summed(f, "dot_general"))
    made = emitted(c)
    (group,) = (g for g, steps in enumerate(c.sums) if steps)
    assert requested(c).trips[group] == 4
    assert made.sums[group][0].kind is CollectiveKind.ALL_REDUCE
    assert made.trips[group] == (1 if use == "carry" else 4)
