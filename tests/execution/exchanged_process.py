"""One of several processes for test_exchanged_processes.py: its number, how many there are, and the coordinator's port.

It takes steps with tables on the devices of all processes, and after each compares what it holds with one device.
"""

import dataclasses
import itertools
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from test_exchanged import KINDS, ROWS, exchanges, exchanging_plan, ids_of, step

from autoshard import Plan, TrainStep
from autoshard.cluster import Cluster
from autoshard.cost.lookups import Lookups
from autoshard.tables import sparse_on_devices

NODES = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "cpu4x2.yaml"
DEVICES = 2
"""Of a process, as of a node."""
TABLE_ROWS, WIDTH, EXAMPLES = 3 << 12, 12, 60
"""All can be divided by four and by six devices. Smaller tables would not be worth an exchange over all of them."""
NEVER, OVERFLOWING = Lookups(exchange="never"), Lookups(slots_factor=0.01, exchange="any")


def ids_for(kind: str, rng: np.random.Generator) -> np.ndarray:
    """[examples, 4] ids of this kind, spread over the rows that there are here."""
    return (ids_of(kind, rng)[:EXAMPLES] * TABLE_ROWS // ROWS).astype(np.int32)


def small(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers so small that steps amplify no rounding."""
    return rng.normal(size=shape, scale=0.3).astype(np.float32)


def drawn(
    count: int,
    fn: Callable[..., Any],
    args: Sequence[Any],
    lookups: Lookups,
    is_wanted: Callable[[Plan], bool],
    num_axes: int | None = None,
) -> Plan:
    """The first of the plans drawn at random for `count` processes that is wanted."""
    cluster = Cluster.from_file(NODES)
    nodes = (dataclasses.replace(cluster.groups[0], num_nodes=count),)
    mesh, cluster = {"a": count, "b": DEVICES}, dataclasses.replace(cluster, groups=nodes)
    plans = (exchanging_plan(fn, args, mesh, cluster, seed, lookups, num_axes) for seed in itertools.count(100 * count))
    return next(filter(is_wanted, plans))


def sent(plan: Plan) -> list[bool]:
    """Of each look-up or scatter-add that exchanges ids, one a round, whether processes send each other some."""
    assert all(e.slots == 1 for e in exchanges(plan))
    return ["a" in e.axes for e in exchanges(plan)]


def is_split(plan: Plan, rows: bool, columns: bool) -> bool:
    """Whether processes share the rows, and the columns, of the table as the look-up reads it."""
    (look_up,) = (e for number, e in plan.shardings if plan.equations[number].startswith("gather("))
    return ["a" in axes for axes in dict(look_up.operands)[0][-1]] == [rows, columns]


def check(plan: Plan, fn: Callable[..., Any], alone: Callable[..., Any], state: Any, batches: Any) -> None:
    """All floats that each step returns equal those on one device."""
    run = plan.jit(fn)
    shardings = run.in_shardings((state, *batches[0]))
    place = lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    ours, theirs = (jax.tree.map(place, state, shardings[0]),), (state,)
    for batch in batches:
        ours = run(ours[0], *jax.tree.map(place, batch, shardings[1:]))
        theirs = alone(theirs[0], *batch)
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            if jnp.issubdtype(x.dtype, jnp.floating):
                for shard in x.addressable_shards:
                    np.testing.assert_allclose(shard.data, np.asarray(y)[shard.index], rtol=1e-5, atol=1e-6)


def dense_plans(count: int, fn: Callable[..., Any], args: Sequence[Any]) -> Iterator[Plan]:
    """Plans that exchange ids over one axis, and over both; whose rows give partial sums; split by columns; and whole.

    What else they choose is drawn at random, and so is where tables lie between steps.
    """
    for num_axes in (1, 2):  # of a look-up and of its gradient
        yield drawn(count, fn, args, OVERFLOWING, lambda plan: sent(plan) == [True, True], num_axes)
    for rows, columns in ((True, False), (False, True), (False, False)):
        yield drawn(count, fn, args, NEVER, lambda plan, r=rows, c=columns: is_split(plan, r, c))


def check_dense(count: int, mode: str, first: int | None = None) -> None:
    """Dense gradients and plain SGD, under all plans, or the first of them."""
    rng = np.random.default_rng(count)
    fn = lambda *args: step(mode, *args)
    params = {"table": small(rng, TABLE_ROWS, WIDTH), "scale": small(rng, 1, WIDTH)}
    target = small(rng, EXAMPLES, WIDTH)
    batches, alone = [(ids_for(kind, rng), target) for kind in KINDS], jax.jit(fn)
    for plan in itertools.islice(dense_plans(count, fn, (params, *batches[0])), first):
        check(plan, fn, alone, params, batches)


def loss_fn(params: Any, batch: Any, _: Any) -> tuple[jax.Array, dict[str, Any]]:
    """Bags of ids summed, of which -1 is none, and one id an example in the same table."""
    bags = params["table"].at[batch["bags"]].get(mode="fill", fill_value=0, wrap_negative_indices=False).sum(1)
    rows = params["table"].at[batch["ids"]].get(mode="clip")
    return jnp.mean((jnp.tanh(bags + rows) @ params["dense"] - batch["y"]) ** 2), {}


def bags_for(kind: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A batch in which many ids of bags are missing, and all of every third bag."""
    ids = ids_for(kind, rng)
    bags = np.where(rng.random(ids.shape) < 0.3, -1, ids)
    bags[::3] = -1
    return {"bags": bags, "ids": ids[:, 0], "y": small(rng, EXAMPLES, 1)}


def check_sparse(count: int) -> None:
    """Sparse gradients and Adagrad, which on one device are dense."""
    rng = np.random.default_rng(count)
    whole = TrainStep(loss_fn, optax.adagrad(0.1))
    state = whole.init({"table": small(rng, TABLE_ROWS, WIDTH), "dense": small(rng, WIDTH, 1)})
    batches = [(bags_for(kind, rng),) for kind in KINDS[-3:]]
    fn, alone = sparse_on_devices(whole, state, *batches[0]), jax.jit(whole)
    for lookups, is_wanted in ((OVERFLOWING, any), (NEVER, lambda own: not own)):
        plan = drawn(count, fn, (state, *batches[0]), lookups, lambda plan, w=is_wanted: w(sent(plan)))
        check(plan, fn, alone, state, batches)


def main(number: int, count: int, port: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
    check_dense(count, "fill")
    check_dense(count, "clip", first=2)
    check_sparse(count)


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # an orderly end would wait for the others
