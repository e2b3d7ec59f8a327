"""The gradient of a convolution kernel is made before the gradient of what the kernel is convolved with."""

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.compiler.ordering import OrderingRules, orderings
from autoshard.execution.apply import Evaluator
from autoshard.graph.equation_plan import EquationPlan
from autoshard.trace.trace import trace

X, KERNEL = (8, 5, 3), (3, 3, 4)


def convolve(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def step(momentum, x, kernel):
    """The gradients, the former added to a momentum, and of the latter what comes before it."""
    y, backward = jax.vjp(convolve, x, kernel)
    of_x, of_kernel = backward(y)
    return momentum + of_kernel, of_x


def test_the_gradient_of_what_is_convolved_waits_for_that_of_the_kernel_and_not_for_its_sum():
    """Examples are split over 4 devices, so that each has a part of the kernel's gradient."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    random = np.random.default_rng(0)
    args = [random.normal(size=shape).astype(np.float32) for shape in (KERNEL, X, KERNEL)]
    closed = jax.make_jaxpr(step)(*args)
    rows, whole = (("data",), (), ()), ((), (), ())
    layout = lambda v: rows if v.aval.shape[0] == 8 else whole
    wanted = {
        number: EquationPlan(
            operands=tuple((slot, (layout(v),)) for slot, v in enumerate(equation.invars)),
            results=((0, layout(equation.outvars[0])),),
        )
        for number, equation in enumerate(closed.eqns)
        if equation.primitive.name == "conv_general_dilated"
    }
    jaxpr = closed.jaxpr
    known = lambda given: dict(zip(jaxpr.invars, zip(given, [whole, rows, whole], strict=True), strict=True))
    order = orderings(trace(step, args).graph, wanted, [whole, rows, whole], mesh.shape, OrderingRules())
    plans = order(None).equations
    run = lambda *given: Evaluator(mesh, plans).part(jaxpr, range(len(jaxpr.eqns)), known(given), jaxpr.outvars)
    inside = [e.params["jaxpr"].eqns for e in jax.make_jaxpr(run)(*args).eqns if e.primitive.name == "shard_map"]
    names = [[e.primitive.name for e in equations] for equations in inside]
    own = ["conv_general_dilated"]
    assert names == [own, [*own, "optimization_barrier", "psum"], own], "y, then of the kernel, then of x"
    for found, expected in zip(jax.jit(run)(*args), step(*args), strict=True):
        np.testing.assert_allclose(found, jnp.asarray(expected), rtol=1e-4, atol=1e-4)
