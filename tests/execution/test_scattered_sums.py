"""Sums of which each device keeps a piece."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from autoshard.execution.apply import Evaluator
from autoshard.execution.scattered_sums import scattered_sum, sum_of_pieces
from autoshard.graph.equation_plan import EquationPlan
from autoshard.trace.walk import equation_numbers


@pytest.mark.parametrize("axes", [("a",), ("b",), ("a", "b"), ("b", "a"), ("a", "c")])
@pytest.mark.parametrize(("dim", "dtype"), list(itertools.product([0, 1, 2], [jnp.float32, jnp.bfloat16, jnp.int32])))
def test_an_exchange_of_pieces_sums_as_a_reduce_scatter_does(axes, dim, dtype):
    """On a mesh of 2 x 2 x 2; of small whole numbers, so that every order of adding gives the same."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    x = jnp.asarray(np.random.default_rng(0).integers(-4, 5, (8, 4, 8, 12)), dtype)

    def both(x):
        return sum_of_pieces(x[0], axes, dim), scattered_sum(x[0], axes, dim, mesh)

    specs = PartitionSpec(("a", "b", "c"))
    run = jax.shard_map(lambda x: [y[None] for y in both(x)], mesh=mesh, in_specs=specs, out_specs=[specs, specs])
    by_exchange, by_scatter = jax.jit(run)(x)
    assert by_exchange.dtype == dtype
    np.testing.assert_array_equal(np.asarray(by_exchange, np.float32), np.asarray(by_scatter, np.float32))


def scattered(x, y):
    return x @ y


def added(zeros, ids, rows):
    return zeros.at[ids].add(rows)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("is_product", [True, False], ids=["product", "scatter-add"])
def test_a_plan_that_exchanges_parts_makes_the_sum(dim, is_product):
    """Of small whole numbers on four devices, by all-to-alls alone."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    draw = np.random.default_rng(0)
    result = ((("data",), ()), ((), ("data",)))[dim]
    if is_product:
        fn, layouts = scattered, [((), ("data",)), (("data",), ())]
        args = [draw.integers(-4, 5, shape).astype(np.float32) for shape in ((8, 16), (16, 12))]
        operands = ((0, (layouts[0],)), (1, (layouts[1],)))
    else:
        fn, layouts = lambda ids, rows: added(jnp.zeros((8, 12)), ids, rows), [(("data",),), (("data",), ())]
        args = [draw.integers(0, 8, 16), draw.integers(-4, 5, (16, 12)).astype(np.float32)]
        operands = ()
    closed = jax.make_jaxpr(fn)(*args)
    name = "dot_general" if is_product else "scatter-add"
    numbers = equation_numbers(closed.jaxpr)
    ((number, equation),) = [p for p in zip(numbers, closed.jaxpr.eqns, strict=True) if p[1].primitive.name == name]
    if not is_product:  # zeros, ids, rows
        ids_dims = len(equation.invars[1].aval.shape)
        operands = ((1, ((("data",), *[()] * (ids_dims - 1)),)), (2, (layouts[1],)))
    plan = EquationPlan(operands, ((0, result),), scatters=(("data", dim),), exchanges_parts=True)
    run = jax.jit(lambda *own: Evaluator(mesh, {number: plan})(closed, own, layouts)[0])
    np.testing.assert_array_equal(run(*args), fn(*args))
    text = run.lower(*args).compile().as_text()
    assert "all-to-all" in text and "all-reduce" not in text and "reduce-scatter" not in text
