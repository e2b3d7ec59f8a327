"""Sums in two stages are the sums, on a device and over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.compiler.ordering import OrderingRules, ordered
from autoshard.execution.apply import Evaluator
from autoshard.graph.equation_plan import EquationPlan
from autoshard.trace.trace import trace

RULES = OrderingRules(sums_by_block=True)


@pytest.mark.parametrize("scattered", [False, True], ids=["reduced", "scattered"])
@pytest.mark.parametrize(
    ("shape", "summed", "split"),
    [
        ((4096, 8), (0,), ((), ())),
        ((8192, 8), (0,), (("data",), ())),
        ((16, 512, 8), (0, 1), (("data",), (), ())),
        ((16, 512, 8), (0, 1), ((), ("data",), ())),
        ((4, 1, 1024, 8), (2,), (("data",), (), (), ())),
    ],
)
def test_two_stages_sum_as_one_does(shape, summed, split, scattered):
    """Of whole numbers, so that every order of adding gives the same; on four devices."""
    fn = lambda x: jnp.sum(x, summed)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    left = tuple(axes for dim, axes in enumerate(split) if dim not in summed)
    is_partial = any(split[dim] for dim in summed)
    if scattered and not is_partial:
        pytest.skip("nothing is summed over devices")
    own = (("data",),) if scattered else left
    scatters = (("data", 0),) if scattered else ()
    plan = {0: EquationPlan(operands=((0, (split,)),), results=((0, own),), scatters=scatters)}
    closed = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(shape, jnp.float32))
    plans = ordered(trace(fn, list(closed.in_avals)).graph, plan, [split], mesh.shape, RULES).equations
    assert plans[0].sums_first
    run = jax.jit(lambda x: Evaluator(mesh, plans)(closed, [x], [split]))
    x = np.random.default_rng(0).integers(-9, 10, shape).astype(np.float32)
    np.testing.assert_array_equal(run(x)[0], fn(x))
    assert str(jax.make_jaxpr(run)(x)).count("reduce_sum") == 2


def test_what_is_summed_at_once_stays_so():
    shape = jax.ShapeDtypeStruct((4096, 8), jnp.float32)
    graph = trace(lambda x: jnp.sum(x, 0), [shape]).graph
    assert not any(p.sums_first for p in ordered(graph, {}, [((), ())], {}, OrderingRules()).equations.values())
