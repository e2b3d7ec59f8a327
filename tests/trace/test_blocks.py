"""The blocks of annotated code reach every operation that comes of it."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.graph.graph import OperationKind
from autoshard.trace.inline import inlined
from autoshard.trace.trace import trace

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


def layer(w, x):
    return sine(x @ w)


FORMS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: jax.vmap(f, in_axes=(None, 0)),
    "scan": lambda f: lambda w, x: jax.lax.scan(lambda c, _: (f(w, c), None), x, None, length=3)[0],
    "checkpoint in scan": lambda f: FORMS["scan"](jax.checkpoint(f)),
    "scan in checkpoint": lambda f: jax.checkpoint(FORMS["scan"](f)),
    "scan in jit in vmap": lambda f: jax.vmap(jax.jit(FORMS["scan"](f)), in_axes=(None, 0)),
    "cond": lambda f: lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: f(w, x), lambda: x),
    "map": lambda f: lambda w, x: jax.lax.map(lambda rows: f(w, rows), x.reshape(4, 2, 8)),
}


@autoshard.split(2, dims={"rows": 8})
def annotated(w, x):
    return layer(w, x)


def blocks_of(fn):
    """Of a training step with a loss of `fn`: the blocks of its products and sines, and of all operations."""

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(fn(w, x)) * 3.0)(w)

    operations = trace(step, (X, X)).graph.operations
    asked = [([str(b) for b in o.blocks], o) for o in operations]
    return [b for b, o in asked if o.name in ("dot_general", "sin", "cos")], asked


@pytest.mark.parametrize("form", FORMS)
def test_a_block_inside_is_on_both_passes_of_what_is_in_it(form):
    products, everything = blocks_of(FORMS[form](annotated))
    assert len(products) >= 3 and all(b == ["split(2, rows=8)"] for b in products)
    assert everything[-1][0] == []  # the update


@pytest.mark.parametrize("form", FORMS)
def test_a_block_around_is_on_all_that_comes_of_it(form):
    def around(w, x):
        with autoshard.replicate(4):
            return FORMS[form](annotated)(w, x)

    products, everything = blocks_of(around)
    assert len(products) >= 3 and all(b == ["replicate(4)", "split(2, rows=8)"] for b in products)
    loops = [b for b, o in everything if o.kind is not OperationKind.EQUATION]
    assert all(b[:1] == ["replicate(4)"] for b in loops) and (loops or "scan" not in form)
    assert everything[-1][0] == []


def test_calls_are_inlined_with_the_blocks_around_them():
    @jax.jit
    @autoshard.split(2, dims={"rows": 8})
    def called(w, x):
        return x @ w

    @autoshard.replicate(4)
    def twice(w, x):
        return called(w, called(w, x))

    closed = inlined(jax.make_jaxpr(twice)(X, X))
    products = [e for e in closed.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert [str(e.source_info.name_stack).count("autoshard.replicate?") for e in products] == [1, 1]
    graph = trace(jex.jaxpr_as_fun(closed), (X, X)).graph
    asked = [[str(b) for b in o.blocks] for o in graph.operations if o.name == "dot_general"]
    assert asked == [["replicate(4)", "split(2, rows=8)"]] * 2


def test_another_annotation_makes_another_program():
    """A plan obeys its annotations; it is not one of the same program with others. Lines may move."""
    signature = lambda fn: trace(fn, (X, X)).graph.equations
    assert signature(autoshard.replicate(2)(layer)) != signature(layer)
    assert signature(autoshard.replicate(2)(layer)) != signature(autoshard.replicate(4)(layer))
    one = autoshard.replicate(2)(layer)
    other = autoshard.replicate(2)(layer)
    assert signature(one) == signature(other)
