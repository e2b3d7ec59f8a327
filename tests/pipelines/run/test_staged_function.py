"""A step that runs as a staged plan says is the step of one device in the same micro-batches.

Two runs have between them: all four schedules, unequal shares of two pipelines, tied weights across stages and
pipelines, clipping by the global norm, dropout, loss scaling with an overflow, batch norm, random keys in the state, a
stage that is computed again, several stages on one submesh, buffers that are given away, parameters in half precision
and one that nobody reads, and a batch that is a plain array. benchmarks/staged_equality.py has every model of the zoo.
"""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct

from autoshard import PlanOptions, StagedPlan
from autoshard.cluster import Cluster, DeviceType, Link, NodeGroup
from autoshard.errors import MeshError, PlanMismatchError, StageError, TraceError
from autoshard.pipelines.plan.make import plan_staged
from autoshard.pipelines.run.update import SMALL_BYTES
from autoshard.pipelines.schedule.tasks import Phase, ScheduleKind
from autoshard.pipelines.search.arrangement import Arrangement, Pipeline, Stage, Submesh
from autoshard.pipelines.search.options import StageOptions
from autoshard.train_step import TrainStep

WIDTH, LENGTH = 36, 3
FAST_1, FAST_2, SLOW_1, SLOW_2 = range(4)
"""Meshes of one and of two devices, as planning counts them."""


def cluster() -> Cluster:
    """Four fast devices and four slow ones, for which splitting pays at any size."""
    made_up = "made up for this test"
    device = lambda name, flops: DeviceType(name, {"float32": flops, "bfloat16": flops}, 10**9, 1e9, 0.0, made_up)
    group = lambda name, flops: NodeGroup(name, device(name, flops), 1, 4, Link(1e-12, 1e9, 0, made_up))
    return Cluster("mixed", (group("fast", 1e9), group("slow", 5e8)), Link(1e-12, 1e9, 1, made_up))


def planned(step: TrainStep, state: Any, batch: Any, *pipelines: Pipeline) -> StagedPlan:
    options = PlanOptions(cache=False, relative_gap=0.05)
    made = plan_staged(
        step, state, batch, cluster(), options, StageOptions(most_devices_per_stage=2), None, Arrangement(pipelines)
    )
    return StagedPlan.of(made)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / shape[-1] ** 0.5


def copied(tree: Any) -> Any:
    return jax.device_put(tree, may_alias=False)


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Floats agree to a share of the largest number of their leaf, and everything else is the same."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, x), y in pairs:
        name = jax.tree_util.keystr(path)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        scale = np.abs(y).max(initial=0) if jnp.issubdtype(expected_type(found, path), jnp.inexact) else 0.0
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * scale, err_msg=name)


def expected_type(tree: Any, path: Any) -> Any:
    return next(x.dtype for p, x in jax.tree.leaves_with_path(tree) if p == path)


# ---- a language model


@struct.dataclass
class Scale:
    """The scale of the loss."""

    scale: jax.Array


class Halving:
    """Halves the scale after a step whose gradients were not finite."""

    def first(self) -> Scale:
        return Scale(jnp.float32(2.0**15))

    def next(self, current: Scale, is_finite: jax.Array) -> Scale:
        return Scale(jnp.where(is_finite, current.scale, current.scale / 2))


def nameless_momentum() -> optax.GradientTransformation:
    """Momentum that is kept in the order of the leaves, so that its paths tell nothing of the parameters."""

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        leaves, tree = jax.tree.flatten(gradients)
        new = tuple(0.5 * m + g for m, g in zip(state, leaves, strict=True))
        return jax.tree.unflatten(tree, new), new

    return optax.GradientTransformation(lambda params: tuple(map(jnp.zeros_like, jax.tree.leaves(params))), update)


def language_loss(params: Any, batch: Any, key: Any) -> Any:
    """Blocks between tied embeddings, with dropout; each example has a weight, by which a test makes it overflow."""
    x = params["table"][batch["words"]]
    for k, block in enumerate(params["blocks"]):
        kept = jax.random.bernoulli(jax.random.fold_in(key, k), 0.8, x.shape)
        x = x + jnp.where(kept, jnp.tanh(x @ block["kernel"] + block["bias"]), 0.0)
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["table"].T, batch["next"]).mean(1)
    hits = jnp.mean(jnp.argmax(x @ params["table"].T, -1) == batch["next"])
    return jnp.mean(losses * batch["weight"]), {"hits": hits, "words": jnp.int32(batch["words"].size)}


