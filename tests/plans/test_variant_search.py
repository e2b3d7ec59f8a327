"""What is recomputed is chosen so that the step fits and is the fastest considered; the step itself stays the same."""

import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard import Plan, PlanOptions, TrainStep
from autoshard.errors import ConfigError, MemoryBudgetError, PlanMismatchError
from autoshard.interrupts import StopRequest
from autoshard.plans.apply import check
from autoshard.plans.make import load_cluster, plan_posed, pose, traced_program
from autoshard.plans.mesh_search import ruled_out
from autoshard.plans.step_variant import StepVariant
from autoshard.plans.variant_search import plan_variants
from autoshard.plans.variant_space import space_of
from autoshard.remat.policy import Keep, first_layers, uniform
from autoshard.remat.rewrite import layers_of, rematerialised
from autoshard.trace.trace import trace

CLUSTER = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "cpux8.yaml"
LAYERS, WIDTH, HIDDEN, BATCH = 4, 32, 128, 1024
SEARCH = PlanOptions(remat="search", micro_batches="as_written")
ALL_FORMS = PlanOptions(remat="search", micro_batches="search")
AS_WRITTEN = PlanOptions(remat="as_written", micro_batches="as_written")
IN_FORM = dataclasses.replace(AS_WRITTEN, least_memory_s=0.0)


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


def planned(step=STEP, mesh=None, share=None, options=SEARCH, state=STATE, **more):
    """A plan; with `share`, under that share of what the step needs that keeps everything."""
    request = {"cluster": CLUSTER, "mesh": mesh or {"data": 8}, "donate_argnums": 0, **more}
    if share is not None:
        e = keeping_all(tuple(request["mesh"].items()), state).estimate
        request["memory_budget_bytes"] = share * (e.reserved_bytes or e.peak_bytes)
    return autoshard.plan(step, state, BATCH_SHAPES, options=options, **request)


KEPT: dict = {}


def keeping_all(axes, state=STATE) -> Plan:
    key = axes, len(state.params)
    if key not in KEPT:
        KEPT[key] = planned(options=PlanOptions(), mesh=dict(axes), memory_budget_bytes=math.inf, state=state)
    return KEPT[key]


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
    assert plan.choice is not None and plan.choice.variant.policy != uniform(
        layers_of(STEP, STATE, BATCH_SHAPES).runs, Keep.ALL
    )
    rng = np.random.default_rng(0)
    data = {k: rng.normal(size=(BATCH, WIDTH)).astype(np.float32) for k in "xy"}
    expected, metrics = jax.jit(STEP)(init(), data)
    found, found_metrics = plan.jit(STEP)(plan.init(init), data)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)
    jax.tree.map(close, (found.params, found.opt_state, found_metrics), (expected.params, expected.opt_state, metrics))


def test_a_loss_without_rng_and_aux_gets_the_plan_of_one_with_them(tight):
    step = TrainStep(lambda params, batch: STEP.loss_fn(params, batch, None)[0], STEP.optimizer)
    plan = planned(step, share=0.7)
    assert plan.choice == tight.choice and plan.equations == tight.equations
    data = {k: jnp.ones((BATCH, WIDTH)) * scale for k, scale in (("x", 0.1), ("y", 1.0))}
    (found, metrics), (expected, _) = plan.jit(step)(plan.init(init), data), jax.jit(STEP)(init(), data)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), found.params, expected.params)
    assert list(metrics) == ["loss"]


def test_what_is_chosen_fits_and_is_the_fastest_considered(tight):
    budget = tight.budget_bytes
    assert budget is not None and tight.choice is not None
    assert tight.estimate.peak_bytes <= budget and (tight.estimate.reserved_bytes or 0) <= budget + 2**21
    steps = [c.step_s for c in tight.choice.candidates if c.step_s is not None]
    assert tight.certificate.objective == min(steps)
    assert tight.certificate.bound <= min(c.bound_s for c in tight.choice.candidates)
    kept = tight.choice.candidates[0]
    assert kept.variant.startswith("all in all") and (kept.step_s is None or kept.step_s > tight.certificate.objective)


