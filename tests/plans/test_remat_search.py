"""What is recomputed is chosen so that the step fits and is the fastest considered; the step itself stays the same."""

import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard import Plan, PlanOptions, TrainStep
from autoshard.errors import ConfigError, MemoryBudgetError, PlanMismatchError
from autoshard.remat.policy import Keep, uniform
from autoshard.remat.rewrite import layers_of, rematerialised
from autoshard.trace.trace import trace

CLUSTER = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "cpux8.yaml"
LAYERS, WIDTH, HIDDEN, BATCH = 6, 32, 128, 1024
SEARCH = PlanOptions(remat="search")


def block(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def loss_of(layer):
    def loss_fn(params, batch, key):
        x = batch["x"]
        for w in params:
            x = layer(x, w)
        return jnp.mean((x - batch["y"]) ** 2), {}

    return loss_fn


STEP = TrainStep(loss_of(block), optax.adam(1e-3))
CHECKPOINTED = TrainStep(loss_of(jax.checkpoint(block)), optax.adam(1e-3))


def init(seed=0, hidden=HIDDEN, layers=LAYERS):
    keys = jax.random.split(jax.random.key(seed), layers)
    draw = jax.random.normal
    return STEP.init([{"up": draw(k, (WIDTH, hidden)) / 6, "down": draw(k, (hidden, WIDTH)) / 12} for k in keys])


STATE = jax.eval_shape(init)
BATCH_SHAPES = {k: jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32) for k in "xy"}


def planned(step=STEP, mesh=None, share=None, options=SEARCH, **more):
    """A plan; with `share`, under that share of what the step needs that keeps everything."""
    request = {"cluster": CLUSTER, "mesh": mesh or {"data": 8}, "donate_argnums": 0, **more}
    if share is not None:
        e = keeping_all(tuple(request["mesh"].items())).estimate
        request["memory_budget_bytes"] = share * (e.reserved_bytes or e.peak_bytes)
    return autoshard.plan(step, STATE, BATCH_SHAPES, options=options, **request)


KEPT: dict = {}


def keeping_all(axes) -> Plan:
    if axes not in KEPT:
        KEPT[axes] = planned(options=PlanOptions(), mesh=dict(axes), memory_budget_bytes=math.inf)
    return KEPT[axes]


@functools.cache
def tight_on(*axes: tuple[str, int]) -> Plan:
    """The plan on a mesh of these axes under 0.7 of what the step needs that keeps everything."""
    return planned(mesh=dict(axes), share=0.7)


@pytest.fixture(scope="module")
def tight() -> Plan:
    return tight_on(("data", 8))


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "tensor": 4}])
def test_the_step_stays_the_same(mesh):
    """Loss, parameters and optimizer state are those of the step on one device."""
    plan = tight_on(*mesh.items())
    assert plan.remat is not None and plan.remat.policy != uniform(layers_of(STEP, STATE, BATCH_SHAPES).runs, Keep.ALL)
    rng = np.random.default_rng(0)
    data = {k: rng.normal(size=(BATCH, WIDTH)).astype(np.float32) for k in "xy"}
    expected, metrics = jax.jit(STEP)(init(), data)
    found, found_metrics = plan.jit(STEP)(plan.init(init), data)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)
    jax.tree.map(close, (found.params, found.opt_state, found_metrics), (expected.params, expected.opt_state, metrics))


def test_what_is_chosen_fits_and_is_the_fastest_considered(tight):
    budget = tight.budget_bytes
    assert budget is not None and tight.remat is not None
    assert tight.estimate.peak_bytes <= budget and (tight.estimate.reserved_bytes or 0) <= budget + 2**21
    steps = [c.step_s for c in tight.remat.candidates if c.step_s is not None]
    assert tight.certificate.objective == min(steps)
    assert tight.certificate.bound <= min(c.bound_s for c in tight.remat.candidates)
    kept = tight.remat.candidates[0]
    assert kept.policy.startswith("all in all") and (kept.step_s is None or kept.step_s > tight.certificate.objective)


def test_a_mixture_beats_every_uniform_policy(tight):
    """Keeping all needs too much, and recomputing all too long: some layers of each are between them in both."""
    assert tight.remat is not None and tight.remat.policy is not None
    (own,) = tight.remat.policy.runs
    assert len(own.kept) == 2 and sum(n for _, n in own.kept) == LAYERS
    uniform_steps = [c.step_s for c in tight.remat.candidates if "in all" in c.policy and c.step_s is not None]
    assert uniform_steps and tight.certificate.objective < min(uniform_steps)


