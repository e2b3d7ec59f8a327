"""The step over time agrees with the estimate: the same times, the same memory, and every collective has its cause."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autoshard.compiler.schedule import Schedule
from autoshard.planner.allowed import ArgumentDecision
from autoshard.planner.decode import evaluate
from autoshard.planner.profile import step_profile


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(state, x):
    """Two layers, a momentum for each weight, and the norm of all gradients."""
    loss = lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2)
    grads = jax.grad(loss)(state["params"])
    norm = sum(jnp.sum(g * g) for g in grads.values())
    momentum = {k: 0.9 * state["momentum"][k] + grads[k] / norm for k in grads}
    return {"params": {k: p - 0.1 * momentum[k] for k, p in state["params"].items()}, "momentum": momentum}


def looped(state, x):
    """Four layers in a scan, their weights stacked."""

    def loss(weights):
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0] ** 2)

    return {"w": state["w"] - 0.1 * jax.grad(loss)(state["w"])}


def on_gpus(mesh):
    """The mesh with devices that XLA:GPU compiles for, which hides collectives."""
    return dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, product_workspace_bytes=1024))


WEIGHTS = {"up": f32(128, 512), "down": f32(512, 128)}
CASES = {
    "layers": (step, ({"params": WEIGHTS, "momentum": WEIGHTS}, f32(256, 128))),
    "loop": (looped, ({"w": f32(4, 128, 128)}, f32(64, 128))),
}


def spread(f):
    """State split as far as it can be, and the cheapest choice of everything else: weights are gathered."""
    picks = []
    for decision, node in zip(f.decisions, f.problem.nodes, strict=True):
        if isinstance(decision, ArgumentDecision):
            layouts = f.argument_layouts[decision.argument]
            picks.append(max(range(len(decision.rows)), key=lambda k: sum(d >= 0 for d in layouts[decision.rows[k]])))
        else:
            picks.append(min(range(len(node.costs)), key=lambda k: node.costs[k]))
    return tuple(picks)


@pytest.fixture(scope="module", params=[(case, schedule) for case in CASES for schedule in Schedule], ids=str)
def evaluated(request, formulated, mesh_of):
    case, schedule = request.param
    fn, args = CASES[case]
    f = formulated(fn, args, on_gpus(mesh_of(2, 4)), donate=(0,), schedule=schedule)
    return evaluate(f, spread(f))


def test_memory_over_time_has_the_peak_of_the_estimate(evaluated):
    profile, e = step_profile(evaluated), evaluated.estimate
    usage = [sum(h.size_bytes for h in profile.held if h.start <= i < h.stop) for i in range(len(profile.instants_s))]
    assert max(usage) == pytest.approx(e.peak_bytes)
    at = usage.index(max(usage))
    there = [(profile.tensors[h.tensor].memory_class, h.size_bytes) for h in profile.held if h.start <= at < h.stop]
    by_class = lambda rows: {kind: sum(size for k, size in rows if k == kind) for kind in {k for k, _ in rows}}
    assert by_class(there) == pytest.approx(by_class([(m.memory_class, m.size_bytes) for m in e.memory]))
    assert list(profile.instants_s) == sorted(profile.instants_s) and profile.instants_s[-1] <= e.step_s * (1 + 1e-6)


def test_kernels_and_what_they_wait_for_fill_the_step(evaluated):
    profile, e = step_profile(evaluated), evaluated.estimate
    runs = sorted([*profile.kernels, *profile.waited], key=lambda r: (r.start_s, r.stop_s))
    clock_s = 0.0
    for run in runs:
        assert run.start_s == pytest.approx(clock_s, rel=1e-6, abs=1e-12)
        clock_s = run.stop_s
    assert clock_s == pytest.approx(e.step_s)
    length = lambda runs: sum(r.stop_s - r.start_s for r in runs)
    assert length(profile.kernels) == pytest.approx(e.compute_s)
    assert length(profile.waited) == pytest.approx(e.exposed_s)
    for n, item in enumerate(e.communication):
        assert length([r for r in profile.waited if r.item == n]) == pytest.approx(item.exposed_s, rel=1e-5)


def test_what_hides_runs_beside_kernels_one_at_a_time(evaluated):
    profile, e, share = step_profile(evaluated), evaluated.estimate, evaluated.times.share
    assert sum(share * (r.stop_s - r.start_s) for r in profile.hidden) == pytest.approx(e.hidden_s, rel=1e-5)
    end_s = 0.0
    for run in profile.hidden:
        assert run.start_s >= end_s * (1 - 1e-6)
        end_s = run.stop_s
        assert not any(
            w.start_s < run.stop_s * (1 - 1e-6) and run.start_s < w.stop_s * (1 - 1e-6) for w in profile.waited
        )


def test_there_is_something_hidden_to_look_at(formulated, mesh_of):
    fn, args = CASES["layers"]
    f = formulated(fn, args, on_gpus(mesh_of(2, 4)), donate=(0,), schedule=Schedule.LATENCY_HIDING)
    assert step_profile(evaluate(f, spread(f))).hidden


def test_collectives_and_kernels_are_told_what_they_are_for(evaluated):
    """Of a step, every collective of a weight or gradient is that of an argument of the same number of elements."""
    profile, e, graph = step_profile(evaluated), evaluated.estimate, evaluated.reader.graph
    size = lambda value: graph.values[value].shape
    named = 0
    for item, argument, cause in zip(e.communication, profile.parameter_of, profile.cause_of, strict=True):
        assert len(profile.causes[cause].after) == len(item.shape)
        if argument >= 0 and graph.loops == ():
            assert sorted(size(graph.arguments[argument].value)) == sorted(item.shape)
        named += argument >= 0
    assert named
    names = {graph.arguments[a].name for a in profile.work_for if a >= 0}
    params = {a.name for a in graph.arguments if ".params." in a.name or a.name.endswith(".w")}
    assert params <= names, "products read every weight"
    assert all(
        "test_profile.py" in source
        for a, source in zip(graph.arguments, profile.sources, strict=True)
        if a.name in params
    )


def test_gradients_go_by_the_parameter_and_not_by_its_momentum(formulated, mesh_of):
    """By hand: data parallelism over 8 sums the gradients of both weights, and nothing else but the loss's norm."""
    fn, args = CASES["layers"]
    f = formulated(fn, args, mesh_of(8), donate=(0,), schedule=Schedule.LEAST_MEMORY)
    picks = []
    for decision in f.decisions:
        if isinstance(decision, ArgumentDecision):
            is_batch = f.program.graph.arguments[decision.argument].name == "x"
            layouts = [f.argument_layouts[decision.argument][row] for row in decision.rows]
            picks.append(layouts.index((0,) if is_batch else (-1,)))
        else:
            rows = [f.tables[decision.group].choices[row] for row in decision.rows]
            batch = lambda choice, g=decision.group: any(
                f.program.groups[g].factors[k].size == 256 for k in choice.assignment if k >= 0
            )
            picks.append(next((k for k, c in enumerate(rows) if batch(c) and all(s < 0 for s in c.scatter)), 0))
    e = evaluate(f, tuple(picks))
    profile, names = step_profile(e), [a.name for a in f.program.graph.arguments]
    reduced = {
        names[argument]
        for item, argument in zip(e.estimate.communication, profile.parameter_of, strict=True)
        if item.kind == "all-reduce" and len(item.shape) == 2
    }
    assert reduced == {"state.params.up", "state.params.down"}
    causes = [profile.causes[c] for c, a in zip(profile.cause_of, profile.parameter_of, strict=True) if a >= 0]
    assert causes and all(cause.before is None and cause.after == ((), ()) for cause in causes)