def test_a_mixture_beats_every_uniform_policy(tight):
    """Keeping all needs too much, and recomputing all too long: some layers of each are between them in both."""
    assert tight.choice is not None and tight.choice.variant.policy is not None
    (own,) = tight.choice.variant.policy.runs
    assert len(own.kept) == 2 and sum(n for _, n in own.kept) == LAYERS
    uniform_steps = []
    for keep in Keep:
        step = rematerialised(STEP, uniform(layers_of(STEP, STATE, BATCH_SHAPES).runs, keep))
        with contextlib.suppress(MemoryBudgetError):
            uniform_steps.append(planned(step, share=0.7, options=IN_FORM).certificate.objective)
    assert uniform_steps and tight.certificate.objective < min(uniform_steps)


@pytest.mark.parametrize("layers", [3, pytest.param(LAYERS, marks=pytest.mark.exhaustive)])
def test_no_form_by_hand_is_faster(layers):
    """Brute force: every policy in one and in two micro-batches, and every mixture of two in every number of layers.

    All products are with weights here, so that two of the policies are one.
    """
    state = jax.eval_shape(lambda: init(layers=layers))
    runs = layers_of(STEP, state, BATCH_SHAPES).runs
    keeps = [keep for keep in reversed(Keep) if keep is not Keep.PRODUCTS]
    forms = [StepVariant(uniform(runs, keep), parts) for keep in keeps for parts in (None, (BATCH // 2,) * 2)]
    mixed = itertools.product(itertools.combinations(keeps, 2), range(1, layers))
    forms += [StepVariant(first_layers(runs, *pair, number)) for pair, number in mixed]
    steps = []
    for form in forms:
        with contextlib.suppress(MemoryBudgetError):
            steps.append(planned(form.of(STEP), share=0.7, options=IN_FORM, state=state).certificate.objective)
    assert len(steps) > 10
    assert planned(share=0.7, options=ALL_FORMS, state=state).certificate.objective <= min(steps) * 1.005


def test_recomputing_costs_what_it_does_by_hand():
    """Keeping inputs makes the first product of each layer again: 2 x batch x width x hidden, an eighth a device."""
    pins = {"batch.*": jax.sharding.PartitionSpec("data"), "state.params.*": jax.sharding.PartitionSpec()}
    runs = layers_of(STEP, STATE, BATCH_SHAPES).runs
    flops = []
    for keep in (Keep.ALL, Keep.INPUTS):
        plan = planned(rematerialised(STEP, uniform(runs, keep)), options=AS_WRITTEN, pins=pins)
        flops.append(sum(c.flops for c in plan.estimate.compute if c.name == "dot_general"))
    assert flops[1] - flops[0] == LAYERS * 2 * BATCH * WIDTH * HIDDEN / 8


def num_checkpoints(plan: Plan) -> int:
    """Checkpointed functions in the program of a plan, under either name that JAX has for them."""
    return sum(name in e for e in plan.equations for name in ("remat", "checkpoint"))


def test_as_written_leaves_the_program_untouched():
    plan = planned(options=AS_WRITTEN)
    assert plan.choice is None
    assert plan.equations == trace(STEP, (STATE, BATCH_SHAPES), (0,)).graph.equations
    checkpointed = planned(CHECKPOINTED, options=AS_WRITTEN)
    assert num_checkpoints(checkpointed) >= LAYERS


def test_enough_memory_ends_the_search_at_once_even_where_the_program_is_checkpointed():
    """`jax.checkpoint` is a suggestion: with memory enough nothing is computed again."""
    plan = planned(CHECKPOINTED)
    assert plan.choice is not None and len(plan.choice.candidates) == 1
    assert plan.choice.variant.policy == uniform(layers_of(STEP, STATE, BATCH_SHAPES).runs, Keep.ALL)
    assert num_checkpoints(plan) == 0
    assert plan.estimate.step_s < planned(CHECKPOINTED, options=AS_WRITTEN).estimate.step_s
    assert "no more memory would make it faster" in plan.choice.note and plan.choice.note in " ".join(
        plan.explain(full=True).split()
    )


def test_recomputing_is_chosen_in_any_memory_where_kernels_take_less():
    """The parts of a gelu that are kept are written and read; all of them follow from the product before."""
    gelu = lambda x, w: x + jax.nn.gelu(x @ w["up"]) @ w["down"]
    step = TrainStep(loss_of(gelu), optax.adam(1e-3))
    state = jax.eval_shape(step.init, [{"up": jnp.zeros((256, 1024)), "down": jnp.zeros((1024, 256))}] * LAYERS)
    batch = {k: jax.ShapeDtypeStruct((4096, 256), jnp.float32) for k in "xy"}
    request = {"cluster": CLUSTER, "mesh": {"data": 8}, "donate_argnums": 0, "memory_budget_bytes": math.inf}
    plan = autoshard.plan(step, state, batch, options=SEARCH, **request)
    assert plan.choice.variant.policy == uniform(layers_of(step, state, batch).runs, Keep.WEIGHT_PRODUCTS)
    kept = next(c for c in plan.choice.candidates if c.variant.startswith("all in all"))
    assert plan.estimate.step_s < kept.step_s and plan.certificate.bound < kept.bound_s


def attention_in_blocks(x, w):
    """Blocks of queries one after another, each computed again in the backward pass with its softmax."""
    q, k, v = (x @ w[name] for name in "qkv")

    @jax.checkpoint
    def run(_, block):
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", block, k))
        return None, jnp.einsum("bqk,bkd->bqd", weights, v)

    _, attended = jax.lax.scan(run, None, q.reshape(len(x), 8, -1, WIDTH).swapaxes(0, 1))
    return x + attended.swapaxes(0, 1).reshape(x.shape)


def test_where_layers_have_loops_a_form_that_recomputes_less_of_them_is_found_in_any_memory():
    """A softmax that keeps its maxima and sums is spared two passes over the scores, and takes no more memory.

    As XLA:GPU compiles them the two forms take 6.65 and 5.90 ms by replay.
    """
    step = TrainStep(loss_of(attention_in_blocks), optax.sgd(1e-3))
    state = jax.eval_shape(lambda: step.init([{n: jnp.zeros((WIDTH, WIDTH)) for n in "qkv"}] * LAYERS))
    batch = {k: jax.ShapeDtypeStruct((64, 2048, WIDTH), jnp.float32) for k in "xy"}
    cluster = CLUSTER.with_name("h100x8.yaml")
    request = {"cluster": cluster, "mesh": {"data": 8}, "donate_argnums": 0, "memory_budget_bytes": math.inf}
    written, searched = (autoshard.plan(step, state, batch, options=o, **request) for o in (AS_WRITTEN, SEARCH))
    layers = layers_of(step, state, batch)
    assert layers.has_loops and not layers_of(STEP, STATE, BATCH_SHAPES).has_loops
    assert searched.choice.variant.policy == uniform(layers.runs, Keep.ALL_BUT_LARGEST)
    assert searched.estimate.step_s < 0.9 * written.estimate.step_s
    assert searched.estimate.peak_bytes <= 1.01 * written.estimate.peak_bytes


def test_a_model_without_layers_is_left_alone_and_told_so():
    def loss_fn(params, batch, key):
        return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2), {}

    step = TrainStep(loss_fn, optax.sgd(1e-2))
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    state = jax.eval_shape(step.init, {"up": shape(WIDTH, HIDDEN), "down": shape(HIDDEN, WIDTH)})
    plan = autoshard.plan(step, state, BATCH_SHAPES, cluster=CLUSTER, mesh={"data": 8}, options=SEARCH)
    assert plan.equations == trace(step, (state, BATCH_SHAPES)).graph.equations
    assert plan.choice is not None and plan.choice.variant.policy is None
    assert any("no repeated layers were found" in warning for warning in plan.warnings)


def test_a_plan_keeps_its_choice_in_its_file_and_tells_it(tight, tmp_path):
    tight.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == tight and again.choice == tight.choice
    again.check(STEP, (STATE, BATCH_SHAPES))
    text = " ".join(tight.explain(full=True).split())
    assert f"Chosen: {tight.choice}." in text
    other = keeping_all((("data", 8),))
    found = autoshard.diff(other, tight)
    assert (found.a.choice, found.b.choice) == ("as written", str(tight.choice))
    assert str(tight.choice) in found.text(200)
    assert autoshard.diff(tight, again).is_empty


def test_only_the_step_that_was_planned_is_run(tight):
    with pytest.raises(PlanMismatchError, match="Pass the TrainStep that was planned"):
        tight.check(lambda state, batch: STEP(state, batch), (STATE, BATCH_SHAPES))


def test_where_nothing_fits_the_error_tells_what_would_do():
    with pytest.raises(
        MemoryBudgetError, match="GB per device.*of the form that was tried last: inputs in all 4 layers"
    ):
        planned(share=0.05, options=PlanOptions(remat="search", least_memory_s=3.0))


@pytest.mark.parametrize(
    ("fn", "options", "more", "message"),
    [
        (lambda state, batch: STEP(state, batch), SEARCH, {}, "chosen for the loss of a TrainStep"),
        (STEP, PlanOptions(remat="never"), {}, "received 'never'"),  # pyright: ignore[reportArgumentType]
        (STEP, PlanOptions(micro_batches="many"), {}, "micro_batches='many'"),  # pyright: ignore[reportArgumentType]
        (STEP, PlanOptions(micro_batches=3), {}, "must divide the batch; received one of 1024 examples"),
        (STEP.in_parts((512, 512)), PlanOptions(micro_batches=2), {}, "leaves its micro-batches open"),
        (lambda state, batch: STEP(state, batch), PlanOptions(micro_batches=2), {}, "the loss of a TrainStep"),
        (STEP, SEARCH, {"solution": "solution.json"}, "a solution belongs to one"),
        (STEP, SEARCH, {"stages": autoshard.StageOptions()}, "a step in stages chooses by itself"),
    ],
)
def test_what_cannot_be_searched_is_refused(fn, options, more, message):
    with pytest.raises(ConfigError, match=message):
        planned(fn, options=options, **more)


# ---- micro-batches


@functools.cache
def tight_with_micro_batches() -> Plan:
    """As `tight`, with micro-batches among the forms."""
    return planned(share=0.7, options=ALL_FORMS)


def batch_of(seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(BATCH, WIDTH)).astype(np.float32) for k in "xy"}


def check_equal(plan: Plan) -> None:
    """Three steps of the plan are those of the step on one device."""
    expected, found, run, own = init(), plan.init(init), plan.jit(STEP), jax.jit(STEP)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)
    for seed in range(3):
        expected, metrics = own(expected, batch_of(seed))
        found, of_plan = run(found, batch_of(seed))
        jax.tree.map(close, (found.params, found.opt_state, of_plan), (expected.params, expected.opt_state, metrics))


