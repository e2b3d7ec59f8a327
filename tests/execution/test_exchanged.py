"""Look-ups whose rows are exchanged for ids: equal to one device, whatever the ids, the mesh and the slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from autoshard import Plan
from autoshard.cost.lookups import Lookups
from autoshard.planner.build import formulate
from autoshard.planner.program import prepare
from autoshard.plans.make import Origin, plan_of_choices
from autoshard.solver.problem import Certificate, Status
from autoshard.trace.trace import trace

ROWS, WIDTH, BATCH = 1 << 15, 16, 64


def exchanging_plan(fn, args, mesh, cluster, seed, lookups, num_axes=None) -> Plan:
    """A plan whose choices are drawn at random, but exchange ids, over so many axes, wherever they can."""
    traced = trace(fn, args, ())
    f = formulate(
        prepare(traced.graph),
        cluster.slices()[0].logical_mesh(mesh),
        None,
        [None] * len(traced.graph.arguments),
        lookups=lookups,
    )
    rng, first, picks = np.random.default_rng(seed), len(traced.graph.arguments), []
    for n, node in enumerate(f.problem.nodes):
        able = range(len(node.costs))
        if n >= first:
            choices = f.tables[n - first].choices
            counts = [len(choices[f.decisions[n].rows[k]].exchanged) for k in able]
            able = [k for k in able if counts[k] and num_axes in (None, counts[k])] or able
        picks.append(int(rng.choice(list(able))))
    certificate = Certificate(Status.FEASIBLE, 0.0, 0.0, 0.0, 0.0)
    origin = Origin("random", cluster.name, ())
    return Plan.of(plan_of_choices(traced, f, picks, origin=origin, certificate=certificate))


def exchanges(plan: Plan):
    return [e.exchange for _, e in plan.shardings if e.exchange is not None]


def step(mode, params, ids, target):
    """Look-ups in one table, or in several that are stacked, their gradients, and plain SGD."""

    def loss(p):
        if p["table"].ndim == 2:
            rows = p["table"].at[ids[:, 0]].get(mode=mode)
        else:
            rows = jax.vmap(lambda table, own: table.at[own].get(mode=mode), (0, 1), 1)(p["table"], ids).sum(1)
        return ((jnp.tanh(jnp.nan_to_num(rows) * p["scale"]) - target) ** 2).sum()

    value, gradients = jax.value_and_grad(loss)(params)
    # steps that stay small where all ids are one: errors of rounding must not grow from step to step
    return jax.tree.map(lambda p, g: p - 0.5 / BATCH * g, params, gradients), value


def ids_of(kind: str, rng: np.random.Generator) -> np.ndarray:
    shape = BATCH, 4
    match kind:
        case "uniform":
            return rng.integers(0, ROWS, shape)
        case "zipf":
            return (rng.zipf(1.2, shape) - 1).clip(0, ROWS - 1)
        case "one id":
            return np.full(shape, 7)
        case "one owner":
            return rng.integers(ROWS - ROWS // 8, ROWS, shape)
        case _:
            return rng.integers(-ROWS - 5, 2 * ROWS, shape)


KINDS = ("uniform", "zipf", "one id", "one owner", "out of range")


@settings(max_examples=5, deadline=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(KINDS),
    mode=st.sampled_from(["clip", "fill"]),
    mesh=st.sampled_from([{"a": 8}, {"a": 2, "b": 4}, {"a": 4, "b": 2}]),
    factor=st.sampled_from([1.0, 0.1, 0.01]),
    tables=st.sampled_from([(), (4,)]),
)
def test_three_steps_equal_one_device(cluster, seed, kind, mode, mesh, factor, tables):
    check(cluster, seed, kind, mode, mesh, factor, tables)


@pytest.mark.parametrize(("kind", "mode"), [("one owner", "clip"), ("out of range", "fill")])
def test_what_exceeds_the_slots_is_not_lost(cluster, kind, mode):
    """One slot an owner, over two axes, or over one beside another that makes partial sums."""
    check(cluster, 3, kind, mode, {"a": 2, "b": 4}, 0.01, ())


def check(cluster, seed, kind, mode, mesh, factor, tables):
    rng = np.random.default_rng(seed)
    fn = lambda *args: step(mode, *args)
    params = {
        "table": jnp.asarray(rng.normal(size=(*tables, ROWS, WIDTH)), jnp.float32),
        "scale": jnp.asarray(rng.normal(size=(1, WIDTH)), jnp.float32),
    }
    target = jnp.asarray(rng.normal(size=(BATCH, WIDTH)), jnp.float32)
    ids = [jnp.asarray(ids_of(kind, rng), jnp.int32) for _ in range(3)]
    plan = exchanging_plan(
        fn, (params, ids[0], target), mesh, cluster, seed, Lookups(slots_factor=factor, exchange="any")
    )
    found = exchanges(plan)
    assert len(found) == 2, "a look-up and its gradient"
    if factor == 0.01:
        assert all(e.slots == 1 for e in found)
    run, alone = plan.jit(fn), jax.jit(fn)
    sharded = reference = params
    for batch in ids:
        sharded, loss = run(sharded, batch, target)
        reference, wanted = alone(reference, batch, target)
        np.testing.assert_allclose(loss, wanted, rtol=2e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), sharded, reference)
