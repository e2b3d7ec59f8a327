"""State in host memory: which parts, at what price, and what they take on the device; by hand and by brute force."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cluster import Host, Link
from autoshard.compiler.buffer_uses import BufferKind
from autoshard.compiler.host_state import LEAST_BYTES, state_updates
from autoshard.planner.decode import decode, evaluate
from autoshard.planner.joined_axes import choices_apart, joined_meshes
from autoshard.planner.labels import labels_of
from autoshard.planner.program import prepare
from autoshard.solver import evaluate as objective_of
from autoshard.solver import solve
from autoshard.solver.options import SolverOptions
from autoshard.trace.trace import trace

LATENCY_S, BYTES_PER_S = 2e-6, 4e9
HOST = Host(8, 10**12, "test", to_device=Link(LATENCY_S, BYTES_PER_S, 0, "test"))
N = 512  # a float32 matrix of 1 MiB
F32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)


def momentum_step(state, x):
    """Two layers with heavy-ball momentum; written out, so that all is known."""
    loss = lambda w: jnp.mean(jnp.tanh(x @ w[0]) @ w[1])
    gradients = jax.grad(loss)(state["w"])
    momenta = [0.9 * m + g for m, g in zip(state["m"], gradients, strict=True)]
    weights = [w - 0.1 * m for w, m in zip(state["w"], momenta, strict=True)]
    return {"w": weights, "m": momenta}


STATE = {"w": [F32(N, N), F32(N, N)], "m": [F32(N, N), F32(N, N)]}
ARGS = STATE, F32(8, N)


def on_host(mesh):
    return dataclasses.replace(mesh, host=HOST)


def updates_of(fn, args, donate=(0,)):
    graph = trace(fn, args, donate).graph
    found = state_updates(prepare(graph).analysis)
    return graph, found, [sorted(graph.arguments[r.argument].name for r in update.reads) for update in found]


def hosted(f, picks):
    return [d.is_in_host(d.rows[k]) for d, k in zip(f.decisions[: len(f.program.graph.arguments)], picks, strict=False)]


def test_moments_may_lie_on_the_host_and_weights_may_not():
    _, _, names = updates_of(momentum_step, ARGS)
    assert sorted(names) == [["state.m.0"], ["state.m.1"]]


def test_what_is_not_donated_stays():
    assert updates_of(momentum_step, ARGS, donate=())[1] == ()


def test_small_state_stays():
    small = {"w": [F32(64, 64)] * 2, "m": [F32(64, 64)] * 2}
    assert 64 * 64 * 4 < LEAST_BYTES
    assert updates_of(momentum_step, (small, F32(8, 64)))[1] == ()


def test_state_that_the_loss_reads_stays():
    def averaging(state, x):
        loss = lambda w: jnp.mean(jnp.tanh(x @ w) @ state["mean"])
        w = state["w"] - 0.1 * jax.grad(loss)(state["w"])
        return {"w": w, "mean": 0.9 * state["mean"] + 0.1 * w}

    assert updates_of(averaging, ({"w": F32(N, N), "mean": F32(N, N)}, F32(8, N)))[1] == ()


def test_state_that_a_loop_updates_stays():
    def looping(state, x):
        g = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(state["w"])
        m = jax.lax.fori_loop(0, 3, lambda _, m: 0.9 * m + g, state["m"])
        return {"w": state["w"] - m, "m": m}

    assert updates_of(looping, ({"w": F32(N, N), "m": F32(N, N)}, F32(8, N)))[1] == ()


def test_updates_come_in_turn_and_at_most_two_are_on_the_device():
    optax = pytest.importorskip("optax")
    tx = optax.adamw(1e-3)

    def step(state, x):
        loss = lambda ws: jnp.mean(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) @ ws[2])
        updates, moments = tx.update(jax.grad(loss)(state["w"]), state["opt"], state["w"])
        return {"w": optax.apply_updates(state["w"], updates), "opt": moments}

    weights = [F32(N, N)] * 3
    graph, found, names = updates_of(step, ({"w": weights, "opt": jax.eval_shape(tx.init, weights)}, F32(8, N)))
    assert names == [[f"state.opt.0.mu.{k}", f"state.opt.0.nu.{k}"] for k in range(3)]
    products = [o.index for o in graph.operations if o.name == "dot_general"]
    assert found[0].start == max(products) + 1  # the last gradient
    for update, following in itertools.pairwise(found):
        assert following.after == update.equations[-1] < following.equations[-1]
        assert update.start < following.start < update.stop <= following.stop
    for t in range(len(graph.operations)):
        assert sum(update.start <= t < update.stop for update in found) <= 2


def test_the_first_update_waits_for_the_norm_of_all_gradients():
    """Where gradients are clipped, not for the sum of squares that the program makes last; and what does not depend on
    gradients, such as a decayed rate, is not waited for."""

    def clipped_step(state, x):
        loss = lambda w: jnp.mean(jnp.tanh(x @ w[0]) @ w[1])
        gradients = jax.grad(loss)(state["w"])
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
        is_large, rate = norm > 1.0, 0.1 / jnp.sqrt(state["count"] + 1.0)
        momenta = [0.9 * m + jnp.where(is_large, g / norm, g) for m, g in zip(state["m"], gradients, strict=True)]
        weights = [w - rate * m for w, m in zip(state["w"], momenta, strict=True)]
        return {"w": weights, "m": momenta, "count": state["count"] + 1}

    args = {**STATE, "count": F32()}, F32(8, N)
    jaxpr = jax.make_jaxpr(clipped_step)(*args)
    _, found, _ = updates_of(clipped_step, args)
    waited_for = jaxpr.eqns[found[0].after]
    assert waited_for.primitive.name == "gt"
    assert not waited_for.outvars[0].aval.shape


def test_price_and_memory_by_hand(mesh_of, formulated):
    """On four devices in a row: sharded or whole, in and out once each, and on the device only in its turn."""
    f = formulated(momentum_step, ARGS, on_host(mesh_of(4)), donate=(0,), offload="state")
    graph = f.program.graph
    for i, argument in enumerate(graph.arguments):
        decision, costs = f.argument_decision(i), f.problem.nodes[i].costs
        may = argument.name.startswith("state.m")
        assert (decision.first_in_host is not None) == may
        for row, cost_s in zip(decision.rows, costs, strict=True):
            parts = 1 if f.argument_layouts[i][row] == (-1,) else 4
            there = 2 * (LATENCY_S + 4 * N * N / parts / BYTES_PER_S)
            assert cost_s == pytest.approx(there if decision.is_in_host(row) else 0.0)
        if not may:
            continue
        uses = [
            (use, u.amounts)
            for use, u in zip(f.buffers, f.problem.usages, strict=False)
            if use.value == argument.value and u.node == i
        ]
        assert {use.kind for use, _ in uses} == {BufferKind.VALUE, BufferKind.HOST_COPY}
        for use, amounts in uses:
            for row, size_bytes in zip(decision.rows, amounts, strict=True):
                parts = 1 if f.argument_layouts[i][row] == (-1,) else 4
                is_there = decision.is_in_host(row) == (use.kind is BufferKind.HOST_COPY)
                assert size_bytes == (4 * N * N / parts if is_there else 0.0)


def test_layouts_and_costs_without_a_host_are_those_without_the_option(mesh_of, formulated):
    plain = formulated(momentum_step, ARGS, mesh_of(4), donate=(0,))
    asked = formulated(momentum_step, ARGS, mesh_of(4), donate=(0,), offload="state")
    assert asked.updates == () and asked.decisions == plain.decisions
    assert len(asked.problem.usages) == len(plain.problem.usages)


@pytest.mark.parametrize("share", [1.0, 0.8, 0.6, 0.5])
def test_the_best_plan_under_every_budget_is_that_of_brute_force(mesh_of, formulated, share):
    """Of all choices of where the momenta lie, each solved with all else free."""
    mesh = on_host(mesh_of(2))
    free = formulated(momentum_step, ARGS, mesh, donate=(0,), offload="state")
    limits = SolverOptions(time_limit_s=20, relative_gap=1e-6)
    most = objective_of(free.problem, solve(free.problem, limits).chosen).peak_usage
    f = formulated(momentum_step, ARGS, mesh, share * most, donate=(0,), offload="state")
    found = solve(f.problem, limits)
    numbers = [i for i in range(len(f.program.graph.arguments)) if f.argument_decision(i).first_in_host is not None]
    assert len(numbers) == 2
    costs = []
    for there in itertools.product((False, True), repeat=len(numbers)):
        nodes = list(f.problem.nodes)
        for i, in_host in zip(numbers, there, strict=True):
            decision = f.argument_decision(i)
            is_in_host = np.array([decision.is_in_host(row) for row in decision.rows])
            nodes[i] = dataclasses.replace(nodes[i], costs=np.where(is_in_host == in_host, nodes[i].costs, np.inf))
        own = solve(dataclasses.replace(f.problem, nodes=tuple(nodes)), limits)
        if own.choices is not None:
            costs.append(objective_of(f.problem, own.choices).objective)
    if not costs:
        assert found.choices is None
        return
    assert found.certificate.objective == pytest.approx(min(costs), rel=1e-5)
    assert found.certificate.bound <= min(costs) * (1 + 1e-9)
    if share == 1.0:
        assert not any(hosted(f, found.chosen))


def test_what_is_counted_is_what_the_plan_tells(mesh_of, formulated):
    """Any choices: the solver's objective and peak are those of the estimate, and host copies are their own rows."""
    f = formulated(momentum_step, ARGS, on_host(mesh_of(2, 2)), donate=(0,), offload="state")
    rng, seen = np.random.default_rng(0), 0
    for _ in range(20):
        picks = [int(rng.integers(len(node.costs))) for node in f.problem.nodes]
        told = evaluate(f, picks, as_compiled=False).estimate
        counted = objective_of(f.problem, picks)
        assert told.step_s == pytest.approx(counted.objective, rel=1e-9)
        assert told.peak_bytes == pytest.approx(counted.peak_usage, rel=1e-9)
        there = {f.program.graph.arguments[i].name for i, is_there in enumerate(hosted(f, picks)) if is_there}
        assert {c.value for c in told.host_copies} == there
        assert sum(c.time_s for c in told.host_copies) <= told.exposed_s * (1 + 1e-9)
        assert decode(f, picks).in_host == {n for n, is_there in enumerate(hosted(f, picks)) if is_there}
        seen += len(there)
    assert seen


def test_choices_mean_where_it_lies(mesh_of, formulated):
    f = formulated(momentum_step, ARGS, on_host(mesh_of(4)), donate=(0,), offload="state")
    for names in labels_of(f).choices:
        assert len(set(names)) == len(names)


def test_joined_axes_keep_what_lies_on_the_host(mesh_of, formulated):
    mesh = on_host(mesh_of(2, 2, 2))
    f = formulated(momentum_step, ARGS, mesh, donate=(0,), offload="state")
    for first, small in joined_meshes(mesh):
        joined = formulated(momentum_step, ARGS, small, donate=(0,), offload="state")
        picks = solve(joined.problem, SolverOptions(time_limit_s=10)).chosen
        picks = [
            len(node.costs) - 1 if joined.program.graph.arguments[i].name.startswith("state.m") else k
            for i, (node, k) in enumerate(zip(joined.problem.nodes, picks, strict=True))
            if i < len(joined.program.graph.arguments)
        ] + list(picks[len(joined.program.graph.arguments) :])
        apart = choices_apart(f, joined, first, picks)
        assert apart is not None and hosted(f, apart) == hosted(joined, picks) and any(hosted(f, apart))
