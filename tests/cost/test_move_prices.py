"""Prices of many moves at once are those of each move alone."""

import pathlib

import numpy as np
import pytest

from autoshard.cluster import Cluster
from autoshard.cost.collectives import joined
from autoshard.cost.move_prices import MovePrices
from autoshard.cost.reshard import reshard, total_s
from autoshard.graph.layout import all_layouts

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
        got = prices.seconds(shape, size_bytes, sources, targets, num_joined=7)
        parts = lambda s, t, size=size_bytes: [joined(c, 7) for c in reshard(shape, size, s, t, mesh)]
        want = [[total_s(parts(s, t)) for t in targets] for s in sources]
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-15)
