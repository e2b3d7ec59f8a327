"""Pins: what they demand is done, and what they cannot mean is refused in words."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import MeshError, PinError
from autoshard.plans.pins import resolve_pins
from autoshard.trace.trace import trace

AXES = {"data": 2, "tensor": 4}


@pytest.fixture(scope="module")
def graph(train, shapes):
    return trace(train, shapes()).graph


def resolved(graph, pins):
    found = resolve_pins(graph, pins, AXES)
    return {a.name: f for a, f in zip(graph.arguments, found, strict=True) if f is not None}


def test_patterns_match_paths(graph):
    found = resolved(graph, {"state.params.*.kernel": P(None, "tensor"), "batch.?": P("data")})
    assert found == {
        "state.params.down.kernel": ((), ("tensor",)),
        "state.params.up.kernel": ((), ("tensor",)),
        "batch.x": (("data",), ()),
        "batch.y": (("data",), ()),
    }


def test_specs_are_read_in_full(graph):
    found = resolved(graph, {"batch.x": P(("data", "tensor"), P.UNCONSTRAINED), "batch.y": P()})
    assert found == {"batch.x": (("data", "tensor"), None), "batch.y": ((), ())}
    assert resolved(graph, {"batch.x": ["data"]}) == {"batch.x": (("data",), ())}
    assert resolved(graph, None) == {}


def test_agreeing_pins_may_overlap(graph):
    assert resolved(graph, {"batch.*": P("data"), "batch.x": P("data", None)})["batch.x"] == (("data",), ())


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"state.params.up.kernle": P()}, "`state.params.up.kernle` matches no argument.*`state.params.up.kernel`"),
        ({"batch.x": P("model")}, "names the mesh axis `model`, but the mesh has {'data': 2, 'tensor': 4}"),
        ({"batch.x": P("data", "data")}, "uses `data` twice"),
        ({"batch.x": P(("data", "data"))}, "uses `data` twice"),
        ({"state.step": P("data")}, "1 entries, but `state.step` has shape \\(\\)"),
        ({"batch.x": P(None, None, "data")}, "3 entries, but `batch.x` has shape \\(256, 32\\)"),
        ({"batch.x": P(("tensor", "data"))}, "order of the mesh.*Write \\('data', 'tensor'\\)"),
        ({"batch.x": "data"}, "must be a PartitionSpec, but `batch.x` is pinned to 'data'"),
        ({"batch.x": 3}, "must be a PartitionSpec, but `batch.x` is pinned to 3"),
        ({"batch.*": P("data"), "batch.x": P()}, "contradict.*`batch.x`: `batch.\\*` demands .*`batch.x` demands"),
    ],
)
def test_refusals(graph, pins, message):
    with pytest.raises(PinError, match=message):
        resolved(graph, pins)


def test_indivisible_dimensions_are_refused():
    graph = trace(lambda x: x * 2, (jax.ShapeDtypeStruct((6, 8), jnp.float32),)).graph
    with pytest.raises(PinError, match="dimension 0 of `x` with shape \\(6, 8\\) into 4 parts"):
        resolved(graph, {"x": P("tensor")})


def test_plans_obey_pins(train, shapes, cluster):
    pins = {
        "state.params.up.kernel": P("data", "tensor"),
        "batch.*": P(),
        "state.params.down.kernel": P(P.UNCONSTRAINED, "data"),
    }
    plan = autoshard.plan(train, *shapes(), cluster=cluster, mesh=AXES, pins=pins)
    state, batch = plan.in_specs
    assert state["params"]["up"]["kernel"] == P("data", "tensor")
    assert set(jax.tree.leaves(batch)) == {P()}
    assert state["params"]["down"]["kernel"][1] == "data"
    assert plan.out_specs[0]["params"] == state["params"], "the successor stays where the state was"
    free = autoshard.plan(train, *shapes(), cluster=cluster, mesh=AXES)
    assert plan.estimate.step_s >= free.estimate.step_s * (1 - 1e-9)


def test_pins_choose_among_meshes(train, shapes, cluster):
    plan = autoshard.plan(train, *shapes(), cluster=cluster, pins={"batch.x": P("data", "tensor")})
    assert plan.in_specs[1]["x"] == P("data", "tensor")
    assert all({a for a, _ in c.axes} >= {"data", "tensor"} for c in plan.candidates)
    with pytest.raises(MeshError, match="\\['model'\\]"):
        autoshard.plan(train, *shapes(), cluster=cluster, pins={"batch.x": P("model")})
