"""`PlanOptions.time_limit_s`: the best plan by then is taken, and where there is none yet, the first one."""

import math
import time

import jax
import jax.numpy as jnp
import optax
import pytest

import autoshard
from autoshard import PlanOptions, TrainStep
from autoshard.errors import SolverError
from autoshard.interrupts import StopRequest
from autoshard.plans.found import NOT_TRIED
from autoshard.plans.make import pose, traced_program


@pytest.fixture
def settings(train, shapes, cluster):
    state, batch = shapes()
    return (train, state, batch), {"cluster": cluster, "donate_argnums": 0}


def test_a_request_ends_at_its_time_or_when_the_one_around_it_does():
    asked, now_s = StopRequest(), time.perf_counter()
    assert asked.until(now_s).requested and not asked.requested
    later = asked.until(now_s + 1000.0)
    assert not later.requested
    asked.is_asked = True
    assert later.requested


def test_without_time_the_first_mesh_with_a_plan_is_taken(settings):
    """The certificate knows nothing of the others; with the mesh given, the answer is proven as ever."""
    args, given = settings
    plan = autoshard.plan(*args, **given, options=PlanOptions(time_limit_s=0, cache=False))
    verdicts = [candidate.verdict for candidate in plan.candidates]
    assert len(verdicts) > 1 and verdicts[0] == "optimal" and set(verdicts[1:]) == {NOT_TRIED}
    assert plan.certificate.bound == 0 and plan.certificate.gap == 1
    alone = autoshard.plan(*args, **given, mesh=dict(plan.axes), options=PlanOptions(time_limit_s=0, cache=False))
    assert alone.certificate.gap <= PlanOptions().relative_gap
    assert alone.estimate.step_s == pytest.approx(plan.estimate.step_s)


def test_a_search_that_ends_in_time_is_the_same(settings):
    args, given = settings
    plans = [
        autoshard.plan(*args, **given, options=PlanOptions(time_limit_s=limit_s, cache=False))
        for limit_s in (None, 1000.0)
    ]
    assert plans[0].candidates == plans[1].candidates
    assert plans[0].arguments == plans[1].arguments


def test_with_a_work_limit_no_clock_is_read(settings):
    args, given = settings
    plan = autoshard.plan(*args, **given, options=PlanOptions(time_limit_s=0, work_limit=1.0))
    assert NOT_TRIED not in {candidate.verdict for candidate in plan.candidates}


def test_a_mesh_has_half_of_what_is_left_or_all_of_it_as_the_last(settings):
    (fn, *args), given = settings
    options = PlanOptions(time_limit_s=100.0)
    traced, program = traced_program(fn, args, (0,), options, time.perf_counter())
    question = pose(traced, program, given["cluster"], options=options).question
    assert question.mesh_limit_s(5) == pytest.approx(50.0, abs=5.0)
    assert question.mesh_limit_s(1) == pytest.approx(100.0, abs=5.0)
    free = pose(traced, program, given["cluster"], options=PlanOptions(mesh_limit_s=7.0)).question
    assert free.until_s == math.inf and free.mesh_limit_s(5) == 7.0


def test_forms_are_tried_until_one_fits_however_long_that_takes(cluster):
    """Two layers whose residuals fit in micro-batches alone: as it is written, the step does not fit."""

    def loss(params, batch, key):
        for w in params:
            batch = jnp.tanh(batch @ w)
        return jnp.mean(batch**2), None

    step = TrainStep(loss, optax.sgd(0.1))
    state = jax.eval_shape(lambda: step.init([jnp.zeros((64, 64))] * 2))
    batch = jax.ShapeDtypeStruct((8192, 64), jnp.float32)
    given = {"cluster": cluster, "mesh": {"data": 8}, "donate_argnums": 0}
    free = autoshard.plan(step, state, batch, **given, options=PlanOptions(micro_batches=1, remat="as_written"))
    given["memory_budget_bytes"] = 0.7 * free.estimate.peak_bytes
    with pytest.raises(SolverError):
        autoshard.plan(step, state, batch, **given, options=PlanOptions(micro_batches=1, remat="as_written"))
    plan = autoshard.plan(step, state, batch, **given, options=PlanOptions(time_limit_s=0, cache=False))
    assert plan.estimate.peak_bytes <= given["memory_budget_bytes"]
    assert "Stopped before all forms were tried" in plan.choice.note
