"""Starting a search from layouts that someone has, or from an earlier plan."""

import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.interrupts import StopRequest
from autoshard.planner.program import prepare
from autoshard.plans.question import Question
from autoshard.plans.starts import starting_choices
from autoshard.solver import SolverOptions, evaluate
from autoshard.trace.trace import trace

MESH = {"data": 4, "tensor": 2}
OPTIONS = autoshard.PlanOptions(cache=False)


@pytest.fixture(scope="module")
def layouts():
    """Layouts that no optimum has: the batch by features."""
    return {"state.params.up.kernel": P("data", "tensor"), "batch.x": P(None, "data")}


def test_the_start_is_the_best_plan_with_its_layouts(train, shapes, cluster, layouts):
    """Carried over to the problem without them, it costs what the plan with these pins costs."""
    state, batch = shapes()
    traced = trace(train, (state, batch), (0,))
    hardware = cluster.slices()[0]
    question = Question(traced, prepare(traced.graph), 1e12, None, OPTIONS, None, 0.0, layouts)
    formulation = question.formulation(hardware.logical_mesh(MESH))
    choices, why_not = starting_choices(question, formulation, SolverOptions(), StopRequest())
    assert why_not is None
    settings = dict(cluster=cluster, mesh=MESH, donate_argnums=0, memory_budget_bytes=1e12, options=OPTIONS)
    pinned = autoshard.plan(train, state, batch, pins=layouts, **settings)
    assert evaluate(formulation.problem, choices).objective == pytest.approx(pinned.estimate.step_s)
    free = autoshard.plan(train, state, batch, start=layouts, **settings)
    assert free.estimate.step_s < pinned.estimate.step_s
    assert not free.warnings


def test_an_earlier_plan_can_be_the_start(train, shapes, cluster):
    state, batch = shapes()
    settings = dict(cluster=cluster, mesh=MESH, donate_argnums=0, options=OPTIONS)
    first = autoshard.plan(train, state, batch, **settings)
    again = autoshard.plan(train, *shapes(128), start=first, **settings)
    fresh = autoshard.plan(train, *shapes(128), **settings)
    assert again.estimate.step_s == pytest.approx(fresh.estimate.step_s, rel=OPTIONS.relative_gap)
    assert not again.warnings


def test_a_start_that_fits_no_mesh_is_reported(train, shapes, cluster):
    state, batch = shapes()
    layouts = {"batch.x": P("expert")}
    plan = autoshard.plan(train, state, batch, cluster=cluster, mesh=MESH, start=layouts, options=OPTIONS)
    (warning,) = plan.warnings
    assert "could not begin with `start`" in warning and "`expert`" in warning


def test_a_mesh_of_three_axes_begins_with_what_two_of_them_joined_can_do(train, shapes, cluster):
    """With hardly any time of its own, it still costs no more than the better of the meshes with fewer axes."""
    settings = dict(cluster=cluster, donate_argnums=0)
    plan = lambda mesh, units: autoshard.plan(
        train, *shapes(), mesh=mesh, options=autoshard.PlanOptions(work_limit=units), **settings
    )
    simple = [plan(mesh, 10.0).estimate.step_s for mesh in ({"ab": 4, "c": 2}, {"a": 2, "bc": 4})]
    fine = plan({"a": 2, "b": 2, "c": 2}, 1e-2)
    assert fine.estimate.step_s <= min(simple) * (1 + OPTIONS.relative_gap)
