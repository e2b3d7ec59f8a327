"""Two scattered sums that are added: XLA:GPU scatters the sum of both, XLA:TPU adds what each device keeps."""

import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import autoshard

CLUSTERS = pathlib.Path(__file__).parents[2] / "configs" / "clusters"


def step(w, x):
    """Both uses of a weight make a gradient of it, added right behind the second."""
    product = lambda w, x: jnp.einsum("nd,vd->nv", x, w)
    return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(product(w, jnp.tanh(product(w, x)))) ** 2))(w)


@pytest.mark.parametrize(("cluster", "reads_whole"), [("h100x8", True), ("tpu-v5e-x8", False)])
def test_the_addition_reads_whole_terms_only_where_the_compiler_scatters_once(cluster, reads_whole):
    shapes = jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    pins = {"w": PartitionSpec("data"), "x": PartitionSpec("data")}
    options = autoshard.PlanOptions(cache=False)
    settings = {"mesh": {"data": 8}, "pins": pins, "donate_argnums": 0, "options": options}
    plan = autoshard.plan(step, *shapes, cluster=CLUSTERS / f"{cluster}.yaml", **settings)
    told = dict(plan.shardings)
    assert [e.scatters for e in told.values() if e.scatters] == [(("data", 0),)] * 2
    addition = told[max(n for n, text in enumerate(plan.equations) if "add_any" in text)]
    assert addition.results == ((0, (("data",), ())),)
    assert addition.operands == (((0, (((), ()),)), (1, (((), ()),))) if reads_whole else ())
