"""A training step in micro-batches is the step over the whole batch, with each micro-batch's own random numbers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct

import autoshard
from autoshard import TrainStep
from autoshard.errors import StageError
from autoshard.remat.policy import Keep, uniform
from autoshard.remat.rewrite import layers_of, rematerialised

PARAMS = {"w": jnp.arange(6.0).reshape(3, 2) / 10, "b": jnp.zeros(2)}
BATCH = {"x": jnp.sin(jnp.arange(24.0)).reshape(8, 3), "y": jnp.arange(8) % 2}


def loss_fn(params: Any, batch: Any, key: Any) -> Any:
    logits = batch["x"] @ params["w"] + params["b"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return jnp.mean(losses), {"hits": jnp.mean(logits.argmax(1) == batch["y"]), "examples": losses.size}


def close(found: Any, expected: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), found, expected)


@pytest.mark.parametrize("parts", [(8,), (2, 2, 2, 2), (1, 4, 3)])
def test_micro_batches_add_up_to_the_batch(parts):
    """Gradients and metrics are means over all examples, however these are shared out."""
    step = TrainStep(loss_fn, optax.adamw(1e-2))
    state = step.init(PARAMS)
    expected, metrics = step(state, BATCH)
    by_hand = jax.grad(lambda p: loss_fn(p, BATCH, None)[0])(PARAMS)
    close(expected.opt_state[0].mu, jax.tree.map(lambda g: 0.1 * g, by_hand))
    found, found_metrics = step.in_parts(parts)(state, BATCH)
    close((found.params, found.opt_state), (expected.params, expected.opt_state))
    mean_size = sum(n * n for n in parts) / 8  # the mean over examples of the size of their micro-batch
    close(found_metrics, metrics | {"examples": mean_size})
    assert int(found.step) == 1 and found.mutable == {} and found.loss_scale is None


def test_mutable_state_passes_from_part_to_part_and_random_numbers_differ():
    """Equal and unequal parts: each adds what it drew."""

    def noisy(params, mutable, batch, key):
        drawn = jax.random.uniform(key)
        new = {"log": jnp.roll(mutable["log"], 1).at[0].set(drawn), "count": mutable["count"] + 1}
        return params * drawn * jnp.mean(batch), (new, {"drawn": drawn})

    step = TrainStep(noisy, optax.sgd(1.0), has_mutable=True)
    state = step.init(jnp.float32(1.0), jax.random.key(5), {"log": jnp.zeros(4), "count": jnp.int32(0)})
    state = state.replace(step=jnp.int32(7))
    key = jax.random.fold_in(state.rng, 7)
    drawn = [float(jax.random.uniform(jax.random.fold_in(key, m))) for m in range(3)]
    for parts in ((2, 2, 2), (1, 2, 3)):
        after, metrics = step.in_parts(parts)(state, jnp.ones(6))
        mean = sum(n * x for n, x in zip(parts, drawn, strict=True)) / 6
        close(after.mutable["log"], [*drawn[::-1], 0.0])
        close((after.params, metrics["drawn"], metrics["loss"]), (1.0 - mean, mean, mean))
        assert int(after.mutable["count"]) == 3
        np.testing.assert_array_equal(jax.random.key_data(after.rng), jax.random.key_data(state.rng))
    after, metrics = step(state, jnp.ones(6))
    close(metrics["drawn"], float(jax.random.uniform(key)))  # one part draws from the step's own key


@struct.dataclass
class Scale:
    """The scale of the loss."""

    scale: jax.Array


class Moving:
    """Doubles the scale after finite gradients, and halves it after others."""

    def first(self) -> Scale:
        return Scale(jnp.float32(1024.0))

    def next(self, current: Scale, is_finite: jax.Array) -> Scale:
        return Scale(jnp.where(is_finite, current.scale * 2, current.scale / 2))


@pytest.mark.parametrize("parts", [None, (4, 4), (5, 3)])
def test_the_scale_of_the_loss_changes_nothing_unless_gradients_overflow(parts):
    plain = TrainStep(loss_fn, optax.sgd(0.1, momentum=0.9), parts=parts)
    scaled = dataclasses.replace(plain, scaling=Moving())
    expected, metrics = plain(plain.init(PARAMS), BATCH)
    state, found = scaled(scaled.init(PARAMS), BATCH)
    close((state.params, state.opt_state), (expected.params, expected.opt_state))
    close(found, metrics | {"loss_scale": 1024.0, "is_finite": 1.0})
    assert float(state.loss_scale.scale) == 2048.0
    left_out, found = scaled(state, BATCH | {"x": BATCH["x"].at[7, 0].set(jnp.inf)})
    jax.tree.map(np.testing.assert_array_equal, left_out.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, left_out.opt_state, state.opt_state)
    assert float(found["is_finite"]) == 0.0 and float(left_out.loss_scale.scale) == 1024.0 and int(left_out.step) == 2


def test_a_batch_without_examples_can_be_run_whole_only():
    """Nodes and edges of a graph differ in number."""
    loss = lambda params, batch, key: (params * (jnp.sum(batch["nodes"]) + jnp.sum(batch["edges"])), None)
    step, batch = TrainStep(loss, optax.sgd(1.0)), {"nodes": jnp.ones(3), "edges": jnp.ones(5)}
    state, metrics = step(step.init(jnp.float32(2.0)), batch)
    assert float(state.params) == 2.0 - 8.0 and list(metrics) == ["loss"]
    with pytest.raises(StageError, match=r"examples as its first dimension.*`edges` \[5\], `nodes` \[3\]"):
        step.in_parts((1, 2))(state, batch)


@pytest.mark.parametrize(
    ("returned", "has_mutable", "message"),
    [
        (lambda x: {"loss": x.mean()}, False, r"must return the loss, or \(loss, aux\); received dict"),
        (lambda x: (x.mean(), {}, {}), False, r"must return the loss, or \(loss, aux\); received tuple"),
        (lambda x: x.mean(1), False, r"`loss` has shape \[8\]"),
        (lambda x: x.mean(), True, r"must return \(loss, \(mutable, aux\)\); received"),
        (lambda x: (x.mean(), {}), True, r"must return \(loss, \(mutable, aux\)\)"),
        (lambda x: (x.mean(), ({}, {}, {})), True, "received .loss, tuple"),
        (lambda x: (x, {}), False, r"`loss` has shape \[8, 3\]"),
        (lambda x: (x.mean(), {"rows": x.mean(1)}), False, r"`rows` has shape \[8\]"),
        (lambda x: (x.mean(), x.mean()), False, "must be a dict of scalars"),
    ],
)
def test_what_a_loss_may_not_return(returned, has_mutable, message):
    step = TrainStep(lambda params, *rest: returned(BATCH["x"] * params), optax.sgd(0.1), has_mutable)
    with pytest.raises(StageError, match=message):
        step(step.init(jnp.float32(1.0)), BATCH)


def noisy_loss(params: Any, batch: Any, rng: Any) -> jax.Array:
    return loss_fn(params, batch, None)[0] + params["b"][0] * (0.0 if rng is None else jax.random.normal(rng))


def setting_kept(params: Any, batch: Any, *, train: bool = True) -> Any:
    assert train is True
    return loss_fn(params, batch, None)[0], None


def positional_too(params: Any, batch: Any, rng: Any = None, *, key: str = "y") -> jax.Array:
    return noisy_loss(params, {"x": batch["x"], "y": batch[key]}, rng)


@functools.wraps(lambda params, batch: ...)
def adapted(params: Any, batch: Any, rng: Any) -> jax.Array:
    return noisy_loss(params, batch, rng)


class Losses:
    """Losses that are methods."""

    def plain(self, params: Any, batch: Any) -> jax.Array:
        return noisy_loss(params, batch, None)

    @functools.partial(jax.jit, static_argnums=0)
    def noisy(self, params: Any, batch: Any, rng: Any) -> jax.Array:
        return noisy_loss(params, batch, rng)

    __call__ = plain


class Untold:
    """What its arguments are cannot be read."""

    __signature__ = 0

    def __call__(self, params: Any, batch: Any, rng: Any) -> jax.Array:
        return noisy_loss(params, batch, rng)


quiet: Any = lambda params, batch: noisy_loss(params, batch, None)
WITHOUT_RNG = {
    "loss alone": quiet,
    "with aux": lambda params, batch: loss_fn(params, batch, None),
    "a setting by keyword": setting_kept,
    "any keywords": lambda params, batch, **settings: noisy_loss(params, batch, settings.get("rng")),
    "jitted": jax.jit(quiet),
    "checkpointed": jax.checkpoint(quiet),
    "jitted by Flax": nnx.jit(quiet),
    "rng set already": functools.partial(noisy_loss, rng=None),
    "method": Losses().plain,
    "callable": Losses(),
}
WITH_RNG = {
    "loss alone": noisy_loss,
    "optional": positional_too,
    "by keyword": lambda params, batch, *, rng: noisy_loss(params, batch, rng),
    "key, by optional keyword": lambda params, batch, *, train=True, key=None: noisy_loss(params, batch, key),
    "any arguments": lambda *args: noisy_loss(*args),
    "jitted": jax.jit(noisy_loss),
    "jitted, by keyword": jax.jit(lambda params, batch, *, key: noisy_loss(params, batch, key)),
    "wrapper with arguments of its own": adapted,
    "jitted wrapper": jax.jit(adapted),
    "jitted method": Losses().noisy,
    "arguments that cannot be read": Untold(),
}


@pytest.mark.parametrize("parts", [None, (4, 4), (5, 3)])
@pytest.mark.parametrize(
    ("loss", "has_rng"),
    [*((loss, False) for loss in WITHOUT_RNG.values()), *((loss, True) for loss in WITH_RNG.values())],
    ids=[*(f"{name}, no rng" for name in WITHOUT_RNG), *(f"{name}, rng" for name in WITH_RNG)],
)
def test_rng_and_aux_may_be_left_out(loss, has_rng, parts):
    """The step is that of `(params, batch, rng) -> (loss, aux)`."""
    whole = lambda params, batch, rng: (noisy_loss(params, batch, rng if has_rng else None), {})
    own, written_out = (TrainStep(fn, optax.sgd(0.1, momentum=0.9), parts=parts) for fn in (loss, whole))
    state = written_out.init(PARAMS, jax.random.key(3))
    (found, metrics), (expected, expected_metrics) = own(state, BATCH), written_out(state, BATCH)
    close((found.params, found.opt_state), (expected.params, expected.opt_state))
    close(metrics["loss"], expected_metrics["loss"])
    assert set(metrics) == {"loss", *(("hits", "examples") if loss is WITHOUT_RNG["with aux"] else ())}


@pytest.mark.parametrize("parts", [None, (4, 4), (5, 3)])
def test_rng_may_be_left_out_beside_mutable_state(parts):
    def loss(params, mutable, batch):
        return quiet(params, batch), ({"count": mutable["count"] + 1}, {"count": mutable["count"]})

    whole = lambda params, mutable, batch, rng: loss(params, mutable, batch)
    own, written_out = (TrainStep(fn, optax.sgd(0.1), has_mutable=True, parts=parts) for fn in (loss, whole))
    state = own.init(PARAMS, mutable={"count": jnp.float32(2.0)})
    (found, metrics), (expected, expected_metrics) = own(state, BATCH), written_out(state, BATCH)
    close((found.params, found.mutable, metrics), (expected.params, expected.mutable, expected_metrics))


def test_a_loss_in_the_whole_form_is_called_itself():
    """So that its programs stay the same, and JAX finds them."""
    for loss in (loss_fn, noisy_loss, positional_too, adapted, Untold()):
        assert TrainStep(loss, optax.sgd(0.1)).of_arrays(PARAMS).loss_fn is loss


def test_what_stands_for_a_loss_is_found_again():
    """JAX finds what it traced of a function that is still there, or equal to one."""
    traced = []

    def loss(params, batch):
        traced.append(batch)
        return quiet(params, batch)

    step, key = TrainStep(loss, optax.sgd(0.1)), jax.random.key(0)
    for _ in range(2):
        jax.make_jaxpr(step.of_arrays(PARAMS).loss_fn)(PARAMS, BATCH, key)
    assert len(traced) == 1 and step.in_parts((4, 4)).of_arrays(PARAMS).loss_fn == step.of_arrays(PARAMS).loss_fn


def test_a_loss_without_rng_is_planned_in_stages():
    loss = lambda params, batch: quiet(params[1], batch | {"x": jnp.tanh(batch["x"] @ params[0])})
    step = TrainStep(loss, optax.sgd(0.1))
    state, stages = step.init([jnp.eye(3), PARAMS]), autoshard.StageOptions(num_stages=2, num_micro_batches=2)
    plan = autoshard.plan(step, state, BATCH, stages=stages, options=autoshard.PlanOptions(mesh_limit_s=5))
    assert isinstance(plan, autoshard.StagedPlan) and [len(p.stages) for p in plan.arrangement.pipelines] == [2]
    (found, metrics), (expected, expected_metrics) = plan.jit(step)(state, BATCH), step.in_parts((4, 4))(state, BATCH)
    close((found.params, metrics), (expected.params, expected_metrics))


@pytest.mark.parametrize(
    ("loss", "has_mutable", "message"),
    [
        (lambda p: p, False, r"takes \(params, batch, rng\) or \(params, batch\); received <lambda>\(p\)\. Put all"),
        (
            lambda params, mutable, batch, rng: params,
            False,
            r"\(params, mutable, batch, rng\)\..*for a loss of \(params, mutable",
        ),
        (lambda params, batch, *, scale: params, False, r"\*, scale\)\..*functools.partial"),
        (lambda params, batch: params, True, r"takes \(params, mutable, batch, rng\) or \(params, mutable, batch\)"),
    ],
)
def test_what_a_loss_may_not_take(loss, has_mutable, message):
    step = TrainStep(loss, optax.sgd(0.1), has_mutable)
    with pytest.raises(StageError, match=message):
        step(step.init(jnp.float32(1.0)), BATCH)


def test_parts_must_have_all_examples_and_the_name_is_that_of_the_loss():
    step = TrainStep(loss_fn, optax.sgd(0.1))
    assert step.__name__ == "loss_step"
    with pytest.raises(StageError, match=r"parts of \(4, 2\), 6 in all, for a batch of 8"):
        step.in_parts((4, 2))(step.init(PARAMS), BATCH)


class Net(nnx.Module):
    """A module with all kinds of state: weights that two layers share, averages, random numbers."""

    seen: nnx.Intermediate

    def __init__(self, key: Any):
        rngs = nnx.Rngs(key)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])
        self.layers[3].kernel = self.layers[0].kernel
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.norm(self.dropout(x))


def module_loss(net: Net, batch: Any, key: Any) -> Any:
    return jnp.mean((net(batch["x"]) - batch["y"]) ** 2), {}


MODULE_BATCH = {"x": np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32), "y": np.ones((32, 8), "float32")}


def own_steps(count: int) -> tuple[Net, list[float]]:
    """As Flax trains it."""
    net = Net(jax.random.key(0))
    optimizer = nnx.Optimizer(net, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer, batch):
        loss, gradients = nnx.value_and_grad(lambda net: module_loss(net, batch, None)[0])(net)
        optimizer.update(net, gradients)
        return loss

    return net, [float(step(net, optimizer, MODULE_BATCH)) for _ in range(count)]


def module_step() -> tuple[TrainStep, Any]:
    step = TrainStep(module_loss, optax.sgd(0.1, momentum=0.9))
    return step, lambda seed: step.init(Net(jax.random.key(seed)))


def as_arrays(module: Any) -> Any:
    key_data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.tree.map(key_data, nnx.to_pure_dict(nnx.state(module)))


def test_a_module_is_trained_on_a_mesh_as_flax_trains_it():
    """What is not trained changes too."""
    step, init = module_step()
    shapes = jax.eval_shape(init, 0)
    options = autoshard.PlanOptions(mesh_limit_s=5)
    plan = autoshard.plan(step, shapes, MODULE_BATCH, mesh={"data": 4, "tensor": 2}, options=options, donate_argnums=0)
    names = {a.name for a in plan.arguments}
    assert "state.params.layers.0.kernel" in names and "state.params.layers.3.kernel" not in names
    run, state = plan.jit(step), plan.init(init, 0)
    losses = []
    for _ in range(2):
        state, metrics = run(state, MODULE_BATCH)
        losses.append(float(metrics["loss"]))
    net, expected = own_steps(2)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    close_enough = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    jax.tree.map(close_enough, as_arrays(state.module), as_arrays(net))


@pytest.mark.parametrize(
    "parts",
    [None, pytest.param((16, 16), marks=pytest.mark.exhaustive), pytest.param((12, 20), marks=pytest.mark.exhaustive)],
)
def test_the_loss_of_a_module_may_leave_out_rng_and_aux(parts):
    step, init = module_step()
    step = step if parts is None else step.in_parts(parts)
    short = dataclasses.replace(step, loss_fn=lambda net, batch: module_loss(net, batch, None)[0])
    (found, metrics), (expected, expected_metrics) = (own(init(0), MODULE_BATCH) for own in (short, step))
    close((found.params, as_arrays(found.module)), (expected.params, as_arrays(expected.module)))
    close(metrics, expected_metrics)
    runs = layers_of(short, init(0), MODULE_BATCH).runs
    again, _ = rematerialised(short, uniform(runs, Keep.INPUTS))(init(0), MODULE_BATCH)
    close((again.params, as_arrays(again.module)), (expected.params, as_arrays(expected.module)))
    of_three = dataclasses.replace(step, loss_fn=lambda net, batch: (jnp.mean(net(batch["x"])), {}, {}))
    with pytest.raises(StageError, match=r"must return the loss, or \(loss, aux\); received tuple"):
        of_three(init(0), MODULE_BATCH)
    with pytest.raises(StageError, match=r"takes \(module, batch, rng\) or \(module, batch\); received .*\(net\)"):
        dataclasses.replace(step, loss_fn=lambda net: 0.0)(init(0), MODULE_BATCH)


def test_a_module_is_trained_in_stages_as_on_one_device():
    step, init = module_step()
    stages = autoshard.StageOptions(num_stages=2, num_micro_batches=2)
    options = autoshard.PlanOptions(mesh_limit_s=5)
    shapes = jax.eval_shape(init, 0)
    plan = autoshard.plan(step, shapes, MODULE_BATCH, stages=stages, options=options, donate_argnums=0)
    assert isinstance(plan, autoshard.StagedPlan)
    run = plan.jit(step)
    state, expected = plan.init(init, 0, run=run), init(0)
    for _ in range(2):
        state, metrics = run(state, MODULE_BATCH)
        expected, own = step.in_parts((16, 16))(expected, MODULE_BATCH)
        np.testing.assert_allclose(metrics["loss"], own["loss"], rtol=1e-5)
    assert isinstance(state.module, Net)


def test_layers_of_a_module_are_computed_again_with_what_they_change():
    step, init = module_step()
    state = init(0)
    layers = layers_of(step, state, MODULE_BATCH)
    assert layers.runs
    again = rematerialised(step, uniform(layers.runs, Keep.INPUTS))
    expected, _ = step(state, MODULE_BATCH)
    found, _ = again(state, MODULE_BATCH)
    close((found.params, as_arrays(found.module)), (expected.params, as_arrays(expected.module)))


def test_what_is_wrong_with_a_module_is_told():
    step, init = module_step()
    with pytest.raises(StageError, match="received Net with has_mutable"):
        step.init(Net(jax.random.key(0)), mutable={})
    with pytest.raises(StageError, match=r"TrainStep.init\(module\)"):
        _ = TrainStep(loss_fn, optax.sgd(0.1)).init(PARAMS).module

    def sowing(net: Net, batch: Any, key: Any) -> Any:
        net.seen = nnx.Intermediate(batch["x"])
        return module_loss(net, batch, key)

    with pytest.raises(StageError, match=r"`sowing` adds `seen` of Net.*nnx.pop"):
        jax.eval_shape(TrainStep(sowing, optax.sgd(0.1)), jax.eval_shape(init, 0), MODULE_BATCH)

    annotated = nnx.with_partitioning(nnx.initializers.ones, (None, "tensor"))
    with nnx.use_eager_sharding(False), pytest.warns(UserWarning, match="`kernel` of Linear"):
        step.init(nnx.Linear(8, 8, kernel_init=annotated, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("rng", [7, np.int64(7), jax.random.key(7)], ids=str)
def test_a_state_begins_with_a_key_or_a_seed(rng):
    state = TrainStep(loss_fn, optax.sgd(0.1)).init({"w": jnp.ones(2)}, rng)
    np.testing.assert_array_equal(jax.random.key_data(state.rng), jax.random.key_data(jax.random.key(7)))


@pytest.mark.parametrize("rng", [0.5, "7", jax.random.split(jax.random.key(7)), jnp.float32(7)], ids=repr)
def test_what_is_neither_is_refused(rng):
    with pytest.raises(StageError, match=r"must be one key .* or a seed; received .*\. Pass jax\.random\.key\(0\)"):
        TrainStep(loss_fn, optax.sgd(0.1)).init({"w": jnp.ones(2)}, rng)


def test_raw_keys_are_keys():
    raw = jax.random.PRNGKey(7)
    assert TrainStep(loss_fn, optax.sgd(0.1)).init({"w": jnp.ones(2)}, raw).rng is raw
