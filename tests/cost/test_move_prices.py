"""Prices of many moves at once are those of each move alone."""

import dataclasses
import pathlib

import numpy as np
import pytest

from autoshard.cluster import Cluster, CollectiveKind, MeasuredCollective
from autoshard.cost.collectives import Joining, joined
from autoshard.cost.move_prices import MovePrices
from autoshard.cost.reshard import reshard, total_s
from autoshard.graph.layout import WHOLE, all_layouts

CLUSTER = pathlib.Path(__file__).parents[2] / "configs/clusters/h100x64.yaml"


@pytest.mark.parametrize("axes", [{"a": 64}, {"a": 8, "b": 8}, {"a": 4, "b": 2, "c": 8}, {"a": 4, "b": 1, "c": 16}])
@pytest.mark.parametrize("shape", [(), (64,), (128, 256), (24, 64, 16), (8, 12, 2, 64)])
def test_equal_to_each_move_alone(axes, shape):
    """Including shapes that some layout on the way does not divide."""
    mesh = Cluster.from_file(CLUSTER).slices()[0].logical_mesh(axes)
    layouts = all_layouts(shape, mesh.shape)
    rng = np.random.default_rng(0)
    pick = lambda: [layouts[k] for k in rng.integers(0, len(layouts), 12)]
    prices = MovePrices(mesh)
    for size_bytes in (2.0, 3e6, 5e9):
        sources, targets = pick(), pick()
        got = prices.seconds(shape, size_bytes, sources, targets)
        want = [[total_s(reshard(shape, size_bytes, s, t, mesh)) for t in targets] for s in sources]
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-15)
        got = prices.seconds(shape, size_bytes, sources, targets, joining=Joining(7))
        parts = lambda s, t, size=size_bytes: [joined(c, Joining(7)) for c in reshard(shape, size, s, t, mesh)]
        want = [[total_s(parts(s, t)) for t in targets] for s in sources]
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-15)


def test_gathers_along_inner_dimensions_are_told_apart():
    """Where the bytes of inner pieces were measured to be put in order at some rate, those gathers pay it."""
    mesh = Cluster.from_file(CLUSTER).slices()[0].logical_mesh({"a": 8, "b": 8})
    rate, size_bytes = 2e9, 8e6
    own = MeasuredCollective(CollectiveKind.ALL_GATHER, 8, 1e-6, 1e11, inner_bytes_per_s=rate)
    level = lambda l: dataclasses.replace(l, link=dataclasses.replace(l.link, collectives=(own,)))
    axes = tuple(dataclasses.replace(a, levels=tuple(map(level, a.levels))) for a in mesh.axes)
    mesh = dataclasses.replace(mesh, axes=axes)
    prices = MovePrices(mesh)

    def seconds(shape, source, target):
        both = prices.seconds(shape, size_bytes, [source], [target])[0, 0]
        assert both == pytest.approx(total_s(reshard(shape, size_bytes, source, target, mesh)))
        return both

    first = seconds((64, 64), (WHOLE, 0), (WHOLE, WHOLE))
    assert seconds((64, 64), (WHOLE, 1), (WHOLE, WHOLE)) - first == pytest.approx(size_bytes / rate)
    assert seconds((1, 64), (WHOLE, 1), (WHOLE, WHOLE)) == pytest.approx(first)  # nothing is in front
    # where the other axis keeps its dimension, a device gathers an eighth
    inner, outer = seconds((64, 64), (0, 1), (0, WHOLE)), seconds((64, 64), (1, 0), (1, WHOLE))
    assert inner - outer == pytest.approx(size_bytes / 8 / rate)
