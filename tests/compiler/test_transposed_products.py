"""Products that are transposed at once get their layout from the transposition."""

import jax.numpy as jnp
import pytest
from planned import planned

from autoshard.compiler.transposed_products import transposed_at_once
from autoshard.graph.equation_plan import EquationPlan

ROWS, COLUMNS, WHOLE = ((), ("data",), ()), ((), (), ("data",)), ((), (), ())


def gradient(x, y):
    return jnp.swapaxes(jnp.einsum("ecd,ecf->edf", x, y), 1, 2)


def heads(x, y):
    return jnp.swapaxes(jnp.einsum("ecd,ecf->edf", x, y), 0, 1)


def dot_and_transpose(fn, shape, plans):
    """The computation of the two, and the equation of the product; `plans` are those of the product and of what
    transposes it."""
    names = {i.name: i.equation for c in [planned(fn, [shape] * 2, {}, {}).entry] for i in flat(c)}
    product, transpose = names["dot_general"], names["transpose"]
    graph = planned(fn, [shape] * 2, dict(zip((product, transpose), plans, strict=True)), {"data": 2})
    return graph, product


def flat(computation):
    for instruction in computation:
        yield instruction
        for nested in instruction.nested:
            yield from flat(nested)


@pytest.mark.parametrize(
    ("fn", "product", "turning", "is_turned"),
    [
        (gradient, EquationPlan(results=((0, ROWS),)), EquationPlan(results=((0, COLUMNS),)), True),
        (gradient, EquationPlan(results=((0, ROWS),)), EquationPlan(results=((0, ROWS),)), False),
        (
            gradient,
            EquationPlan(results=((0, ROWS),)),
            EquationPlan(operands=((0, (WHOLE,)),), results=((0, COLUMNS),)),
            False,
        ),
        (
            gradient,
            EquationPlan(results=((0, ROWS),), scatters=(("data", 1),)),
            EquationPlan(results=((0, COLUMNS),)),
            False,
        ),
        (heads, EquationPlan(results=((0, WHOLE),)), EquationPlan(results=((0, WHOLE),)), False),
    ],
    ids=["same layout", "other layout", "moved", "scattered", "batches"],
)
def test_a_product_that_is_transposed_where_it_is_has_no_layout_of_its_own(fn, product, turning, is_turned):
    graph, number = dot_and_transpose(fn, (4, 8, 8), (product, turning))
    assert [i.name for i in graph.entry] == ["dot_general", "transpose"]
    assert transposed_at_once(graph, graph.entry, False) == (frozenset({number}) if is_turned else frozenset())


def test_on_tpus_products_without_batches_are_transposed_at_once_too():
    rows, columns = EquationPlan(results=((0, ((), ("data",))),)), EquationPlan(results=((0, (("data",), ())),))
    graph, number = dot_and_transpose(lambda x, y: (x @ y).T, (8, 8), (rows, columns))
    assert [i.name for i in graph.entry] == ["dot_general", "transpose"]
    assert transposed_at_once(graph, graph.entry, without_batches=True) == {number}
    assert not transposed_at_once(graph, graph.entry, without_batches=False)