@dataclasses.dataclass(frozen=True)
class Run:
    """A training step with its plan, as it runs staged and plain."""

    step: TrainStep
    state: Any
    batch: Any
    plan: StagedPlan
    staged: Any
    plain: Any


@pytest.fixture(scope="module")
def language() -> Run:
    """Three stages for two thirds of a batch of six, and beside them two stages for the rest."""
    block = lambda seed: {"kernel": normal(seed, WIDTH, WIDTH), "bias": jnp.zeros(WIDTH)}
    params = {
        "table": normal(0, 16, WIDTH),
        "blocks": [block(1), block(2), block(3)],
        "unread": jnp.ones(5),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-4), nameless_momentum())
    step = TrainStep(language_loss, optimizer, scaling=Halving())
    words = np.random.default_rng(0).integers(16, size=(6, LENGTH + 1), dtype=np.int64)
    batch = {"words": words[:, :-1], "next": words[:, 1:], "weight": np.linspace(0.5, 1.5, 6)}
    state = step.init(params, jax.random.PRNGKey(7))  # a raw key; the other run has a typed one
    num_layers = len(planned_layers(step, state, batch))
    first, second = round(num_layers / 3), round(2 * num_layers / 3)
    large = Pipeline(
        (Submesh(0, 0, FAST_2), Submesh(0, 2, FAST_1), Submesh(1, 0, SLOW_1)),
        (Stage(0, first), Stage(first, second, rematerialise=True), Stage(second, num_layers)),
        2,
        2,
        ScheduleKind.ONE_F_ONE_B,
    )
    small = Pipeline(
        (Submesh(1, 2, SLOW_2), Submesh(0, 3, FAST_1)),
        (Stage(0, second), Stage(second, num_layers)),
        1,
        2,
        ScheduleKind.ZERO_BUBBLE,
    )
    plan = planned(step, state, batch, large, small)
    return Run(step, state, batch, plan, plan.jit(step, donate=True, record=True), jax.jit(step.in_parts(plan.parts)))


def planned_layers(step: TrainStep, state: Any, batch: Any) -> tuple[int, ...]:
    from autoshard.pipelines.split.forward import trace_forward
    from autoshard.pipelines.split.layer_boundaries import find_layers

    return find_layers(trace_forward(step, state, batch, 2)).starts


def test_staged_steps_are_the_steps_of_one_device(language):
    """Three steps, of which the second overflows and is left out."""
    assert language.plan.parts == (2, 2, 1, 1)
    state, expected = copied(language.state), language.state
    for number in range(3):
        weight = language.batch["weight"] * (1e38 if number == 1 else 1.0)
        batch = language.batch | {"weight": weight}
        given, before = state, expected
        state, metrics = language.staged(state, batch)
        expected, wanted = language.plain(expected, batch)
        if number != 1:  # where it overflows the loss is infinite in both
            assert_equal(metrics, wanted)
        assert float(metrics["is_finite"]) == (number != 1)
        assert_equal(state, expected)
        if number:  # what was given away may not be used again
            assert any(x.is_deleted() for x in jax.tree.leaves(given.opt_state))
        assert jnp.array_equal(expected.params["table"], before.params["table"]) == (number == 1)
    assert float(state.loss_scale.scale) == 2.0**14 and int(state.step) == 3
    assert float(state.params["unread"].max()) < 1.0  # its weight decays


def test_each_parameter_lives_in_one_submesh_with_its_optimizer_state(language):
    state, _ = language.staged(copied(language.state), language.batch)
    where = lambda x: {d.id for d in x.sharding.device_set}
    moments = state.opt_state[1][0]
    for parameter, moment in zip(*map(jax.tree.leaves, (state.params, moments.mu)), strict=True):
        assert where(parameter) == where(moment) and len(where(parameter)) <= 2
    large = [k for k, m in enumerate(state.opt_state[2]) if m.nbytes > SMALL_BYTES]
    assert len(large) == 3
    for k in large:  # by what they are added to
        assert state.opt_state[2][k].sharding == jax.tree.leaves(moments.mu)[k].sharding
    assert where(state.step) == where(state.rng) == {0, 1, 2, 3, 4, 6, 7}  # device 5 is idle
    owners = {language.plan.parameters[n]: h for n, h in enumerate(language.plan.owners)}
    assert {h.pipeline for h in owners.values()} == {0, 1}  # the optimizer's state is shared out


