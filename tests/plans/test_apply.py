"""A plan knows the shapes that it was made for; one that was read from a file says what it lacks."""

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.baselines import DataRule, Strategy
from autoshard.errors import ConfigError, PlanMismatchError
from autoshard.plans.apply import argument_shapes


def test_a_planned_function_is_lowered_for_the_planned_arguments(plan, train, shapes):
    lowered = plan.jit(train).lower()
    assert lowered.as_text() == plan.jit(train).lower(*shapes()).as_text()
    assert argument_shapes(plan) == shapes()


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_keys_and_plain_numbers_are_known_too(cluster, kind):
    def fn(key, x, scale):
        return jax.random.normal(key, x.shape) * x * scale

    args = jax.random.key(0, impl=kind), jnp.ones((16, 8), jnp.bfloat16), 2.0
    plan = autoshard.plan(fn, *args, cluster=cluster)
    key, x, scale = argument_shapes(plan)
    assert key.dtype == args[0].dtype and (x.shape, x.dtype) == ((16, 8), jnp.bfloat16)
    assert scale.weak_type and not x.weak_type
    assert plan.jit(fn).lower().as_text() == plan.jit(fn).lower(*args).as_text()


def test_what_was_planned_is_not_traced_again(cluster, tmp_path):
    """By the function itself and arguments of the same kind; others are traced, and refused if they differ."""
    traced = []

    def fn(w, x):
        traced.append(None)
        return jnp.tanh(x @ w)

    args = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    plan = autoshard.plan(fn, *args, cluster=cluster)
    text = plan.jit(fn).lower(*args).as_text()
    assert len(traced) == 1
    plan.save(tmp_path / "plan.json")
    assert autoshard.load(tmp_path / "plan.json").jit(fn).lower(*args).as_text() == text
    assert len(traced) == 2
    plan.jit(lambda w, x: fn(w, x)).lower(*args)
    assert len(traced) == 3
    with pytest.raises(PlanMismatchError, match="leaf 1"):
        plan.jit(fn).lower(args[0], jax.ShapeDtypeStruct((32, 8), jnp.float32))


def test_a_plan_from_a_file_needs_the_arguments(plan, train, shapes, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = autoshard.load(tmp_path / "plan.json")
    assert loaded == plan and isinstance(loaded, autoshard.Plan)
    for use in (lambda: loaded.jit(train).lower(), lambda: loaded.verify(train, target="cpu")):
        with pytest.raises(PlanMismatchError, match="Pass the arguments"):
            use()
    assert loaded.jit(train).lower(*shapes()).as_text() == plan.jit(train).lower().as_text()


def test_verification_needs_no_arguments(plan, train, shapes):
    one, other = plan.verify(train, target="cpu"), plan.verify(train, *shapes(), target="cpu")
    assert (one.flows, one.compiled_memory) == (other.flows, other.compiled_memory)


def test_a_plan_is_compared_as_it_is(plan, train, cluster):
    ddp = Strategy(DataRule.DDP)
    found = plan.compare(train, cluster=cluster, strategies=[ddp], donate_argnums=0)
    assert found.own.plan is plan and [c.name for c in found.contenders] == ["autoshard", "ddp"]


def test_the_only_program_of_a_plan_has_no_number(plan, tmp_path):
    for use in (lambda: plan.explain(0), lambda: plan.draw_timeline(tmp_path / "step.html")):
        with pytest.raises(ConfigError, match="only plans in stages"):
            use()
