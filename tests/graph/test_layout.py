"""Laws of layouts, against enumeration of the elements that every device holds."""

import itertools
import math

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from autoshard.graph.layout import WHOLE, all_layouts, fits, is_contiguous, layout_of, shard_bytes, spec_entries

AXES = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3).map(tuple)
SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), max_size=3).map(tuple)


def coordinates(axis_sizes):
    """All devices of a mesh, as tuples of positions along its axes."""
    return itertools.product(*map(range, axis_sizes))


def held_along(extents, assignment, factor_of_dim, axis_sizes, device):
    """For factors that make up one dimension (major to minor): the indices into the dimension that a device holds.

    Every factor is split by its axes in mesh order, the earlier axis being the major one.
    """
    per_factor = []
    for f, extent in zip(factor_of_dim, extents, strict=True):
        low, size = 0, extent
        for a, g in enumerate(assignment):
            if g == f:
                size //= axis_sizes[a]
                low += device[a] * size
        per_factor.append(range(low, low + size))
    return np.ravel_multi_index(np.array(list(itertools.product(*per_factor))).T, extents)


@st.composite
def split_dimensions(draw):
    """(dims, assignment, factor sizes, axis sizes) where every axis product divides its factor."""
    axis_sizes = draw(AXES)
    factor_sizes = tuple(draw(st.lists(st.sampled_from([2, 3, 4, 6, 8]), min_size=1, max_size=3)))
    factors = list(range(len(factor_sizes)))
    cut = draw(st.integers(0, len(factors)))
    dims = tuple(d for d in (tuple(factors[:cut]), tuple(factors[cut:])) if d)
    assignment = []
    for _ in axis_sizes:
        options = [WHOLE]
        for f in factors:
            split = math.prod(n for n, g in zip(axis_sizes, assignment, strict=False) if g == f)
            if factor_sizes[f] % (split * axis_sizes[len(assignment)]) == 0:
                options.append(f)
        assignment.append(draw(st.sampled_from(options)))
    return dims, tuple(assignment), factor_sizes, axis_sizes


@given(split_dimensions())
@settings(max_examples=400, deadline=None)
def test_contiguous_is_what_enumeration_says(case):
    """A piece is legal iff it is the block that the layout itself (axes on one dimension, in mesh order) describes."""
    dims, assignment, factor_sizes, axis_sizes = case
    # axes of size 1 split nothing; a factor split only by them may stand in any order
    expected = True
    for d, factors in enumerate(dims):
        extents = [factor_sizes[f] for f in factors]
        layout = layout_of(dims, assignment)
        for device in coordinates(axis_sizes):
            held = held_along(extents, assignment, factors, axis_sizes, device)
            block = held_along([math.prod(extents)], layout, [d], axis_sizes, device)
            expected = expected and sorted(held) == list(block)
    found = is_contiguous(dims, assignment, factor_sizes, axis_sizes)
    if 1 in axis_sizes:
        assert expected or not found
    else:
        assert found == expected


def test_contiguous_by_hand():
    # heads x width merged into one dimension of 8 = 4 x 2 on a mesh of 2 x 4
    assert is_contiguous(((0, 1),), (WHOLE, 0), (4, 2), (2, 4))
    assert not is_contiguous(((0, 1),), (1, WHOLE), (4, 2), (2, 4)), "the minor part alone is strided"
    assert not is_contiguous(((0, 1),), (1, 0), (4, 2), (2, 4)), "the layout would list the minor axis first"
    assert is_contiguous(((0, 1),), (0, 1), (2, 4), (2, 4))


@given(SHAPES, AXES)
@settings(max_examples=150, deadline=None)
def test_all_layouts_are_the_fitting_ones(shape, axis_sizes):
    every = set(itertools.product(range(-1, len(shape)), repeat=len(axis_sizes)))
    found = all_layouts(shape, axis_sizes)
    assert found[0] == (WHOLE,) * len(axis_sizes)
    assert len(set(found)) == len(found)
    assert set(found) == {l for l in every if fits(l, shape, axis_sizes)}


@given(SHAPES, AXES, st.data())
@settings(max_examples=150, deadline=None)
def test_fitting_pieces_tile_the_tensor(shape, axis_sizes, data):
    """On every dimension the devices hold blocks that cover it; their bytes are what `shard_bytes` says."""
    layout = data.draw(st.sampled_from(all_layouts(shape, axis_sizes)))
    count = np.zeros(shape, int)
    for device in coordinates(axis_sizes):
        blocks = [held_along([n], layout, [d], axis_sizes, device) for d, n in enumerate(shape)]
        count[np.ix_(*blocks)] += 1
        assert math.prod(map(len, blocks)) == shard_bytes(math.prod(shape), layout, axis_sizes)
    replicas = math.prod(n for n, d in zip(axis_sizes, layout, strict=True) if d == WHOLE)
    assert (count == replicas).all()


@given(SHAPES, AXES, st.data())
@settings(max_examples=100, deadline=None)
def test_spec_entries_name_each_axis_once_in_mesh_order(shape, axis_sizes, data):
    layout = data.draw(st.sampled_from(all_layouts(shape, axis_sizes)))
    names = [f"axis{a}" for a in range(len(axis_sizes))]
    entries = spec_entries(layout, len(shape), names)
    assert len(entries) == len(shape)
    assert all(list(e) == sorted(e) for e in entries)
    back = {name: d for d, entry in enumerate(entries) for name in entry}
    assert tuple(back.get(name, WHOLE) for name in names) == layout


def test_layout_of_names_the_dimension_that_carries_the_factor():
    assert layout_of(((2,), (), (0, 1)), (1, 2, WHOLE, 3)) == (2, 0, WHOLE, WHOLE)