def test_what_was_recorded_has_every_task_once(language):
    language.staged(copied(language.state), language.batch)
    tasks = [(e.pipeline, e.stage, e.phase, e.micro_batch) for e in language.staged.timeline.events if e.phase]
    assert len(set(tasks)) == len(tasks)
    assert sum(phase is Phase.FORWARD for *_, phase, _ in tasks) == 2 * 3 + 2 * 2
    assert {p for p, _, phase, _ in tasks if phase is Phase.WEIGHT} <= {1}


def test_what_does_not_fit_the_plan_is_refused(language):
    plan, step = language.plan, language.step
    with pytest.raises(MeshError, match="8 devices of cluster `mixed`"):
        plan.jit(step, jax.devices()[:4])
    with pytest.raises(PlanMismatchError, match="6 examples; received one of 4"):
        language.staged(copied(language.state), jax.tree.map(lambda x: x[:4], language.batch))
    without = dict(list(language.batch.items())[1:])
    with pytest.raises(PlanMismatchError, match=r"planned as `batch\..*, but the function is called with"):
        language.staged(copied(language.state), without)
    gone = copied(language.state)
    jax.tree.leaves(gone.params)[0].delete()
    with pytest.raises(TraceError, match=r"`state\.params\..* is deleted: an earlier call reused the memory"):
        language.staged(gone, language.batch)
    narrow = language.state.replace(params=jax.tree.map(lambda x: x[:1], language.state.params))
    renamed = language.state.params | {"unread_": jnp.ones(5)}
    renamed = language.state.replace(params={k: v for k, v in renamed.items() if k != "unread"})
    halved = language.batch | {"weight": language.batch["weight"].astype(np.float16)}
    for other, batch, message in (
        (narrow, language.batch, r"planned as `state\.params\.\S+` float32\[\d.*is called with .*\[1"),
        (renamed, language.batch, r"planned as `state\.params\.unread`, but .* with `state\.params\.unread_`"),
        (language.state, halved, r"planned as `batch\.weight` float32\[6\], .* `batch\.weight` float16\[6\]"),
    ):
        with pytest.raises(PlanMismatchError, match=message):
            language.staged(copied(other), batch)
        if batch is language.batch:
            with pytest.raises(PlanMismatchError, match=message):
                plan.init(lambda other=other: other, run=language.staged)
    with pytest.raises(PlanMismatchError, match="received `language_loss`, which is none"):
        plan.jit(language_loss)
    other = dataclasses.replace(step, loss_fn=lambda p, b, k: (jnp.sum(p["table"][b["words"]] ** 2), {}))
    with pytest.raises(PlanMismatchError, match="no longer"):
        plan.jit(other)(language.state, language.batch)
    with pytest.raises(StageError, match=re.escape("record=True")):
        _ = plan.jit(step).timeline


# ---- a model with state of its own, of a batch that is one array


def encoder_loss(params: Any, mutable: Any, batch: Any, key: Any) -> Any:
    """Layers with a norm over the batch each, which keeps a running mean; noise by a key and a counter of the state."""
    count, key = mutable["count"] + 1, jax.random.fold_in(mutable["key"], mutable["count"])
    x, means = batch + 0.1 * jax.random.normal(key, batch.shape), {}
    for name, weight in params.items():
        x = jnp.float32(x) @ weight
        mean = jnp.mean(x, 0)
        x = jnp.tanh((x - mean) * jax.lax.rsqrt(jnp.var(x, 0) + 0.1)).astype(weight.dtype)
        means[name] = 0.9 * mutable["means"][name] + 0.1 * mean
    new = mutable | {"means": means, "count": count}
    return jnp.mean((jnp.float32(x) - batch) ** 2), (new, {})