def test_micro_batches_keep_everything_where_that_is_faster_than_recomputing():
    """Of eight H100 under latency hiding: half of the residuals at a time fit; what each micro-batch reduces hides."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    state = jax.eval_shape(STEP.init, [{"up": shape(1024, 4096), "down": shape(4096, 1024)} for _ in range(LAYERS)])
    batch = {k: shape(65536, 1024) for k in "xy"}
    cluster = CLUSTER.with_name("h100x8.yaml")
    plan_for = lambda budget, options: autoshard.plan(
        STEP,
        state,
        batch,
        cluster=cluster,
        mesh={"data": 8},
        donate_argnums=0,
        memory_budget_bytes=budget,
        options=options,
    )
    kept = plan_for(math.inf, AS_WRITTEN)
    budget = 0.65 * (kept.estimate.reserved_bytes or 0)
    plan, recomputed = plan_for(budget, ALL_FORMS), plan_for(budget, SEARCH)
    assert plan.choice is not None and recomputed.choice is not None
    steps = [c.step_s for c in plan.choice.candidates if c.step_s is not None]
    assert plan.estimate.step_s == pytest.approx(min(steps), rel=1e-9)
    assert plan.certificate.objective < recomputed.certificate.objective
    assert plan.certificate.bound <= min(c.bound_s for c in plan.choice.candidates)
    assert plan.estimate.peak_bytes <= budget and plan.choice.variant.parts == (32768, 32768)
    flops = lambda p: sum(c.flops for c in p.estimate.compute if c.name == "dot_general")
    assert flops(plan) == pytest.approx(flops(kept), rel=1e-6) and flops(recomputed) > 1.01 * flops(kept)


@pytest.mark.parametrize("cluster", ["cpux8.yaml", "h100x8.yaml"])  # one whose collectives are waited for, one not
def test_what_is_ruled_out_at_once_could_not_win_in_any_memory(cluster):
    hardware = load_cluster(CLUSTER.with_name(cluster))
    options = dataclasses.replace(AS_WRITTEN, max_mesh_axes=2)  # on all of which it is asked
    traced, program = traced_program(STEP, (STATE, BATCH_SHAPES), (0,), options, 0.0)
    posed = pose(traced, program, hardware, donate_argnums=(0,), memory_budget_bytes=math.inf, options=options)
    schedule = posed.question.schedules(posed.meshes[0])[0]
    question = dataclasses.replace(posed.question, schedule=schedule, budget_bytes=1.0)  # in which nothing fits
    fastest_s = plan_posed(posed).certificate.objective
    hopeless = ruled_out(dataclasses.replace(question, to_beat_s=0.5 * fastest_s), posed.meshes, StopRequest())
    assert hopeless is not None and len(hopeless.candidates) == len(posed.meshes) > 1
    assert 0.5 * fastest_s <= min(c.bound_s for c in hopeless.candidates) <= fastest_s * (1 + 1e-9)
    assert ruled_out(dataclasses.replace(question, to_beat_s=1.01 * fastest_s), posed.meshes, StopRequest()) is None


def test_every_form_is_considered_with_micro_batches_and_the_fastest_is_taken(tight):
    plan = tight_with_micro_batches()
    assert plan.choice is not None
    forms = [c.variant for c in plan.choice.candidates]
    assert forms[0] == f"all in all {LAYERS} layers" and any("in 2 micro-batches" in form for form in forms)
    assert plan.certificate.objective == min(c.step_s for c in plan.choice.candidates if c.step_s is not None)
    assert plan.certificate.objective <= tight.certificate.objective * 1.005
    check_equal(plan)


@pytest.mark.parametrize("more", [{"adaptive": True}, {"compile_check": True}, {}])
def test_what_a_plan_must_do_besides_is_asked_of_the_chosen_form(more):
    """What makes an adaptive plan, or one that is compiled, is handed the form that was chosen."""
    asked = []
    plan = plan_variants(
        STEP,
        (STATE, BATCH_SHAPES),
        load_cluster(CLUSTER),
        space_of(STEP, STATE, BATCH_SHAPES, SEARCH),
        options=dataclasses.replace(SEARCH, **more),
        answer=lambda step: lambda posed: asked.append(step) or plan_posed(posed),
        mesh={"data": 8},
    )
    assert plan.choice is not None and asked == ([plan.choice.variant.of(STEP)] if more else [])


def test_a_number_of_micro_batches_is_obeyed():
    plan = planned(options=PlanOptions(remat="as_written", micro_batches=4))
    assert plan.choice is not None and plan.choice.variant.parts == (BATCH // 4,) * 4
    assert plan.equations == trace(STEP.in_parts((BATCH // 4,) * 4), (STATE, BATCH_SHAPES), (0,)).graph.equations
    check_equal(plan)


def test_where_nothing_is_asked_what_a_step_recomputes_is_a_suggestion():
    """Where there is memory enough nothing is computed again; `as_written` binds."""
    plan = planned(CHECKPOINTED, options=PlanOptions())
    assert plan.choice is not None and plan.choice.candidates[0].variant == "as written"
    assert num_checkpoints(plan) == 0 and plan.choice.variant.parts is None
    assert plan.estimate.step_s < planned(CHECKPOINTED, options=AS_WRITTEN).estimate.step_s


def test_where_nothing_is_asked_a_step_that_fits_is_planned_as_it_is_written():
    """The plan is the very same, and none other is made."""
    stages = []
    plan = planned(options=PlanOptions(on_progress=lambda p: stages.append((p.stage, p.detail))))
    asked = planned(options=AS_WRITTEN)
    alike = lambda p: (p.shardings, p.arguments, p.equations, p.orders, p.estimate, p.certificate.objective)
    assert alike(plan) == alike(asked) and plan.choice is asked.choice is None
    assert [detail for stage, detail in stages if stage == "form"] == ["as written"]


def test_where_nothing_is_asked_a_step_that_does_not_fit_gets_another_form():
    """It did not fit as it is written; nor does it where that is asked for."""
    share = {"share": 0.7}
    plan = planned(options=PlanOptions(), **share)
    assert plan.choice is not None and not plan.choice.variant.is_as_written
    assert plan.choice.candidates[0].variant == "as written" and plan.choice.candidates[0].step_s is None
    assert plan.certificate.objective <= tight_with_micro_batches().certificate.objective * 1.005
    assert any("Forbid it" in w for w in plan.warnings) == (plan.choice.variant.parts is not None)
    recomputed = planned(options=PlanOptions(micro_batches="as_written"), **share)
    assert recomputed.choice is not None and recomputed.choice.variant.parts is None
    cut = planned(options=PlanOptions(remat="as_written"), **share)
    assert cut.choice is not None and cut.choice.variant.policy is None and cut.choice.variant.parts is not None
    with pytest.raises(MemoryBudgetError):
        planned(options=dataclasses.replace(AS_WRITTEN, least_memory_s=0.0), **share)


def test_a_loss_that_weighs_examples_by_the_batch_is_not_cut_unless_asked():
    """Masked means of micro-batches are not that of the batch."""

    def loss_fn(params, batch, key):
        x = batch["x"]
        for w in params:
            x = block(x, w)
        counts = batch["y"][:, 0] > 0
        return jnp.sum(jnp.mean((x - batch["y"]) ** 2, -1) * counts) / jnp.maximum(jnp.sum(counts), 1), {}

    step = TrainStep(loss_fn, optax.adam(1e-3))
    for options in (PlanOptions(), PlanOptions(remat="search")):
        plan = planned(step, share=0.7, options=options)
        assert plan.choice is not None and plan.choice.variant.parts is None and plan.choice.variant.policy is not None
    line = r"test_variant_search\.py:\d+ \(loss_fn\)"
    assert re.search(f"Micro-batches were not tried.*{line}", plan.choice.note)
    with pytest.raises(MemoryBudgetError, match=f"Micro-batches were not tried.*{line}"):
        planned(step, share=0.7, options=PlanOptions(remat="as_written", least_memory_s=0.0))
    cut = planned(step, options=PlanOptions(remat="as_written", micro_batches=2))
    assert any("may be another loss" in w and re.search(line, w) for w in cut.warnings)
    assert not any("another loss" in w for w in planned(options=PlanOptions(micro_batches=2)).warnings)


def test_a_model_with_state_of_its_own_is_not_cut_unless_asked():
    """Running averages see micro-batches."""

    def loss_fn(params, mutable, batch, key):
        loss, aux = STEP.loss_fn(params, batch, key)
        return loss, ({"mean": 0.9 * mutable["mean"] + 0.1 * batch["x"].mean()}, aux)

    step = TrainStep(loss_fn, optax.adam(1e-3), has_mutable=True)
    state = STATE.replace(mutable={"mean": jax.ShapeDtypeStruct((), jnp.float32)})
    assert space_of(step, STATE, BATCH_SHAPES, PlanOptions()).counts[:3] == (None, 2, 4)
    counts = lambda asked=None: space_of(step, state, BATCH_SHAPES, PlanOptions(micro_batches=asked)).counts
    assert counts() == counts("as_written") == counts(1) == (None,)
    assert counts(2) == (2,) and counts("search")[:3] == (None, 2, 4)


def test_a_plan_of_micro_batches_survives_its_file_and_is_traced_once(tmp_path):
    plan = planned(options=PlanOptions(micro_batches=2))
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.choice == plan.choice
    again.check(STEP, (STATE, BATCH_SHAPES))
    assert "2 micro-batches" in " ".join(plan.explain(full=True).split())
    assert plan.kept_trace is not None
    assert check(plan, STEP, (STATE, BATCH_SHAPES)) is check(plan, STEP, (STATE, BATCH_SHAPES))
