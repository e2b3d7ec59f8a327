"""Layers are equal sequences of equations in a chain, and loops; where nothing repeats there are none."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.remat.layers import find_runs
from autoshard.remat.policy import LayerRun
from autoshard.trace.inline import inlined

X = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def runs_of(fn, *args) -> tuple[LayerRun, ...]:
    return find_runs(inlined(jax.make_jaxpr(fn)(*args), opens_checkpoints=True).jaxpr)


def weights(*sizes):
    return [jax.ShapeDtypeStruct(pair, jnp.float32) for pair in zip(sizes, sizes[1:], strict=False)]


def plain(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return x.sum()


@pytest.mark.parametrize("count", [2, 3, 7])
def test_equal_layers_are_a_run_of_the_shortest_period(count):
    assert runs_of(plain, weights(*[8] * (count + 1)), X) == (LayerRun(0, 2, count),)


def test_layers_that_are_checkpointed_or_called_are_found_all_the_same():
    layer = jax.checkpoint(jax.jit(lambda x, w: jnp.tanh(x @ w)))

    def loss(ws, x):
        for w in ws:
            x = layer(x, w)
        return x.sum()

    assert runs_of(loss, weights(8, 8, 8, 8), X) == (LayerRun(0, 2, 3),)


def test_layers_of_two_kinds_are_two_runs():
    """8 wide, three times; one of another shape; 4 wide, twice."""
    assert runs_of(plain, weights(8, 8, 8, 8, 4, 4, 4), X) == (LayerRun(0, 2, 3), LayerRun(8, 2, 2))


def test_a_layer_begins_where_least_passes_to_the_next():
    """Before the layers something is added as at their end: the repeat begins there, the layers one equation later.
    Between two blocks only the residual stream is alive, inside a block the hidden layer or a branch beside it."""

    def loss(ws, x):
        x = x + 2.0 * x
        for up, down in ws:
            x = x + jnp.tanh(x @ up) @ down
        return x.sum()

    ws = [tuple(weights(8, 32, 8))] * 3
    equations = inlined(jax.make_jaxpr(loss)(ws, X)).jaxpr.eqns
    (run,) = runs_of(loss, ws, X)
    assert (run.period, run.count) == (4, 3)
    assert equations[run.start].primitive.name == "dot_general"
    assert equations[run.start - 1].primitive.name == "add"


def test_what_does_not_repeat_or_stands_side_by_side_is_no_layer():
    assert runs_of(plain, weights(8, 16, 4), X) == ()

    assert runs_of(lambda ws, x: jnp.stack([x @ w for w in ws]).sum(), weights(8, 8, 8), X) == ()
    assert runs_of(lambda x: jnp.tanh(jnp.tanh(jnp.tanh(x))).sum(), X) == ()  # nothing heavy


def test_what_has_effects_is_left_alone():
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
            jax.debug.print("{}", x[0, 0])
        return x.sum()

    assert runs_of(loss, weights(8, 8, 8), X) == ()


def test_a_loop_over_layers_is_a_run():
    def loss(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0].sum()

    (run,) = runs_of(loss, jax.ShapeDtypeStruct((5, 8, 8), jnp.float32), X)
    assert (run.count, run.is_loop, run.stop) == (5, True, run.start + 1)


def test_a_loop_over_parts_is_no_run():
    """Its products have nothing to do with each other, though their results are summed."""

    def loss(w, x):
        add = lambda total, part: (total + jnp.tanh(part @ w).sum(), part @ w)
        return jax.lax.scan(add, 0.0, x.reshape(2, -1, x.shape[-1]))[0]

    assert runs_of(loss, jax.ShapeDtypeStruct((8, 8), jnp.float32), X) == ()
