"""Operands of products are exchanged where less is moved for it: derived by hand, equal as computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from autoshard.trace.operand_order import operands_ordered
from autoshard.trace.trace import trace
from autoshard.trace.walk import nested_programs, num_equations, open_jaxpr

BATCH, QUERIES, KEYS, HEADS, GROUP, DIM = 2, 48, 40, 3, 4, 8
QUERY, KEY = (BATCH, QUERIES, HEADS, GROUP, DIM), (BATCH, KEYS, HEADS, DIM)


def grouped(query, key, value):
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, key)
    return jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores), value)


def transposed_last(query, key, value):
    """As in Gemma: keys stand in the third place."""
    scores = jnp.einsum("bqhgd,bkhd->bqkhg", query, key)
    return jnp.einsum("bqkhg,bkhd->bqhgd", jax.nn.softmax(scores, axis=2), value)


def in_blocks(query, key, value):
    """Blocks of queries in a loop."""
    blocks = query.reshape(BATCH, 4, -1, HEADS, GROUP, DIM).swapaxes(0, 1)
    out = jax.lax.scan(jax.checkpoint(lambda _, block: (None, grouped(block, key, value))), None, blocks)[1]
    return out.swapaxes(0, 1).reshape(QUERY)


def given_to_a_function(query, key, value):
    """Scores are given to a checkpointed function that transposes them; their precision is named on the way."""
    scores = jax.lax.reduce_precision(jax.lax.dot_general(key, query, (((3,), (4,)), ((0, 2), (0, 2)))), 8, 23)
    weights = jax.checkpoint(lambda s: jax.nn.softmax(s.transpose(0, 1, 4, 3, 2)))(scores)
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights, value)


KEEPING_PRODUCTS = jax.checkpoint(grouped, policy=jax.checkpoint_policies.dots_saveable)
FORMS = [grouped, transposed_last, in_blocks, given_to_a_function, jax.checkpoint(grouped), KEEPING_PRODUCTS]
IDS = ["grouped", "transposed last", "in blocks", "given to a function", "recomputed", "keeping products"]


def gradients(attention):
    return jax.grad(lambda *args: jnp.sum(attention(*args) ** 2), argnums=(0, 1, 2))


def arrays(*shapes):
    return [jnp.asarray(np.random.default_rng(n).standard_normal(s), "float32") for n, s in enumerate(shapes)]


def products(program):
    """The shapes of all batched products that a program makes, those of nested programs included."""
    found = []
    for equation in open_jaxpr(program).eqns:
        if equation.primitive.name == "dot_general" and equation.params["dimension_numbers"][1][0]:
            found.append(equation.outvars[0].aval.shape)
        for nested in nested_programs(equation):
            found += products(nested)
    return found


@pytest.mark.parametrize("attention", FORMS, ids=IDS)
def test_what_is_computed_stays_the_same(attention):
    args = arrays(QUERY, KEY, KEY)
    for f in (attention, gradients(attention)):
        closed = jax.make_jaxpr(f)(*args)
        ordered = operands_ordered(closed)
        count = lambda program: sum(map(num_equations, program.jaxpr.eqns))
        assert count(ordered) == count(closed)
        assert ordered.out_avals == closed.out_avals and ordered.in_avals == closed.in_avals
        for x, y in zip(jaxpr_as_fun(ordered)(*args), jaxpr_as_fun(closed)(*args), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5)
    assert products(ordered) != products(closed)


def test_scores_are_made_with_keys_innermost():
    """As written (batch, heads, keys, queries, group): four lie innermost. Values times weights: of
    (.., values, group, queries) and (.., group, queries, values), the left operand is the weights, whose innermost
    dimension is the one that is summed."""
    args = arrays(QUERY, KEY, KEY)
    before, after = (products(p) for p in (jax.make_jaxpr(grouped)(*args), trace(grouped, args).jaxpr))
    assert before == [(BATCH, HEADS, KEYS, QUERIES, GROUP), (BATCH, HEADS, DIM, GROUP, QUERIES)]
    assert after == [(BATCH, HEADS, QUERIES, GROUP, KEYS), (BATCH, HEADS, GROUP, QUERIES, DIM)]


def test_a_product_that_is_kept_for_the_backward_pass_is_kept_as_it_is_made():
    step = gradients(KEEPING_PRODUCTS)
    scores = (BATCH, HEADS, QUERIES, GROUP, KEYS)
    equations = trace(step, arrays(QUERY, KEY, KEY)).jaxpr.jaxpr.eqns
    (backward,) = (e for e in equations if "prevent_cse" in e.params)
    assert scores in [v.aval.shape for v in backward.invars]


def test_a_product_that_is_read_otherwise_is_left_alone():
    def returned(query, key):
        scores = jax.lax.dot_general(key, query, (((3,), (4,)), ((0, 2), (0, 2))))
        return scores.transpose(0, 1, 4, 3, 2), scores

    def added(query, key):
        scores = jax.lax.dot_general(key, query, (((3,), (4,)), ((0, 2), (0, 2))))
        return scores.transpose(0, 1, 4, 3, 2), scores + 1.0

    for f in (returned, added):
        closed = jax.make_jaxpr(f)(*arrays(QUERY, KEY))
        assert operands_ordered(closed) is closed


def gradient_of_experts(rows, grads):
    """As of their weights: more is left of the left operand, and the sides are exchanged then."""
    return jax.lax.dot_general(grads, rows, (((1, 2), (1, 2)), ((0,), (0,)))).transpose(0, 2, 1)


@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (lambda q, k: jnp.einsum("bqhd,bkhd->bkhq", q, k), (KEY, KEY)),
        (lambda q, k: jnp.einsum("bqgd,bkd->bgqk", q, k), ((2, 16, 32, 8), (2, 24, 8))),
        (gradient_of_experts, ((2, 5, 7, 8), (2, 5, 7, 16))),
    ],
    ids=["heads of their own", "long rows", "only exchanged"],
)
def test_products_that_gain_nothing_are_left_alone(f, shapes):
    """With one dimension on each side, or where that is all that a transposition does, XLA exchanges operands itself;
    what is innermost with 32 elements is turned at full speed."""
    closed = jax.make_jaxpr(f)(*arrays(*shapes))
    assert operands_ordered(closed) is closed


def test_a_precision_for_each_operand_goes_with_it():
    highest, default = jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT

    def scores(query, key):
        numbers = (((3,), (4,)), ((0, 2), (0, 2)))
        return jax.lax.dot_general(key, query, numbers, precision=(highest, default)).transpose(0, 1, 4, 3, 2)

    program = operands_ordered(jax.make_jaxpr(scores)(*arrays(QUERY, KEY)))
    (product,) = (e for e in program.jaxpr.eqns if e.primitive.name == "dot_general")
    assert product.params["precision"] == (default, highest)
    assert product.invars == program.jaxpr.invars


def test_programs_that_are_nested_twice_stay_shared():
    layer = jax.jit(grouped)
    args = arrays(QUERY, KEY, KEY)
    program = operands_ordered(jax.make_jaxpr(lambda q, k, v: layer(layer(q, k, v), k, v))(*args))
    first, second = (nested_programs(e)[0] for e in program.jaxpr.eqns if nested_programs(e))
    assert first is second and products(first) == [(2, 3, 48, 4, 40), (2, 3, 4, 48, 8)]


def test_branches_are_ordered_where_one_of_them_gains():
    args = arrays(QUERY, KEY, KEY)
    branch = lambda q, k, v: jax.lax.cond(q.sum() > 0, grouped, lambda q, k, v: q, q, k, v)
    plain = jax.make_jaxpr(lambda q: jax.lax.cond(q.sum() > 0, jnp.sin, jnp.cos, q))(args[0])
    closed = jax.make_jaxpr(branch)(*args)
    ordered = operands_ordered(closed)
    assert operands_ordered(plain) is plain and products(ordered) != products(closed)
    np.testing.assert_allclose(jaxpr_as_fun(ordered)(*args)[0], branch(*args), rtol=2e-5, atol=1e-5)
