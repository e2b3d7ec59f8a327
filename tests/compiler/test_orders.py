"""Every order of a plan is told of, with the tensor that it is about."""

import jax
import jax.numpy as jnp

from autoshard.compiler.ordering import OrderingRules, orderings
from autoshard.compiler.orders import OrderKind, orders
from autoshard.graph.equation_plan import EquationPlan
from autoshard.trace.trace import trace

ROWS, WHOLE = (("data",), ()), ((), ())


def step(weight, x, gradient):
    """Plain gradient descent on a layer; what comes before it gets its gradient."""
    of_weight = jnp.einsum("bi,bo->io", x, gradient)
    return weight - of_weight, jnp.einsum("bo,io->bi", gradient, weight)


def test_what_is_told_of_is_what_equations_say():
    """On four devices, which share the rows of x (64, 8192) and of the gradient (64, 961), the gradient of the weight
    is scattered; its partial sum takes 31.5 MB, too much to be reduced with others."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8192, 961), (64, 8192), (64, 961))]
    graph = trace(step, shapes, (0,)).graph
    product = next(o for o in graph.operations if o.name == "dot_general")
    difference = next(o for o in graph.operations if o.name == "sub")
    plans = {
        product.equation: EquationPlan(
            operands=((0, (ROWS,)), (1, (ROWS,))), results=((0, ROWS),), scatters=(("data", 0),)
        ),
        difference.equation: EquationPlan(results=((0, ROWS),)),
    }
    names = {a.value: (a.name, graph.values[a.value].shape) for a in graph.arguments}
    for o in graph.operations:
        if o.name == "transpose":  # gradients may come out transposed
            plans.setdefault(o.equation, EquationPlan(results=((0, ROWS),)))
    planned = orderings(graph, plans, [ROWS, ROWS, ROWS], {"data": 4}, OrderingRules(turns_rows=True))(None)
    plan = planned.equations[product.equation]
    assert len(plan.waits) == 1 and not plan.waits_for_part
    assert len(planned.equations[difference.equation].row_major) == 1
    told = {order.kind: order for order in orders(planned)}
    assert set(told) == {OrderKind.WAITS_FOR_SUM, OrderKind.ROW_MAJOR} and len(orders(planned)) == 2
    waiting = told[OrderKind.WAITS_FOR_SUM]
    assert (waiting.tensor, waiting.shape) == names[graph.arguments[2].value], "both products read the gradient"
    assert waiting.size_bytes == 64 * 961 * 4 / 4 and waiting.equation == product.equation
    added = told[OrderKind.ROW_MAJOR]
    assert added.tensor == "operand of sub" and added.size_bytes == 8192 * 961 * 4 / 4
    assert all("test_orders.py" in order.source for order in told.values())
