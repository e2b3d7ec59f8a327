"""Stretches over the same operations in other layers: which they are, and that weights of theirs prove as much."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.compiler.schedule import Schedule
from autoshard.planner.build import branched, repriced
from autoshard.planner.overlap import StretchWeights
from autoshard.planner.step_times import StepTimes
from autoshard.planner.stretch_copies import StretchCopies
from autoshard.plans.master_problem import MasterProblem
from autoshard.solver import SolverOptions, solve

LAYERS = 6


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def train(params, x):
    """Layers in a Python loop, each of which is computed again for the backward pass, and their update."""

    @jax.checkpoint
    def layer(x, p):
        return x + jnp.tanh(x @ p["up"]) @ p["down"]

    def loss(params):
        y = x
        for p in params:
            y = layer(y, p)
        return jnp.sum(y * y)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


@pytest.fixture(scope="module")
def layers(formulated, mesh_of):
    mesh = mesh_of(4)
    mesh = dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, product_workspace_bytes=1024))
    args = ([{"up": f32(64, 256), "down": f32(256, 64)} for _ in range(LAYERS)], f32(1024, 64))
    return formulated(train, args, mesh, donate=(0,), schedule=Schedule.LATENCY_HIDING)


def plans_at_prices(f, times):
    """The plans that are best at several weights of the whole step."""
    whole = (0, len(f.program.graph.operations))
    weights = [StretchWeights(((w, whole),)) for w in (0.02, 0.2, 0.4, 0.6, 0.8, 1.0)]
    found = [solve(times.priced(f, w).problem, SolverOptions(relative_gap=1e-4)).chosen for w in weights]
    return list(dict.fromkeys(found))


def test_copies_are_all_equal_runs_of_kinds():
    """By comparing all stretches of random sequences of few kinds with one another."""
    rng = np.random.default_rng(0)
    for kinds in (rng.integers(0, 2, 30), np.tile([0, 1, 1, 2], 6), np.zeros(12, np.int64)):
        copies = StretchCopies(kinds)
        for start, stop in itertools.combinations(range(len(kinds) + 1), 2):
            length, own = stop - start, kinds[start:stop].tolist()
            starts = range(len(kinds) - length + 1)
            wanted = tuple((s, s + length) for s in starts if kinds[s : s + length].tolist() == own)
            assert copies.of((start, stop)) == wanted
            assert copies.of(wanted[-1]) is copies.of((start, stop))


def test_what_is_computed_again_is_no_copy_of_what_ran_before(layers):
    """A layer's stretch forward has one in each layer, but for the ends; none in the backward pass."""
    times, operations = StepTimes(layers), layers.program.graph.operations
    products = [o.index for o in operations if o.name == "dot_general"]
    forward, again = products[: 2 * LAYERS], products[2 * LAYERS :]
    own = times.copies_of((forward[2], forward[4]))
    assert LAYERS - 3 <= len(own) <= LAYERS - 1
    assert all(start in forward[::2] for start, _ in own)
    assert all(stop <= again[0] for _, stop in own)


def test_prices_are_those_of_the_problem_made_anew(layers):
    times, n = StepTimes(layers), len(layers.program.graph.operations)
    rng = np.random.default_rng(1)
    ends = [sorted(rng.choice(n + 1, 2, replace=False).tolist()) for _ in range(8)]
    several = tuple((0.1, (start, stop)) for start, stop in ends)
    branch = branched(layers, 2 * LAYERS + 3, [0])
    for f, weights in itertools.product((layers, branch), ((), ((0.7, (0, n)),), several)):
        made, anew = times.priced(f, StretchWeights(weights)), repriced(f, StretchWeights(weights))
        assert made.overlap == anew.overlap and made.branch == anew.branch
        for one, other in zip(made.problem.nodes, anew.problem.nodes, strict=True):
            assert one.name == other.name
            np.testing.assert_allclose(one.costs, other.costs, rtol=1e-9, atol=1e-15)
        for one, other in zip(made.problem.edges, anew.problem.edges, strict=True):
            np.testing.assert_allclose(one.costs, other.costs, rtol=1e-9, atol=1e-15)


def test_weights_at_once_are_those_one_by_one(layers):
    n = len(layers.program.graph.operations)
    weights = StretchWeights(((0.25, (0, n // 2)), (0.5, (n // 4, n)), (0.125, (3, 40))))
    places = np.arange(n)
    assert weights.of_operations(places).tolist() == [weights.of_operation(o) for o in range(n)]
    start, stop = np.array([(a, b) for a, b in itertools.combinations(range(0, n, 7), 2)]).T
    one_by_one = [weights.of_collective(window) for window in zip(start.tolist(), stop.tolist(), strict=True)]
    np.testing.assert_allclose(weights.of_collectives(start, stop), one_by_one)


def test_rows_together_bound_from_below_what_they_do_apart(layers):
    """And weights of a mixture never count more than once at any operation, and are equal in all copies."""
    times = StepTimes(layers)
    master = MasterProblem(times, None)
    for plan in plans_at_prices(layers, times):
        master.add(plan)
    products = [o.index for o in layers.program.graph.operations if o.name == "dot_general"]
    master._count([(products[2], products[4])], ())
    assert any(len(copies) > 1 for copies in master._stretches)
    mixture = master.mixture()
    columns = [list(master._columns.values())]
    together = master._program(columns).relaxed().value_s
    master._stretches = {(stretch,): 0 for copies in master._stretches for stretch in copies}
    apart = master._program(columns).relaxed().value_s
    assert together <= apart * (1 + 1e-9)
    n = len(layers.program.graph.operations)
    assert max(mixture.weights.of_operations(np.arange(n))) <= 1 + 1e-9
    by_stretch = {stretch: w for w, stretch in mixture.weights.stretches}
    for stretch, weight in by_stretch.items():
        assert {by_stretch.get(copy) for copy in times.copies_of(stretch)} == {weight}
