"""Shardy as the source: unknown primitives never raise, and nothing is split that cannot be."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import Primitive

from autoshard.graph.graph import Factor
from autoshard.trace.rules import rule_of
from autoshard.trace.rules.index_forest import IndexForest

X = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def composite_rule(function, *avals):
    traced = jax.make_jaxpr(lax.composite(function, name="test.composite"))(*avals)
    return rule_of(traced.jaxpr.eqns[-1])


def test_primitive_without_lowering_is_replicated():
    mystery = Primitive("mystery")
    mystery.def_abstract_eval(lambda x: x)
    (eqn,) = jax.make_jaxpr(mystery.bind)(X).jaxpr.eqns
    rule = rule_of(eqn)
    assert (rule.origin, rule.factors, rule.operands, rule.results) == ("replicated", (), (((), ()),), (((), ()),))


def test_what_the_host_is_given_is_whole():
    (eqn,) = jax.make_jaxpr(lambda x: jax.pure_callback(lambda y: y, x, x))(X).jaxpr.eqns
    rule = rule_of(eqn)
    assert rule.origin == "table" and rule.factors == ()


def test_elementwise_program_is_parallel():
    rule = composite_rule(lambda x: jnp.sin(x) + x * 2, X)
    assert (rule.origin, rule.factors) == ("shardy", (Factor(16), Factor(8)))
    assert rule.operands == rule.results == (((0,), (1,)),)


@pytest.mark.parametrize(
    ("reduce", "combiner"), [(jnp.sum, "add"), (jnp.max, "max"), (jnp.min, "min"), (jnp.prod, "mul")]
)
def test_last_reduction_is_a_reduction(reduce, combiner):
    rule = composite_rule(lambda x: reduce(x * x, axis=0), X)
    assert set(rule.factors) == {Factor(16, combiner), Factor(8)}


def test_inner_reduction_stays_whole():
    """A partial sum must not pass through a square root."""
    rule = composite_rule(lambda x: jnp.sqrt(jnp.sum(x, axis=0)), X)
    assert rule.factors == (Factor(8),) and rule.operands == (((), (0,)),)


def test_transposed_use_stays_whole():
    """One index would stand in both dimensions of x."""
    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert composite_rule(lambda x: x + x.T, square).factors == ()


def test_inner_merge_keeps_the_major_dimension():
    """In the merged tensor inside, only the major dimension can be split without knowing of the other."""
    rule = composite_rule(lambda x: (x.reshape(-1) + 1).reshape(x.shape), X)
    assert rule.factors == (Factor(16),) and rule.operands == rule.results == (((0,), ()),)


def test_visible_merge_keeps_both():
    rule = composite_rule(lambda x: (x + 1).reshape(-1), X)
    assert rule.factors == (Factor(16), Factor(8))
    assert rule.operands == (((0,), (1,)),) and rule.results == (((0, 1),),)


def test_branches_and_loops_are_followed():
    def program(x):
        x = lax.cond(x[0, 0] > 0, lambda y: jnp.cumsum(y, 1), lambda y: y * 2, x)
        return lax.fori_loop(0, 3, lambda _, y: jnp.flip(y, 1), x)

    rule = composite_rule(
        lambda x: jax.vmap(lambda row: jnp.flip(row, 0))(lax.fori_loop(0, 3, lambda _, y: y * 2, x)), X
    )
    assert rule.factors == (Factor(16),) and rule.results == (((0,), ()),)
    assert composite_rule(program, X).factors == ()


def test_result_and_its_sum_stay_whole_where_they_differ():
    """Of two results one carries the index and the other sums over it: no single factor says that."""
    rule = composite_rule(lambda x: (x * 2, x.sum(0)), X)
    assert rule.factors == (Factor(8),)


@st.composite
def compositions(draw):
    """A product of primes merged into sizes in two ways."""
    primes = draw(st.lists(st.sampled_from([2, 3, 5]), min_size=1, max_size=6))

    def merged():
        sizes = [primes[0]]
        for prime in primes[1:]:
            if draw(st.booleans()):
                sizes[-1] *= prime
            else:
                sizes.append(prime)
        return sizes

    return merged(), merged()


@given(compositions())
def test_tied_dimensions_have_the_same_leaves(pair):
    """Two mergings of one list of primes always agree, and tying leaves nothing whole."""
    forest = IndexForest()
    left, right = ([forest.new(size) for size in sizes] for sizes in pair)
    forest.tie(left, right)
    assert forest.leaves(left) == forest.leaves(right)
    assert not any(forest.is_whole(leaf) for leaf in forest.leaves(left))


def test_misfit_becomes_whole():
    forest = IndexForest()
    left, right = [forest.new(4), forest.new(6)], [forest.new(6), forest.new(4)]
    forest.tie(left, right)
    assert all(forest.is_whole(leaf) for leaf in forest.leaves(left) + forest.leaves(right))


def test_marks_outlive_splitting_and_uniting():
    forest = IndexForest()
    twelve, three, four, other = (forest.new(size) for size in (12, 3, 4, 4))
    forest.mark_whole([twelve])
    forest.mark_reduced(other, 7)
    forest.tie([twelve], [three, four])
    forest.tie([four], [other])
    assert forest.is_whole(forest.leaves([other])[0])
    assert forest.reduced_by(forest.leaves([twelve])[1]) == {7}
    assert forest.reduced_by(forest.leaves([twelve])[0]) == frozenset()
