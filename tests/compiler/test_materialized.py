"""What a product reads is stored, and not computed again from a gathered copy."""

import jax
import jax.numpy as jnp
import pytest
from planned import planned

from autoshard.compiler.materialized import is_made_of_a_copy, materialized
from autoshard.compiler.planned_graph import planned_graph
from autoshard.graph.equation_plan import EquationPlan
from autoshard.trace.trace import trace

WHOLE, SPLIT = ((), ()), ((), ("data",))
ADD, TANH, PRODUCT = 0, 1, 2
GATHERED = EquationPlan(operands=((0, (WHOLE,)),))


def activated(x, w):
    return jnp.tanh(x + x) @ w


def graph_of(plan, lies):
    """Of the function, whose sum and activation lie as said, with one plan for all that reads the argument or these."""
    equations = {n: EquationPlan(operands=plan.operands, results=((0, lies),)) for n in (ADD, TANH, PRODUCT)}
    return planned(activated, [(8, 8), (8, 8)], equations, {"data": 8}, [lies, WHOLE])


@pytest.mark.parametrize(
    ("lies", "plan", "is_copied"),
    [
        (SPLIT, GATHERED, True),
        (SPLIT, EquationPlan(), False),
        (WHOLE, EquationPlan(operands=((0, (SPLIT,)),)), False),
    ],
    ids=["gathered", "read as it is", "a slice is no copy"],
)
def test_only_what_products_read_and_gathered_operands_make_is_stored(lies, plan, is_copied):
    graph = graph_of(plan, lies)
    add, tanh, product = graph.entry
    assert [i.name for i in graph.entry] == ["add", "tanh", "dot_general"]
    assert [is_made_of_a_copy(graph, i) for i in (add, tanh)] == [is_copied] * 2
    assert not is_made_of_a_copy(graph, product), "a product's result is stored anyway"
    assert materialized(graph, graph.entry) == ({TANH: (0,)} if is_copied else {}), "of both, the product reads one"


def looked_up(table, ids):
    return jnp.tanh((2 * table)[ids])


def looked_up_in_what_is_made(x, w, ids):
    return jnp.tanh((x @ w)[ids])


@pytest.mark.parametrize(
    ("function", "shapes", "plan", "is_stored"),
    [
        (looked_up, [(8, 8)], GATHERED, True),
        (looked_up, [(8, 8)], EquationPlan(), False),
        (looked_up_in_what_is_made, [(8, 8), (8, 8)], GATHERED, False),
    ],
    ids=["a gathered parameter", "read as it lies", "a gathered activation"],
)
def test_rows_of_a_gathered_parameter_are_stored(function, shapes, plan, is_stored):
    """No product reads them."""
    args = [*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes), jax.ShapeDtypeStruct((4,), jnp.int32)]
    graph = trace(function, args, ()).graph
    look_up = next(o for o in graph.operations if o.name == "gather")
    lies = {o.equation: EquationPlan(results=((0, SPLIT),)) for o in graph.operations if o.index < look_up.index}
    equations = {**lies, look_up.equation: EquationPlan(operands=plan.operands, results=((0, WHOLE),))}
    found = planned_graph(graph, equations, [*([SPLIT] * len(shapes)), ((),)], {"data": 8})
    assert materialized(found, found.entry) == ({look_up.equation: (0,)} if is_stored else {})
