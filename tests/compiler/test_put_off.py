"""When a checkpointed function computes again what only its gradients need, derived by hand."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.compiler.analysis import analyse
from autoshard.compiler.def_use import def_use
from autoshard.compiler.put_off import put_off
from autoshard.trace.trace import trace

KEPT = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


def block(x, w):
    """A batched product of pairs and, behind it, a perceptron of which the products are kept."""
    pairs = jnp.einsum("bnd,bmd->bnm", x, x)
    mixed = jnp.einsum("bnm,bmd->bnd", jnp.sin(pairs), x)
    y = jnp.einsum("bnd,de->bne", mixed, w)
    return jnp.einsum("bne,ef->bnf", jnp.cos(y), w)


def gradients(policy):
    """The graph of a step in which `block` is computed again, and something else twice behind that."""

    def f(w, x):
        gradient = jax.grad(lambda w: jnp.sum(jax.checkpoint(block, policy=policy)(x, w) ** 2))(w)
        return [jnp.sin(gradient) for _ in range(2)]

    shapes = (8, 8), (2, 8, 8)
    return trace(f, [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]).graph


def products(graph, source="block"):
    return [o.index for o in graph.operations if o.name == "dot_general" and source in o.source]


def test_pairs_are_computed_again_when_their_gradient_is_due():
    """Kept are `y` and what is returned, so that the gradients begin with those of the second weight and of `cos(y)`.
    Only the third product of gradients, that of the first weight, needs what was mixed, and with it the pairs."""
    graph = gradients(KEPT)
    first, *_ = graph.checkpoints[-1]
    inside = [o for o in products(graph) if o >= first]
    pairs, mixed, *backward = inside
    names = lambda o: [graph.values[v].shape for v in graph.operations[o].results if v is not None]
    assert [names(o) for o in (pairs, mixed)] == [[(2, 8, 8)]] * 2 and len(backward) >= 3
    late = put_off(def_use(graph))
    needs_mixed = next(o for o in backward if graph.operations[mixed].result() in graph.operations[o].operands)
    assert late[pairs] == late[mixed] == needs_mixed > backward[0]
    live, value = analyse(graph).live, graph.operations[pairs].result()
    starts = [{life.value: life.start for life in ranges}[value] for ranges in (live.hiding_ranges, live.ranges)]
    assert starts == [needs_mixed, pairs], "where collectives hide, and where they do not"


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
def test_what_the_first_gradient_needs_is_computed_where_the_program_does(policy):
    """Where nothing is kept the first gradient needs all products before it; where all is, none is computed again."""
    graph = gradients(policy)
    assert put_off(def_use(graph)).keys().isdisjoint(products(graph))
