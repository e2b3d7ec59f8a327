"""Reshape: the factors must name the same elements on both sides."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autoshard.graph.graph import Dims, Factor
from autoshard.trace.rules.iteration_space import IterationSpace
from autoshard.trace.rules.layout import reshape_dims


def rule_for(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[Dims, Dims, tuple[Factor, ...]]:
    space = IterationSpace()
    left, right = reshape_dims(space, source, target)
    return left, right, space.close((left,), (right,)).factors


@st.composite
def shape_pairs(draw):
    """Two shapes of the same number of elements: prime factors, shuffled, merged at random, with ones strewn in."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), max_size=6))

    def shape():
        merged: list[int] = []
        for prime in draw(st.permutations(primes)):
            if merged and draw(st.booleans()):
                merged[-1] *= prime
            else:
                merged.append(prime)
        for _ in range(draw(st.integers(0, 2))):
            merged.insert(draw(st.integers(0, len(merged))), 1)
        return tuple(merged)

    return shape(), shape()


def factor_index(shape: tuple[int, ...], dims: Dims, factors: tuple[Factor, ...], factor: int) -> np.ndarray:
    """For every element in row-major order, its coordinate along a factor."""
    (axis,) = [axis for axis, dim in enumerate(dims) if factor in dim]
    coordinate = np.indices(shape)[axis].ravel()
    minor = math.prod(factors[right].size for right in dims[axis][dims[axis].index(factor) + 1 :])
    return coordinate // minor % factors[factor].size


@given(shape_pairs())
def test_factors_mean_the_same_elements(pair):
    source, target = pair
    left, right, factors = rule_for(source, target)
    for factor in range(len(factors)):
        np.testing.assert_array_equal(
            factor_index(source, left, factors, factor), factor_index(target, right, factors, factor)
        )


@given(shape_pairs())
def test_dimensions_are_whole_or_complete(pair):
    source, target = pair
    left, right, factors = rule_for(source, target)
    for size, dim in zip(source + target, left + right, strict=True):
        assert not dim or math.prod(factors[factor].size for factor in dim) == size


@given(st.lists(st.integers(1, 4), max_size=5).map(tuple))
def test_merging_everything_keeps_every_dimension(shape):
    left, (merged,), factors = rule_for(shape, (math.prod(shape),))
    assert [factors[factor].size for factor in merged] == [size for size in shape if size > 1]
    assert all(dim for size, dim in zip(shape, left, strict=True) if size > 1)


def test_known_cases():
    assert rule_for((6, 8), (2, 3, 8)) == (((0, 1), (2,)), ((0,), (1,), (2,)), (Factor(2), Factor(3), Factor(8)))
    assert rule_for((4, 6), (2, 12)) == (((0, 1), (2,)), ((0,), (1, 2)), (Factor(2), Factor(2), Factor(6)))
    assert rule_for((4, 6), (6, 4)) == (((), ()), ((), ()), ())
    assert rule_for((5, 4, 6), (5, 6, 4)) == (((0,), (), ()), ((0,), (), ()), (Factor(5),))
    assert rule_for((1, 5), (5, 1, 1)) == (((), (0,)), ((0,), (), ()), (Factor(5),))
    assert rule_for((), (1,)) == ((), ((),), ())
    assert rule_for((0, 3), (3, 0)) == (((), ()), ((), ()), ())
