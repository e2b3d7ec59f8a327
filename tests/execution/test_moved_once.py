"""What several products read in another layout is moved once, though all but the first wait for the first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.compiler.ordering import OrderingRules, orderings
from autoshard.execution.apply import Evaluator
from autoshard.graph.equation_plan import EquationPlan
from autoshard.trace.trace import trace


def by_product(gradient, x, weight):
    """Of `y = x @ weight`."""
    return jnp.einsum("bi,bo->io", x, gradient), jnp.einsum("bo,io->bi", gradient, weight)


def by_convolution(gradient, x, kernel):
    def convolve(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))

    return jax.vjp(convolve, x, kernel)[1](gradient)[::-1]


PROGRAMS = [
    # the gradient, of which each of 4 devices has rows, is read by columns: no sum is partial
    (by_product, ((8, 4), (8, 8), (8, 4)), (("data",), ()), ((), ("data",))),
    # the gradient, of which each has features, is read by examples: that of the kernel is a partial sum
    (by_convolution, ((8, 5, 4), (8, 5, 4), (3, 4, 4)), ((), (), ("data",)), (("data",), (), ())),
]


@pytest.mark.parametrize(("program", "shapes", "lies", "read"), PROGRAMS)
def test_a_gradient_that_two_products_read_in_another_layout_is_moved_once(program, shapes, lies, read):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    random = np.random.default_rng(0)
    args = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    closed = jax.make_jaxpr(program)(*args)
    gradient, x, _ = closed.jaxpr.invars
    whole = lambda v: ((),) * v.aval.ndim
    layouts = {gradient: read, x: read if program is by_convolution else whole(x)}
    wanted = {
        number: EquationPlan(operands=tuple((s, (layouts.get(v, whole(v)),)) for s, v in enumerate(e.invars)))
        for number, e in enumerate(closed.eqns)
        if e.primitive.name in ("dot_general", "conv_general_dilated")
    }
    given = [lies, *map(whole, closed.jaxpr.invars[1:])]
    plans = orderings(trace(program, args).graph, wanted, given, mesh.shape, OrderingRules())(None).equations
    run = jax.jit(lambda *args: Evaluator(mesh, plans)(closed, args, given))
    shardings = [jax.NamedSharding(mesh, jax.P(*(axes or None for axes in layout))) for layout in given]
    placed = list(map(jax.device_put, args, shardings))
    assert run.lower(*placed).compile().as_text().count(" all-to-all(") == 1
    for found, expected in zip(run(*placed), program(*args), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
