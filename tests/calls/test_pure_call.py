"""Calls as people write them: keywords, constants, wrapped functions and steps of `jax.pmap`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard.calls.pure_call import FunctionOfArrays, Statics, planned_call
from autoshard.errors import ConfigError
from autoshard.train_step import TrainStep

MESH = {"data": 8}
X = np.arange(64.0, dtype=np.float32).reshape(8, 8)


def scaled(x, times, *, shift=0.0, negative=False):
    return -x * times + shift if negative else x * times + shift


def test_a_function_of_arrays_stays_what_it_is():
    call = planned_call(scaled, (X, 2.0))
    assert call.fn is scaled and call.args == (X, 2.0) and call.finish(3) == 3


def test_constants_and_keywords_become_part_of_the_function():
    static = Statics.of(scaled, argnames=("times", "negative"))
    assert static == Statics((1,), ("times", "negative"))
    one, same, other = (
        planned_call(scaled, (X, times), {"negative": True, "shift": 1.0}, static) for times in (2, 2, 3)
    )
    assert isinstance(one.fn, FunctionOfArrays) and one.fn == same.fn and one.fn != other.fn
    assert planned_call(scaled, (X, True), {}, static).fn != planned_call(scaled, (X, 1), {}, static).fn
    assert one.args == (X, None, None, 1.0)  # keywords follow in the order of their names
    np.testing.assert_array_equal(one.fn(*one.args), -2 * X + 1)


def test_keywords_are_planned_and_run():
    plan = autoshard.plan(scaled, X, 2.0, shift=1.0, negative=True, static_argnames="negative", mesh=MESH)
    assert [a.name for a in plan.arguments] == ["x", "times", "shift"]
    run = plan.jit(scaled)
    np.testing.assert_array_equal(run(X, 2.0, shift=1.0, negative=True), -2 * X + 1)
    run.prepare(X, 2.0, shift=1.0, negative=True)
    assert run.lower(X, 2.0, shift=1.0, negative=True).compile() is not None


def test_what_jit_was_told_holds():
    wrapped = jax.jit(scaled, static_argnums=1, static_argnames="negative", donate_argnums=0)
    plan = autoshard.plan(wrapped, X, 3, negative=True, mesh=MESH)
    assert plan.donate_argnums == (0,) and [a.name for a in plan.arguments] == ["x"]
    np.testing.assert_array_equal(plan.jit(wrapped)(jnp.asarray(X), 3, negative=True), -3 * X)


def test_leaves_that_are_no_arrays_are_constants():
    def layer(params, x):
        return params["activation"](x @ params["w"])

    params = {"w": X, "activation": jax.nn.relu, "name": "layer", "none": None, "sizes": [8, 8]}
    run = autoshard.plan(layer, params, X, mesh=MESH).jit(layer)
    np.testing.assert_allclose(run(params, X), np.maximum(X @ X, 0), rtol=1e-6)


def test_a_module_of_functions_and_settings_is_changed_and_returned():
    """As Equinox's modules are: its `filter_jit` takes Python's numbers in them for constants, too."""

    def step(layer, x):
        assert isinstance(layer["padding"], float)
        pooled = jax.lax.reduce_window(x, layer["padding"], jax.lax.max, (1, 2), (1, 2), "VALID")
        loss, gradient = jax.value_and_grad(lambda w: jnp.sum(layer["activation"](pooled @ w)))(layer["w"])
        return {**layer, "w": layer["w"] - gradient}, loss

    layer = {"w": X[:4] / 64, "activation": jnp.tanh, "padding": -float("inf"), "name": "layer"}
    run = autoshard.plan(step, layer, X, mesh=MESH).jit(step)
    changed, loss = run(layer, X)
    expected, expected_loss = step(layer, X)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(changed["w"], expected["w"], rtol=1e-5, atol=1e-6)
    assert changed["activation"] is jnp.tanh and changed["name"] == "layer"
    run(changed, X)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"memory_budget": 1},
            "`memory_budget` is no option, and no argument of `scaled`.*Did you mean `memory_",
        ),
        (
            {"time_limit_s": 1},
            r"`time_limit_s` is no option, .* Did you mean `options=PlanOptions\(time_limit_s=\.\.\.\)`\?",
        ),
        ({"shiftt": 1}, "which takes `x`, `times`, `shift`, `negative`. Did you mean `shift`"),
    ],
)
def test_a_name_that_nobody_takes_is_told(given, told):
    with pytest.raises(ConfigError, match=told):
        autoshard.plan(scaled, X, 2.0, mesh=MESH, **given)


def test_a_train_step_takes_nothing_else():
    step = TrainStep(lambda params, batch: 0.0, optax.sgd(0.1))
    with pytest.raises(ConfigError, match="TrainStep is planned for .state, batch. alone; received mesh_axes"):
        autoshard.plan(step, step.init({}), {}, mesh_axes=2)


def test_a_step_for_pmap_is_that_of_one_device_with_the_whole_batch():
    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        total = jax.lax.psum(loss, "batch") / jax.lax.axis_size("batch")
        noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("batch")), (3,))
        return w - jax.lax.pmean(gradient, "batch"), total, noise

    w, x = X / 64, np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    with pytest.warns(UserWarning, match="axis `batch`, as under jax.pmap.*pass the whole batch"):
        run = autoshard.plan(step, w, x, mesh=MESH).jit(step)
    ours = run(w, x)
    theirs = jax.pmap(step, axis_name="batch", in_axes=(None, 0))(w, x.reshape(8, 8, 8))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other[0], rtol=1e-5, atol=1e-6)


@pytest.fixture
def compilation_cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_jit_plans_for_each_shape_and_keeps_plans_beside_compiled_programs(compilation_cache, capfd):
    def decorated(body):
        @functools.partial(autoshard.jit, mesh=MESH, static_argnames="times")
        def product(x, y, times=1):
            return body(x, y) * times

        return product

    product = decorated(lambda x, y: x @ y)
    np.testing.assert_allclose(product(X, X, times=2), 2 * X @ X, rtol=1e-6)
    assert "`product` on 8 devices, data=8: planned in" in capfd.readouterr().err
    product(X, X, times=2)
    assert capfd.readouterr().err == ""
    product(X[:, :4], X[:4])
    assert "planned in" in capfd.readouterr().err
    assert len(list((compilation_cache / "autoshard-plans").iterdir())) == 2
    decorated(lambda x, y: x @ y)(X, X, times=2)
    assert "plan of an earlier run" in capfd.readouterr().err
    changed = decorated(lambda x, y: x @ y + 1)
    np.testing.assert_allclose(changed(X, X, times=2), 2 * X @ X + 2, rtol=1e-6)
    told = capfd.readouterr().err
    assert "is of another function" in told and "planned in" in told