def test_recomputing_costs_what_it_does_by_hand():
    """Keeping inputs makes the first product of each layer again: 2 x batch x width x hidden, an eighth a device."""
    pins = {"batch.*": jax.sharding.PartitionSpec("data"), "state.params.*": jax.sharding.PartitionSpec()}
    runs = layers_of(STEP, STATE, BATCH_SHAPES).runs
    flops = []
    for keep in (Keep.ALL, Keep.INPUTS):
        plan = planned(rematerialised(STEP, uniform(runs, keep)), options=PlanOptions(), pins=pins)
        flops.append(sum(c.flops for c in plan.estimate.compute if c.name == "dot_general"))
    assert flops[1] - flops[0] == LAYERS * 2 * BATCH * WIDTH * HIDDEN / 8


def num_checkpoints(plan: Plan) -> int:
    """Checkpointed functions in the program of a plan, under either name that JAX has for them."""
    return sum(name in e for e in plan.equations for name in ("remat", "checkpoint"))


def test_as_written_leaves_the_program_untouched():
    plan = planned(options=PlanOptions(remat="as_written"))
    assert plan.remat is None
    assert plan.equations == trace(STEP, (STATE, BATCH_SHAPES), (0,)).graph.equations
    checkpointed = planned(CHECKPOINTED, options=PlanOptions())
    assert num_checkpoints(checkpointed) >= LAYERS


def test_enough_memory_ends_the_search_at_once_even_where_the_program_is_checkpointed():
    """`jax.checkpoint` is a suggestion: with memory enough nothing is computed again."""
    plan = planned(CHECKPOINTED)
    assert plan.remat is not None and len(plan.remat.candidates) == 1
    assert plan.remat.policy == uniform(layers_of(STEP, STATE, BATCH_SHAPES).runs, Keep.ALL)
    assert num_checkpoints(plan) == 0
    assert plan.estimate.step_s < planned(CHECKPOINTED, options=PlanOptions()).estimate.step_s
    assert "no more memory would make it faster" in plan.remat.note and plan.remat.note in " ".join(
        plan.explain(full=True).split()
    )


def test_a_model_without_layers_is_left_alone_and_told_so():
    def loss_fn(params, batch, key):
        return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2), {}

    step = TrainStep(loss_fn, optax.sgd(1e-2))
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    state = jax.eval_shape(step.init, {"up": shape(WIDTH, HIDDEN), "down": shape(HIDDEN, WIDTH)})
    plan = autoshard.plan(step, state, BATCH_SHAPES, cluster=CLUSTER, mesh={"data": 8}, options=SEARCH)
    assert plan.equations == trace(step, (state, BATCH_SHAPES)).graph.equations
    assert plan.remat is not None and plan.remat.policy is None
    assert any("no repeated layers were found" in warning for warning in plan.warnings)


def test_a_plan_keeps_its_choice_in_its_file_and_tells_it(tight, tmp_path):
    tight.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == tight and again.remat == tight.remat
    again.check(STEP, (STATE, BATCH_SHAPES))
    text = " ".join(tight.explain(full=True).split())
    assert f"Chosen: {tight.remat}." in text
    other = keeping_all((("data", 8),))
    found = autoshard.diff(other, tight)
    assert (found.a.remat, found.b.remat) == ("as written", str(tight.remat)) and str(tight.remat) in found.text(200)
    assert autoshard.diff(tight, again).is_empty


def test_only_the_step_that_was_planned_is_run(tight):
    with pytest.raises(PlanMismatchError, match="Pass the TrainStep that was planned"):
        tight.check(lambda state, batch: STEP(state, batch), (STATE, BATCH_SHAPES))


def test_where_nothing_fits_the_error_tells_what_would_do():
    with pytest.raises(MemoryBudgetError, match="GB per device"):
        planned(share=0.05, options=PlanOptions(remat="search", least_memory_s=3.0))


@pytest.mark.parametrize(
    ("fn", "options", "more", "message"),
    [
        (lambda state, batch: STEP(state, batch), SEARCH, {}, "what the loss of a TrainStep recomputes"),
        (STEP, PlanOptions(remat="never"), {}, "received 'never'"),  # pyright: ignore[reportArgumentType]
        (STEP, SEARCH, {"solution": "solution.json"}, "a solution belongs to one"),
        (STEP, SEARCH, {"stages": autoshard.StageOptions()}, "a step in stages chooses by itself"),
    ],
)
def test_what_cannot_be_searched_is_refused(fn, options, more, message):
    with pytest.raises(ConfigError, match=message):
        planned(fn, options=options, **more)