@pytest.fixture(scope="module")
def encoder() -> Run:
    """Four stages in turn on two submeshes for three quarters of the batch, and beside them two stages for the rest."""
    params = {n: normal(k, WIDTH, WIDTH).astype(jnp.bfloat16) for k, n in enumerate("abcdef")}
    means = {n: jnp.full(WIDTH, float(k)) for k, n in enumerate("abcdef")}
    mutable = {"means": means, "count": jnp.int32(0), "key": jax.random.key(9), "unread": jnp.ones(3)}
    step = TrainStep(encoder_loss, optax.sgd(0.1, momentum=0.9), has_mutable=True, scaling=Halving())
    state, batch = step.init(params, jax.random.key(0), mutable), normal(11, 16, WIDTH)
    num_layers = len(planned_layers(step, state, batch))
    ends = [0, 1, num_layers // 2, num_layers - 1, num_layers]
    stages = tuple(Stage(a, b) for a, b in zip(ends, ends[1:], strict=False))
    large = Pipeline((Submesh(0, 0, FAST_2), Submesh(1, 0, SLOW_2)), stages, 4, 3, ScheduleKind.INTERLEAVED)
    halves = Stage(0, ends[2]), Stage(ends[2], num_layers)
    small = Pipeline((Submesh(0, 2, FAST_1), Submesh(1, 2, SLOW_1)), halves, 2, 2, ScheduleKind.GPIPE)
    plan = planned(step, state, batch, large, small)
    return Run(step, state, batch, plan, plan.jit(step), jax.jit(step.in_parts(plan.parts)))


def mutable_of(run: Run, state: Any, start: int, count: int, sizes: tuple[int, ...]) -> Any:
    """The mutable state after the micro-batches of one pipeline, which begin at an example and a count."""
    mutable = state.mutable | {"count": jnp.int32(count)}
    for size in sizes:
        mutable = run.step.objective(state.params, mutable, run.batch[start : start + size], state.rng)[1][0]
        start += size
    return mutable


def test_state_of_the_model_is_the_mean_of_the_pipelines_and_the_rest_is_the_step_of_one_device(encoder):
    """Counters too: the second pipeline begins where the first ends, so that it draws other noise."""
    state, metrics = encoder.staged(encoder.state, encoder.batch)
    expected, wanted = encoder.plain(encoder.state, encoder.batch)
    assert_equal(metrics, wanted)
    # sums of gradients are made in bfloat16, whose numbers are 2**-8 apart, in another order
    assert_equal((state.params, state.opt_state), (expected.params, expected.opt_state), 2**-6)
    large = mutable_of(encoder, encoder.state, 0, 0, (4, 4, 4))
    small = mutable_of(encoder, encoder.state, 12, 3, (2, 2))
    assert_equal(state.mutable["means"], jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, large["means"], small["means"]))
    assert int(state.mutable["count"]) == int(expected.mutable["count"]) == 5
    assert not any("same mutable state" in warning for warning in encoder.plan.warnings)
    assert jnp.array_equal(jax.random.key_data(state.mutable["key"]), jax.random.key_data(encoder.state.mutable["key"]))
    np.testing.assert_array_equal(state.mutable["unread"], encoder.state.mutable["unread"])


def test_a_state_that_is_not_given_away_can_be_used_again(encoder):
    first, _ = encoder.staged(encoder.state, encoder.batch)
    again, _ = encoder.staged(encoder.state, encoder.batch)
    assert_equal(again, first, 0.0)
    twice, _ = encoder.staged(first, encoder.batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves((encoder.state, first)))
    assert int(twice.step) == 2


