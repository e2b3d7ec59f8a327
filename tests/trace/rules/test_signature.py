"""Signatures: equal for equal equations, different whenever the rule could differ."""

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.trace.rules import rule_of, signature_of


def equations(function, *avals):
    return jax.make_jaxpr(function)(*avals).jaxpr.eqns


def f(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_equal_equations_have_equal_signatures(any_example):
    first, second = any_example.eqn, any_example.eqn  # traced anew, unless JAX remembers an inner program
    if any_example.primitive != "reduce":  # holds a Python function, which is compared by identity
        assert signature_of(first) == signature_of(second)
    assert hash(signature_of(first)) == hash(signature_of(first))
    assert rule_of(first) == rule_of(second)


def test_shape_dtype_and_parameters_count():
    variants = [
        equations(lambda x: x.sum(0), f(4, 4)),
        equations(lambda x: x.sum(1), f(4, 4)),
        equations(lambda x: x.sum(0), f(4, 8)),
        equations(lambda x: lax.reduce_sum(x, (0,)), f(4, 4, dtype=jnp.bfloat16)),
        equations(lambda x: x.max(0), f(4, 4)),
    ]
    signatures = {signature_of(eqns[-1]) for eqns in variants}
    assert len(signatures) == len(variants)


def test_nested_programs_count_by_content():
    def scatter(update):
        return equations(lambda t, k, x: update(t.at[k])(x), f(8), f(2, dtype=jnp.int32), f(2))[-1]

    assert signature_of(scatter(lambda ref: ref.add)) == signature_of(scatter(lambda ref: ref.add))
    assert signature_of(scatter(lambda ref: ref.add)) != signature_of(scatter(lambda ref: ref.multiply))


def test_weak_types_do_not_count():
    """`x + 1.0` and `x + y` with a strong scalar have one rule."""
    weak = equations(lambda x: x + 1.0, f(4))[-1]
    strong = equations(lambda x, y: lax.add(x, lax.broadcast_in_dim(y, (4,), ())), f(4), f())[-1]
    scalar = equations(lambda x: x + 1.0, f(4))[-1]
    assert signature_of(weak) == signature_of(scalar) != signature_of(strong)
