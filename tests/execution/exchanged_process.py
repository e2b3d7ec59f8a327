"""One of several processes for test_exchanged_processes.py: its number, how many there are, and the coordinator's port.

Takes steps with tables on the devices of all processes, and compares what it holds after each with one device.
"""

import dataclasses
import itertools
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from test_exchanged import KINDS, exchanges, exchanging_plan, ids_of, step

import autoshard
from autoshard.cluster import Cluster
from autoshard.cost.lookups import Lookups
from autoshard.tables import sparse_on_devices

NUMBER, COUNT, PORT = map(int, sys.argv[1:])
CLUSTER = Cluster.from_file(pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "cpu4x2.yaml")
DEVICES = 2
"""Of each process, as of each node of the cluster."""
ROWS, WIDTH, EXAMPLES = 3 << 14, 12, 60
"""All can be divided by four and by six devices."""
OVERFLOWING, NEVER = Lookups(slots_factor=0.01, exchange="any"), Lookups(exchange="never")


def ids_for(kind: str, rng: np.random.Generator) -> np.ndarray:
    """[examples, 4] ids of this kind, stretched to the rows that there are here."""
    return (ids_of(kind, rng)[:EXAMPLES] * 3 // 2).astype(np.int32)


def drawn(fn: Callable[..., Any], args: Any, lookups: Lookups, is_wanted: Callable[..., bool], num_axes=None):
    """The first plan drawn at random that is wanted."""
    (group,) = CLUSTER.groups
    cluster = dataclasses.replace(CLUSTER, groups=(dataclasses.replace(group, num_nodes=COUNT),))
    for seed in itertools.count(100 * COUNT):
        plan = exchanging_plan(fn, args, {"a": COUNT, "b": DEVICES}, cluster, seed, lookups, num_axes)
        if is_wanted(plan):
            return plan


def read_as(plan: autoshard.Plan) -> list[Any]:
    """The layout in which each look-up reads its table."""
    return [
        dict(e.operands)[0][-1] for n, e in plan.shardings if plan.equations[n].startswith("gather(") and e.operands
    ]


def dense_plans(fn: Callable[..., Any], args: Any) -> Iterator[autoshard.Plan]:
    """Plans that exchange ids over one axis, and over both, or split rows or columns between processes, or nothing."""
    for num_axes in (1, 2):
        plan = drawn(fn, args, OVERFLOWING, lambda p: any("a" in e.axes for e in exchanges(p)), num_axes)
        assert [e.slots for e in exchanges(plan)] == [1, 1], "a look-up and its gradient"
        yield plan
    for wanted in ((True, False), (False, True), (False, False)):
        yield drawn(fn, args, NEVER, lambda p, w=wanted: [tuple("a" in axes for axes in x[-2:]) for x in read_as(p)] == [w])


def check_dense(mode: str) -> None:
    """Plain SGD."""
    rng = np.random.default_rng(COUNT)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    fn = lambda *args: step(mode, *args)
    params, target = {"table": normal(ROWS, WIDTH), "scale": normal(1, WIDTH)}, normal(EXAMPLES, WIDTH)
    batches = [(ids_for(kind, rng), target) for kind in KINDS]
    for plan in dense_plans(fn, (params, *batches[0])):
        check(plan, fn, fn, params, batches)


def check(plan, fn, reference, state, batches) -> None:
    """The state after each step equals that on one device."""
    t=time.time()
    run, alone = plan.jit(fn), jax.jit(reference)
    ours = theirs = state
    for batch in batches:
        ours, theirs = run(ours, *batch)[0], alone(theirs, *batch)[0]
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            for shard in x.addressable_shards:
                np.testing.assert_allclose(shard.data, np.asarray(y)[shard.index], rtol=1e-5, atol=1e-6)
        print(NUMBER, time.time()-t)

def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{PORT}", COUNT, NUMBER)
    check_dense("fill")

main()
