"""Residuals in host memory: which, at what price, and what they take on the device; by hand and by brute force."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cluster import Host, Link
from autoshard.compiler.buffer_uses import BufferKind
from autoshard.compiler.host_residuals import BEHIND_PRODUCTS, LEAST_AWAY, CopyTimes, HostResiduals
from autoshard.compiler.schedule import Schedule
from autoshard.planner.build import repriced
from autoshard.planner.decode import decode, evaluate
from autoshard.planner.joined_axes import choices_apart, joined_meshes
from autoshard.planner.labels import labels_of
from autoshard.planner.overlap import StretchWeights
from autoshard.planner.program import prepare
from autoshard.planner.step_times import StepTimes
from autoshard.solver import evaluate as objective_of
from autoshard.solver import solve
from autoshard.solver.options import SolverOptions
from autoshard.trace.trace import trace

LATENCY_S, BYTES_PER_S = 2e-6, 4e9
HOST = Host(8, 10**12, "test", to_device=Link(LATENCY_S, BYTES_PER_S, 0, "test"))
N, LAYERS = 512, 8  # a float32 matrix of 1 MiB
F32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
SIZE = 4 * N * N
ASKED = {"donate": (0,), "offload": "activations"}


def step_of(layer):
    """A step of gradient descent over layers of two products."""

    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = layer(y, w)
            return jnp.mean(y)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    return step


def plain(x, w):
    return jnp.tanh(x @ w[0]) @ w[1]


checkpointed = step_of(jax.checkpoint(plain))
ARGS = [(F32(N, N), F32(N, N))] * LAYERS, F32(N, N)


def on_host(mesh, is_gpu=False):
    if is_gpu:
        mesh = dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, product_workspace_bytes=1))
    return dataclasses.replace(mesh, host=HOST)


def found_in(fn, args=ARGS):
    program = prepare(trace(fn, args, (0,)).graph)
    return program.graph, HostResiduals(program.analysis)


def away(f, picks):
    """The numbers of the residuals that picks keep in host memory."""
    return {k for k, pick in enumerate(picks[len(picks) - len(f.all_residuals) :]) if pick}


def test_inputs_of_checkpointed_layers_may_go_but_for_the_last():
    """The forward pass has 14 products, 2 for each layer but the last, whose result no gradient needs. Each backward
    pass of a layer computes one again and makes 4, that of the first layer 3; it is one equation. The input of layer k,
    with 2 k products before it, waits 8 products long: for number 2 k + 8, or for the first backward pass, of layer 7,
    which has 14 before it. It comes back 8 products or more before its reader, the backward pass of layer k: when that
    of layer k + 2 begins, with 14 + 5 (5 - k) before it. For k = 3 these are 14 and 24, 4 or more apart; for k = 4 no
    product is number 16, the next begins with number 19, and it should come back before that.
    """
    graph, residuals = found_in(checkpointed)
    products = [o.index for o in graph.operations if o.name == "dot_general"]
    assert len(products) == 14 + 5 * 8 - 1 and (BEHIND_PRODUCTS, LEAST_AWAY) == (8, 4)
    before = lambda operation: sum(p < operation for p in products)
    assert len(residuals.all) == 3
    for k, residual in enumerate(residuals.all, 1):
        assert residual.made == products[2 * k - 1] + 1, "the second product of the layer before"
        assert before(residual.out.operation) == 2 * k + 8
        assert before(residual.back.operation) == 14 + 5 * (5 - k)
        assert before(residual.read) == 14 + 5 * (7 - k)


def test_what_else_is_computed_from_stays():
    """Without a checkpoint, tanh of the first product crosses, too; and an input that comes back by two names."""
    twice = step_of(lambda x, w: jnp.tanh(x.reshape(N * N).reshape(N, N) @ w[0]) @ w[1])
    graph, residuals = found_in(twice)
    for residual in residuals.all:
        made = next(o for o in graph.operations if residual.value in o.results)
        assert made.name != "dot_general" or len([o for o in graph.operations if residual.value in o.operands]) >= 2
    assert not {r.buffer for r in residuals.all} & {a.value for a in graph.arguments}


def test_small_ones_and_those_inside_loops_stay():
    small = [(F32(64, 64), F32(64, 64))] * LAYERS, F32(64, 64)
    assert found_in(checkpointed, small)[1].all == ()

    def looping(weights, x):
        body = lambda y, w: (jax.checkpoint(plain)(y, w), None)
        loss = lambda weights: jnp.mean(jax.lax.scan(body, x, weights)[0])
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    stacked = (F32(LAYERS, N, N), F32(LAYERS, N, N)), F32(N, N)
    assert found_in(looping, stacked)[1].all == ()


def test_price_and_memory_by_hand(mesh_of, formulated):
    """On four devices in a row: sharded or whole, out and in once each, and on the device only at both ends."""
    f = formulated(checkpointed, ARGS, on_host(mesh_of(4)), **ASKED)
    assert len(f.all_residuals) == 3
    edges = f.problem.edges[len(f.flows) :]
    for number, (residual, edge) in enumerate(zip(f.all_residuals, edges, strict=True)):
        costs = edge.costs[edge.source_class][:, edge.target_class]
        layouts = f.tables[edge.source - len(f.argument_layouts)].writes[-1]
        uses = [
            (use, u.amounts[edge.source_class])
            for use, u in zip(f.buffers[len(f.problem.usages) :], f.problem.edge_usages, strict=True)
            if u.edge == len(f.flows) + number
        ]
        assert [use.kind for use, _ in uses] == [BufferKind.VALUE, BufferKind.AROUND_HOST, BufferKind.AROUND_HOST]
        spans = [(use.start, use.stop) for use, _ in uses]
        assert spans[1] == (spans[0][0], residual.away[0]) and spans[2] == (residual.away[1], spans[0][1])
        assert spans[0][0] < residual.away[0] < residual.away[1] < spans[0][1]
        for row, cost in zip(f.decisions[edge.source].rows, costs, strict=True):
            shard_bytes = SIZE if layouts[row] == (-1,) else SIZE / 4
            assert cost.tolist() == [0.0, pytest.approx(2 * (LATENCY_S + shard_bytes / BYTES_PER_S))]
        for k, (_, amounts) in enumerate(uses):
            for row, (stays, goes) in zip(f.decisions[edge.source].rows, amounts, strict=True):
                shard_bytes = SIZE if layouts[row] == (-1,) else SIZE / 4
                assert (stays, goes) == ((shard_bytes, 0) if k == 0 else (0, shard_bytes))


def test_without_a_host_there_are_none(mesh_of, formulated):
    one, other = (formulated(checkpointed, ARGS, mesh_of(4), donate=(0,), offload=o) for o in ("never", "activations"))
    assert other.residuals is None and other.decisions == one.decisions
    assert len(other.problem.edge_usages) == len(one.problem.edge_usages)


@pytest.mark.parametrize("share", [1.0, 0.9, 0.8])
def test_the_best_plan_under_every_budget_is_that_of_brute_force(mesh_of, formulated, share):
    """Of all choices of which residuals go, each solved with all else free."""
    args = [(F32(N, N), F32(N, N))] * LAYERS, F32(16 * N, N)  # activations fill the memory
    mesh, limits = on_host(mesh_of(2)), SolverOptions(time_limit_s=20, relative_gap=1e-6)
    plain = formulated(checkpointed, args, mesh, donate=(0,))
    most = objective_of(plain.problem, solve(plain.problem, limits).chosen).peak_usage
    f = formulated(checkpointed, args, mesh, share * most, **ASKED)
    found, first = solve(f.problem, limits), len(f.problem.nodes) - len(f.all_residuals)
    assert len(f.all_residuals) == 3
    costs = []
    for places in itertools.product((0, 1), repeat=3):
        nodes = list(f.problem.nodes)
        for k, place in enumerate(places):
            own = np.full(2, np.inf)
            own[place] = 0.0
            nodes[first + k] = dataclasses.replace(nodes[first + k], costs=own)
        alone = solve(dataclasses.replace(f.problem, nodes=tuple(nodes)), limits)
        if alone.choices is not None:
            costs.append(objective_of(f.problem, alone.choices).objective)
    assert costs and found.choices is not None
    assert found.certificate.objective == pytest.approx(min(costs), rel=1e-5)
    assert found.certificate.bound <= min(costs) * (1 + 1e-9)
    assert bool(away(f, found.chosen)) == (share == 0.8), "at 0.9 other shardings take less than copies"


@pytest.mark.parametrize("is_gpu", [False, True])
def test_what_is_counted_is_what_the_plan_tells(mesh_of, formulated, is_gpu):
    """Any choices: the solver's peak is that of the estimate, and so is its objective where all times add up. Where
    copies hide, what a plan is timed by without being read is what its timeline says."""
    schedule = Schedule.LATENCY_HIDING if is_gpu else Schedule.LEAST_MEMORY
    f = formulated(checkpointed, ARGS, on_host(mesh_of(2, 2), is_gpu), schedule=schedule, **ASKED)
    times, rng, hidden_s = StepTimes(f) if is_gpu else None, np.random.default_rng(0), 0.0
    for _ in range(10):
        picks = [int(rng.integers(len(node.costs))) for node in f.problem.nodes]
        told, counted = evaluate(f, picks, as_compiled=False).estimate, objective_of(f.problem, picks)
        assert told.peak_bytes == pytest.approx(counted.peak_usage, rel=1e-9)
        assert len(told.residual_copies) == len(away(f, picks))
        hidden_s += sum(c.hidden_s for c in told.residual_copies)
        if times is None:
            assert told.step_s == pytest.approx(counted.objective, rel=1e-9)
            assert sum(c.time_s for c in told.residual_copies) <= told.exposed_s * (1 + 1e-9)
        else:
            own = times.of(np.array(picks))
            assert own.least_s.sum() + times.exposed(own)[1] == pytest.approx(told.step_s, rel=1e-9)
    assert (hidden_s > 0) == is_gpu


def test_prices_follow_weights(mesh_of, formulated):
    """Half the weight within both windows of a residual, none elsewhere: half of a copy and back counts."""
    f = formulated(checkpointed, ARGS, on_host(mesh_of(4), True), schedule=Schedule.LATENCY_HIDING, **ASKED)
    residual, whole = f.all_residuals[0], 2 * (LATENCY_S + SIZE / 4 / BYTES_PER_S)
    for weight, stretches in ((0.5, residual.windows), (0.0, ()), (1.0, [(0, len(f.program.graph.operations))])):
        own = repriced(f, StretchWeights(tuple((weight, stretch) for stretch in stretches)))
        edge = own.problem.edges[len(f.flows)]
        assert edge.costs[:, 1].min() == pytest.approx(weight * whole) and not edge.costs[:, 0].any()


def test_equations_tell_when_copies_wait(mesh_of, formulated):
    f = formulated(checkpointed, ARGS, on_host(mesh_of(4)), **ASKED)
    picks = [0] * (len(f.problem.nodes) - len(f.all_residuals)) + [1, 0, 1]
    plans = dict(decode(f, picks).shardings)
    for field in ("copies_out", "copies_back"):
        told = [(n, move) for n, plan in plans.items() for move in getattr(plan, field)]
        assert [n - move.made_before for n, move in told] == sorted(
            (f.all_residuals[k].equation for k in (0, 2)), reverse=field == "copies_back"
        )
    assert not any(plan.back_before for plan in plans.values())
    assert f.residuals is not None
    first = f.all_residuals[0]
    (early, late), products = first.windows, [w.operation for w in f.residuals.waiting[0]]
    times = CopyTimes(out_by=early[0] + 3, begun=late[1] - 1, back_by=late[1])
    said = f.residuals.ordered({}, {0: times})
    by_operation = {w.equation: w.operation for w in f.residuals.waiting[0]}
    (out,) = [by_operation[n] for n, plan in said.items() if plan.copies_out]
    (back,) = [by_operation[n] for n, plan in said.items() if plan.copies_back]
    assert out == min(p for p in products if p >= times.out_by) < early[1]
    assert back == max(p for p in products if p <= times.begun) >= late[0]


def test_choices_mean_where_it_lies(mesh_of, formulated):
    f = formulated(checkpointed, ARGS, on_host(mesh_of(4)), **ASKED)
    keys = labels_of(f)
    assert len(set(keys.nodes)) == len(keys.nodes)
    for names in keys.choices:
        assert len(set(names)) == len(names)


def test_joined_axes_keep_what_lies_on_the_host(mesh_of, formulated):
    mesh = on_host(mesh_of(2, 2, 2))
    f = formulated(checkpointed, ARGS, mesh, **ASKED)
    for first, small in joined_meshes(mesh):
        joined = formulated(checkpointed, ARGS, small, **ASKED)
        picks = list(solve(joined.problem, SolverOptions(time_limit_s=10)).chosen)
        picks[-1], picks[-3] = 1, 1
        apart = choices_apart(f, joined, first, picks)
        assert apart is not None and away(f, apart) == away(joined, picks) == {0, 2}