def test_the_backward_pass_reads_the_state_of_its_own_micro_batch():
    """Other micro-batches have changed it since: a scale, and a counter under `checkpoint` by which noise is drawn.

    The counter of the second layer is read in the first stage and goes on in the second.
    """

    def loss(params, mutable, batch):
        x, new = batch, {}
        for name, weight in params.items():

            def layer(weight, x, count):
                kept = jax.random.bernoulli(jax.random.fold_in(jax.random.key(3), count), 0.5, x.shape)
                return x + jnp.where(kept, jnp.tanh(x @ weight), 0.0)

            scale, count = mutable[name]
            x, scale = jax.checkpoint(layer)(weight, x, count) * scale, scale * 1.5
            new[name] = scale, count + 1
        return jnp.mean(x**2), (new, {})

    step, batch = TrainStep(loss, optax.sgd(1.0), has_mutable=True), normal(9, 8, WIDTH)
    params = {name: normal(seed, WIDTH, WIDTH) for seed, name in enumerate("abcd")}
    state = step.init(params, None, {name: (jnp.float32(1), jnp.int32(0)) for name in params})
    num_layers = len(planned_layers(step, state, batch))
    stages = Stage(0, num_layers // 2), Stage(num_layers // 2, num_layers)
    submeshes = Submesh(0, 0, FAST_1), Submesh(1, 0, SLOW_1)
    plan = planned(step, state, batch, Pipeline(submeshes, stages, 2, 4, ScheduleKind.ONE_F_ONE_B))
    found, expected = (fn(state, batch) for fn in (plan.jit(step), jax.jit(step.in_parts(plan.parts))))
    moved = lambda after: jax.tree.map(lambda x, y: x - np.asarray(y), after.params, state.params)
    assert_equal(moved(jax.device_get(found[0])), moved(expected[0]))
    assert_equal((found[0].mutable, found[1]), (expected[0].mutable, expected[1]))


def test_keys_that_pipelines_share_are_told():
    """A key that is split for every micro-batch: no pipeline can know where the one before it will have ended."""

    def loss(params, mutable, batch):
        key, own = jax.random.split(mutable["key"])
        return jnp.mean((batch * params["w"] + jax.random.normal(own, batch.shape)) ** 2), ({"key": key}, {})

    step, batch = TrainStep(loss, optax.sgd(0.1), has_mutable=True), jnp.ones((4, 2))
    state = step.init({"w": jnp.ones(2)}, None, {"key": jax.random.key(0)})
    one, other = (Pipeline((Submesh(0, n, FAST_1),), (Stage(0, 1),), 2, 1, ScheduleKind.GPIPE) for n in (0, 1))
    longer = dataclasses.replace(one, num_micro_batches=2)
    told = [planned(step, state, batch, *pipelines).warnings for pipelines in ((one, other), (longer,))]
    assert [sum("2 pipelines side by side" in w and "`key`" in w for w in warnings) for warnings in told] == [1, 0]


def test_stages_cannot_share_what_the_model_changes(encoder):
    """A count that all layers read and the last one changes: refused when it is planned."""

    def loss(params, mutable, batch, key):
        x = batch
        for weight in params.values():
            x = jnp.tanh((x * mutable["count"]) @ weight)
        return jnp.mean(x**2), ({"count": mutable["count"] + 1.0}, {})

    step = TrainStep(loss, optax.sgd(0.1), has_mutable=True)
    state = step.init({n: normal(0, WIDTH, WIDTH) for n in "ab"}, None, {"count": jnp.float32(1)})
    submeshes, stages = (Submesh(0, 0, FAST_1), Submesh(0, 1, FAST_1)), (Stage(0, 1), Stage(1, 2))
    with pytest.raises(StageError, match="`count` is read by stage 0 of pipeline 0 and changed by stage 1"):
        planned(step, state, encoder.batch, Pipeline(submeshes, stages, 16, 1, ScheduleKind.GPIPE))


def test_a_loss_that_is_another_in_micro_batches_is_told():
    """Squares 1, 2, 3, 4 with weights 1, 1, 1, 0 have the weighted mean 2, but (1.5 + 3) / 2 in two halves."""

    def weighted(params, batch):
        squares = jnp.sum((batch["x"] * params["w"]) ** 2, 1)
        return jnp.sum(squares * batch["weight"]) / jnp.sum(batch["weight"])

    def plain(params, batch):
        return jnp.mean(jnp.sum((batch["x"] * params["w"]) ** 2, 1) * batch["weight"])

    batch = {"x": jnp.sqrt(jnp.arange(1.0, 5.0))[:, None], "weight": jnp.array([1.0, 1.0, 1.0, 0.0])}
    in_one, in_two = (Pipeline((Submesh(0, 0, FAST_1),), (Stage(0, 1),), 4 // n, n, ScheduleKind.GPIPE) for n in (1, 2))
    told = {}
    for loss in (weighted, plain):
        step = TrainStep(loss, optax.sgd(0.1))
        state = step.init({"w": jnp.ones(1)})
        for pipeline in (in_one, in_two):
            found = [w for w in planned(step, state, batch, pipeline).warnings if "may be another loss" in w]
            told[loss.__name__, pipeline.num_micro_batches] = found
        losses = [float(step.in_parts(parts)(state, batch)[1]["loss"]) for parts in ((4,), (2, 2))]
        assert losses == pytest.approx([2.0, 2.25] if loss is weighted else [1.5, 1.5])
    (warning,) = told.pop(("weighted", 2))
    assert re.search(r"2 micro-batches.*div at .*test_staged_function\.py:\d+.*num_micro_batches=1", warning)
    assert not any(told.values())
