"""What is given to `autoshard.plan` in another form than it takes, and to a plan that is run, is told in words."""

import jax
import jax.numpy as jnp
import optax
import pytest

import autoshard
from autoshard.errors import ClusterError, ConfigError, MeshError, PinError, PlanMismatchError, StageError, TraceError

SHAPES = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


def loss_fn(w, x):
    return jnp.mean((x @ w) ** 2)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"mesh": (4, 2)}, MeshError, 'such as {"data": 4, "tensor": 2}; received tuple'),
        ({"mesh": jax.sharding.AbstractMesh((8,), ("data",))}, MeshError, r"received AbstractMesh.*dict\(mesh.shape\)"),
        ({"pins": [("x", None)]}, PinError, "received list. Write a dict"),
        ({"memory_budget_bytes": "24GB"}, ConfigError, "number of bytes per device; received '24GB'. .*give 24e9"),
        ({"donate_argnums": "w"}, TraceError, "must be positions of arguments, such as 0 for the first; received 'w'"),
        ({"options": {"time_limit_s": 3}}, ConfigError, r"options= takes an autoshard.PlanOptions; received dict"),
        ({"stages": {"num_stages": 2}}, ConfigError, r"stages= takes an autoshard.StageOptions; received dict"),
        ({"start": "plan.json"}, ConfigError, r"received str. Read a plan file by autoshard.load\(path\)"),
        ({"cluster": [1, 2]}, ClusterError, r"received list. Which live devices run a plan is told by devices="),
    ],
)
def test_options_of_another_type(given, error, message):
    with pytest.raises(error, match=message):
        autoshard.plan(step, *SHAPES, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"overlap": 80}, "PlanOptions.overlap is a share from 0 to 1; received 80"),
        ({"memory_reserve": "10%"}, "PlanOptions.memory_reserve is a share from 0 to 1; received '10%'"),
        ({"relative_gap": "1%"}, "PlanOptions.relative_gap is a share from 0 to 1; received '1%'"),
        ({"time_limit_s": -1}, "PlanOptions.time_limit_s is a number of seconds; received -1"),
        ({"least_memory_s": None}, "PlanOptions.least_memory_s is a number of seconds; received None"),
        ({"decompose": "yes"}, "PlanOptions.decompose is one of 'never', 'faster', 'any'; received 'yes'"),
        ({"device_order": "any"}, "PlanOptions.device_order is one of 'sought', 'listed'; received 'any'"),
        ({"schedule": "fast"}, "one of autoshard.Schedule.LEAST_MEMORY, .*received 'fast'"),
    ],
)
def test_options_of_another_value(given, message):
    with pytest.raises(ConfigError, match=message):
        autoshard.PlanOptions(**given)


def test_what_is_no_function():
    with pytest.raises(TraceError, match="received ArrayImpl. Write autoshard.plan.step, state, batch., without call"):
        autoshard.plan(step(jnp.ones((16, 16)), jnp.ones((8, 16))))
    with pytest.raises(TraceError, match="under jax.pmap .* received `step` so. Plan the function inside"):
        autoshard.plan(jax.pmap(step), *SHAPES)
    plan = autoshard.plan(step, *SHAPES, mesh={"data": 8})
    with pytest.raises(TraceError, match=r"received ArrayImpl. Pass the function, .*plan.init\(init, 0\)"):
        plan.init(jnp.ones((16, 16)))


def test_a_dimension_without_a_size():
    with pytest.raises(TraceError, match=r"must have a size; received one of shape \(None, 16\)"):
        autoshard.plan(step, SHAPES[0], jax.ShapeDtypeStruct((None, 16), jnp.float32))


def test_train_steps_of_other_parts():
    with pytest.raises(StageError, match="transformation of Optax, with `init` and `update`; received str"):
        autoshard.TrainStep(loss_fn, "adam")
    with pytest.raises(StageError, match="received adam. Write"):
        autoshard.TrainStep(loss_fn, optax.adam)
    with pytest.raises(StageError, match="received ShapeDtypeStruct without step, params, opt_state, rng. Pass what"):
        autoshard.plan(autoshard.TrainStep(loss_fn, optax.sgd(0.1)), *SHAPES)


def test_other_arguments_are_told_before_the_function_stumbles_over_them():
    fn = lambda w, batch: step(w, batch["x"]) - batch["y"].mean()
    batch = lambda *names, width=16: {name: jnp.ones((8, width)) for name in names}
    run = autoshard.plan(fn, jnp.ones((16, 16)), batch("x", "y")).jit(fn)
    for given, told in (
        (batch("x"), r"planned as `batch.y` float32\[8, 16\], but the function is called with nothing"),
        (batch("x", "y", width=12), r"`batch.x` float32\[8, 16\], but .* with `batch.x` float32\[8, 12\]"),
    ):
        with pytest.raises(PlanMismatchError, match=told):
            run(jnp.ones((16, 16)), given)


def test_an_array_that_an_earlier_call_reused():
    """XLA would end the process where several devices are given an array that is gone."""
    w, x = {"up": jnp.ones((16, 16)), "count": jnp.int32(0)}, jnp.ones((8, 16))
    counted = lambda state, x: {"up": step(state["up"], x), "count": state["count"] + 1}
    plan = autoshard.plan(counted, w, x, donate_argnums=0)
    run = plan.jit(counted)
    state = plan.init(lambda: jax.tree.map(jnp.copy, w))
    new = run(state, x)
    with pytest.raises(TraceError, match=r"`state.count` \[\] and 1 more arrays are deleted: .*Pass what that call"):
        run(state, x)
    assert run(new, x)["count"] == 2
