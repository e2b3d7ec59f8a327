"""XLA's scheduler goes on hiding collectives in all of the memory that a plan may take."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.compiler.options import compiler_options
from autoshard.compiler.schedule import Schedule
from autoshard.hlo.compiled_schedule import replay
from autoshard.hlo.module import parse
from autoshard.plans.make import load_cluster
from autoshard.verify.devices import _is_installed, devices_for
from autoshard.verify.gpus import COMPILER_OPTIONS, H100

CLUSTER = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x8.yaml"
LAYERS, WIDTH, ROWS = 31, 4096, 2**18
LIMIT = "xla_gpu_memory_limit_slop_factor"


@pytest.mark.skipif(
    not _is_installed("jax_plugins.xla_cuda13"), reason="needs XLA:GPU: pip install 'autoshard[verify-gpu]'"
)
def test_gathers_hide_where_memory_is_nearly_full():
    """A layer's result takes 2 x 4,096 x 2^18 bytes = 2.1 GB of a device, so that 31 of them take 66.6 of 80 GB: within
    the 72 that a plan may take, and beyond the 80 % that XLA's scheduler believes in."""
    logical = load_cluster(CLUSTER).slices()[0].logical_mesh({"data": 8})
    mesh = jax.sharding.Mesh(np.array(devices_for(H100, (("data", 8),), 8), dtype=object), ("data",))
    split = NamedSharding(mesh, P("data"))

    def there_and_back(x, weights):
        results = [x]
        for w in weights:
            results.append(jnp.tanh(results[-1] @ w))
        found = results[-1]
        for w, result in zip(reversed(weights), reversed(results[:-1]), strict=True):
            found = (found @ w.T) * jnp.exp(result)
        return found

    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    arguments = bf16(8 * ROWS, WIDTH), [bf16(WIDTH, WIDTH)] * LAYERS
    lowered = jax.jit(there_and_back, in_shardings=split, out_shardings=split).lower(*arguments)
    asked = {**COMPILER_OPTIONS, **(compiler_options("cuda", Schedule.LATENCY_HIDING) or {})}
    ours, default = (lowered.compile(compiler_options={**asked, **own}) for own in ({}, {LIMIT: 95}))
    assert ours.memory_analysis().temp_size_in_bytes == pytest.approx(LAYERS * 2 * ROWS * WIDTH, rel=0.03)
    exposed_s, by_default_s = (replay(parse(c.as_text()), logical).exposed_s for c in (ours, default))
    assert exposed_s < 0.2 * by_default_s
