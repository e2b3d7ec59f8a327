"""Annotations as code: what they record, and that they do nothing else."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import autoshard
from autoshard.annotations.block import Block, BlockKind, block_of_scope, common_blocks, joined_blocks
from autoshard.errors import AnnotationError

LINES = st.text(max_size=20)
NAMES = st.text(min_size=1, max_size=8)
COUNTS = st.none() | st.integers(1, 10**6)
DIMS = st.lists(st.tuples(NAMES, st.integers(2, 10**6) | st.tuples(NAMES, st.integers(0, 9))), max_size=3).map(tuple)
BLOCKS = st.builds(
    Block,
    st.sampled_from(BlockKind),
    LINES,
    st.lists(st.integers(0, 99), max_size=4).map(tuple),
    COUNTS,
    DIMS,
    st.booleans(),
    st.none() | NAMES,
    COUNTS,
    COUNTS,
)


@given(BLOCKS)
def test_the_name_of_a_scope_tells_the_whole_block(block):
    assert block_of_scope(block.scope) == block
    assert not set("/()") & set(block.scope)  # they separate scopes in name stacks


def test_other_scopes_are_none():
    assert [block_of_scope(n) for n in ("Dense_0", "autoshard", "autoshard.split", "autoshard.cut?line=1", "")] == [
        None
    ] * 5


@given(st.lists(BLOCKS, max_size=4), st.lists(BLOCKS, max_size=4))
def test_blocks_joined_are_there_once_in_order(around, inside):
    joined = joined_blocks(tuple(around), inside)
    assert set(joined) == {*around, *inside} and len(set(joined)) == len(joined)
    assert joined_blocks(joined, inside) == joined  # as in a transposed program, which repeats them
    assert common_blocks([joined, joined]) == joined and common_blocks([joined, ()]) == ()


def annotated(x, w):
    with autoshard.replicate(3):
        with autoshard.pipeline(7, num_stages=5):
            with autoshard.stage(devices="none such"):
                x = jnp.tanh(x @ w)
            with autoshard.stage():
                with autoshard.split(11, dims={"nothing": 1234}, colocate=True):
                    x = x @ w
    return jnp.sum(x)


def plain(x, w):
    return jnp.sum(jnp.tanh(x @ w) @ w)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.grad, jax.checkpoint, lambda f: jax.jit(jax.vmap(f))])
def test_without_autoshard_annotations_do_nothing(transform):
    """The same equations, the same program and the same numbers, whatever is asked for."""
    x, w = jnp.linspace(-1.0, 1.0, 32).reshape(2, 4, 4), jnp.eye(4) * 0.3
    if transform in (jax.grad, jax.checkpoint, jax.jit):
        x = x[0]
    w = w if x.ndim == 2 else jnp.stack([w, w])
    mine, theirs = transform(annotated), transform(plain)
    assert str(jax.make_jaxpr(mine)(x, w)) == str(jax.make_jaxpr(theirs)(x, w)).replace("plain", "annotated")
    assert jnp.array_equal(mine(x, w), theirs(x, w))
    text = lambda f: jax.jit(f).lower(x, w).as_text().replace("annotated", "plain")
    assert text(mine) == text(theirs)


def scopes_of(fn, *args):
    stacks = [e.source_info.name_stack.stack for e in jax.make_jaxpr(fn)(*args).jaxpr.eqns]
    return [tuple(filter(None, (block_of_scope(s.name) for s in stack))) for stack in stacks]


def test_blocks_tell_their_line_and_place():
    def f(x):
        with autoshard.pipeline():
            for _ in range(2):
                with autoshard.stage():
                    x = jnp.sin(x)
        return x

    (outer, first), (again, second) = scopes_of(f, 1.0)
    assert outer == again and first.line == second.line and first != second
    assert (outer.place, first.place, second.place) == ((0,), (0, 0), (0, 1))
    assert outer.line.startswith("annotations/test_scopes.py:") and outer.line.endswith("(f)")


def test_annotations_are_decorators():
    @autoshard.replicate(4)
    def double(x):
        return x * 2

    assert double(1.5) == 3.0
    (first,), (second,) = scopes_of(lambda x: double(double(x)), 1.0)
    assert (first.kind, first.degree) == (BlockKind.REPLICATE, 4) and first == second
    line = double.__wrapped__.__code__.co_firstlineno
    assert first.line == f"annotations/test_scopes.py:{line} (test_annotations_are_decorators)"


def test_an_error_leaves_no_block_open():
    def f(x):
        try:
            with autoshard.replicate(2):
                raise ValueError
        except ValueError:
            return jnp.sin(x)

    assert scopes_of(f, 1.0) == [()]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda: autoshard.replicate(0), "`degree`.*received 0 at annotations/test_scopes.py"),
        (lambda: autoshard.split(2.0), "whole number"),
        (lambda: autoshard.split(True), "whole number"),
        (lambda: autoshard.split(2, dims={"heads": 1}), "'heads': 1"),
        (lambda: autoshard.split(2, dims={"heads": ("*.kernel", -1)}), "by its length"),
        (lambda: autoshard.pipeline("8"), "`num_micro_batches`"),
        (lambda: autoshard.stage(devices=8), "kind of devices"),
    ],
)
def test_malformed_annotations_are_refused_where_they_stand(wrong, what):
    with pytest.raises(AnnotationError, match=what):
        wrong()
