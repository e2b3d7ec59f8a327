"""What is summed stays row by row in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from planned import planned

from autoshard.compiler.row_major import RowMajor, added_to_state, is_gathered_inside, may_be_turned, row_major
from autoshard.execution.row_major import shards_row_major
from autoshard.graph.equation_plan import EquationPlan


def is_turned(shape, summed, entries, axis_sizes):
    graph = planned(lambda x: jax.lax.reduce_sum(x, summed), [shape], {}, axis_sizes)
    (reduction,) = graph.entry
    return may_be_turned(graph, reduction, entries)


@pytest.mark.parametrize(
    ("summed", "expected"),
    [((0,), True), ((1,), True), ((2,), False), ((1, 2), False), ((0, 1), False)],
    ids=["outer", "middle", "inner: is row by row anyway", "a vector is left", "a vector is left too"],
)
def test_sums_that_leave_a_matrix_and_not_only_inner_dimensions(summed, expected):
    assert is_turned((64, 64, 64), summed, ((), (), ("data",)), {"data": 2}) == expected


def test_sums_of_few_elements_on_each_device_are_left_alone():
    for ways, expected in ((2, True), (4, False)):  # 32 and 16 elements
        assert is_turned((64, 4, 4), (0,), (("data",), (), ()), {"data": ways}) == expected


def test_what_a_sum_reads_in_another_layout_than_it_lies_in_is_judged_as_it_is_read():
    """Of the 64 elements that are summed, each of four devices has all, or 16 if it reads its share alone."""
    lies, apart = ((), (), ("data",)), (("data",), (), ())
    for read, expected in ((lies, {0: RowMajor((0,))}), (apart, {})):
        plans = {0: EquationPlan(operands=((0, (read,)),))}
        graph = planned(lambda x: jax.lax.reduce_sum(x, (0,)), [(64, 4, 4)], plans, {"data": 4}, [lies])
        assert row_major(graph) == expected


def test_values_are_kept():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = np.arange(8 * 4 * 6.0, dtype=np.float32).reshape(8, 4, 6)
    kept = jax.jit(lambda x: shards_row_major(x, P(("data", "tensor")), mesh))(x)
    np.testing.assert_array_equal(kept, x)
    assert kept.sharding.spec == P(("data", "tensor"))


def momentum(weight, mean, gradient, scale):
    return weight - scale * (0.9 * mean + gradient), mean.reshape(6, 4), mean @ gradient.T


MOMENTUM = [(4, 6), (4, 6), (4, 6), ()]
LAYOUTS = {n: EquationPlan(results=((0, ((), ())),)) for n in range(8)}


def names_of(graph, kept):
    return {i.name: kept[i.equation].operands for i in graph.entry if i.equation in kept}


def test_what_an_update_adds_to_the_state_is_found():
    """The state is a weight (4, 6) and its mean; the scale and the reshaped mean have other shapes."""
    graph = planned(momentum, MOMENTUM, LAYOUTS, {}, donate=(0, 1))
    found = names_of(graph, row_major(graph))
    assert found == {"add": (1,), "sub": (1,)}, "the gradient to the mean, the step to the weight"


def test_of_state_that_went_through_a_barrier_nothing_is_known():
    """The product reads the mean, and what reads that later waits for the product: so does the sum of the next step."""

    def twice(weight, mean, gradient, scale):
        product = mean @ gradient.T
        return weight - scale * gradient, 0.9 * mean + gradient, product

    for waits, expected in (((), {"sub": (1,), "add": (1,)}), ((0,), {"sub": (1,)})):
        plain = planned(twice, MOMENTUM, LAYOUTS, {}, donate=(0, 1))
        product = next(i.equation for i in plain.entry if i.name == "dot_general")
        plans = {**LAYOUTS, product: EquationPlan(results=((0, ((), ())),), waits=waits)}
        graph = planned(twice, MOMENTUM, plans, {}, donate=(0, 1))
        assert names_of(graph, row_major(graph)) == expected


def added(shape, state, scattered):
    graph = planned(jnp.add, [shape, shape], {}, {})
    (add,) = graph.entry
    values = add.operands
    return added_to_state(graph.graph, add, {values[s] for s in state}, {values[s] for s in scattered})


def test_only_matrices_are_kept():
    assert added((6,), [0], []) == ()


def test_what_is_scattered_is_left_alone():
    assert [added((6, 4), [0], scattered) for scattered in ([], [1])] == [(1,), ()]


@pytest.mark.parametrize(
    ("entries", "wanted", "is_inside"),
    [
        (((), (), ("data",)), ((), (), ()), True),
        ((("data",), ()), ((), ()), False),
        (((), ()), ((), ("data",)), False),
        (((), ("data", "tensor")), (("data",), ("tensor",)), True),
    ],
    ids=["inner", "outermost", "slice", "moved outwards"],
)
def test_what_is_gathered_along_an_inner_dimension(entries, wanted, is_inside):
    assert is_gathered_inside(entries, wanted) == is_inside


def summed(w, v, xs, start):
    """What is computed of rows of x and of a weight; the other weight is not read inside."""
    body = lambda total, x: (total + jnp.tanh(x @ w), None)
    return jax.lax.scan(body, start, xs)[0] @ v


def test_arguments_that_a_scan_reads_are_kept():
    """Not what it slices, nor what it begins with."""
    graph = planned(summed, [(8, 6), (6, 6), (4, 5, 8), (5, 6)], {}, {})
    scan = next(i for i in graph.entry if i.name == "scan")
    kept = row_major(graph)[scan.equation].operands
    assert [graph.graph.values[scan.operands[slot]].shape for slot in kept] == [(8, 6)]


def test_what_is_made_for_a_scan_is_left_alone():
    """The compiler may make it in any order."""
    graph = planned(lambda w, *rest: summed(jnp.tanh(w), *rest), [(8, 6), (6, 6), (4, 5, 8), (5, 6)], {}, {})
    assert not any(i.name == "scan" and i.equation in row_major(graph) for i in graph.entry)
