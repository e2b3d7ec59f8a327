"""One of several processes for test_several_processes.py: its number, how many, the coordinator's port, a folder, and
the number of a case.

Each mode takes the same steps as whole tables do on one device, evaluates, and saves its state in a folder of its own,
which `check_saved` reads back in one process with another number of workers, and compares.
"""

import itertools
import os
import pathlib
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bags import batches
from test_host_tables import loss_fn, state_of

import autoshard
from autoshard.errors import TrainingError
from autoshard.host_tables.checkpoint_folder import saved_step

DEVICES, STEPS, HALF = 2, 6, 3
CASES = ("sync", "even"), ("pipelined", "one worker's"), ("async", "zipf"), ("pipelined", "zipf")
"""Mode and ids of each."""


def evaluate(state, batch):
    return {"loss": loss_fn(state.params, batch, None)[0]}


def training_step() -> autoshard.TrainStep:
    return autoshard.TrainStep(loss_fn, optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.3)))


def whole_tables(ids: str):
    """The state after each step on one device, and the losses."""
    step = training_step()
    run, states, losses = jax.jit(step), [state_of(step)], []
    for batch in batches(STEPS, ids):
        state, metrics = run(states[-1], batch)
        states.append(state)
        losses.append(float(metrics["loss"]))
    return states, losses


def check(execution: autoshard.Execution, ids: str, count: int, folder: pathlib.Path) -> None:
    step, (first,) = training_step(), batches(1, ids)
    states, losses = whole_tables(ids)
    make = lambda: state_of(step)
    state = make if execution.mode == "sync" else make()
    mesh = {"data": DEVICES * count}
    hot = {"bags": 9, "bias": np.array([30, 2, 17])} if ids == "one worker's" else {}
    place = folder / f"{execution.mode}-{ids}"
    with autoshard.HostTables(step, state, first, execution=execution, mesh=mesh, hot_rows=hot) as tables:
        all_batches = iter(batches(STEPS, ids))
        done = list(tables.steps(itertools.islice(all_batches, HALF)))
        time.sleep(0.5 * jax.process_index())  # what the first process writes must not change what others decide
        assert saved_step(place) is None
        check_refused(tables, place)
        tables.save(place, keep=1)
        assert saved_step(place) == HALF
        done += tables.steps(all_batches)
        found = [float(d.metrics["loss"]) for d in done]
        if execution.mode == "async":
            assert max(d.staleness for d in done) <= execution.max_staleness
            np.testing.assert_allclose(found[0], losses[0], rtol=1e-5)
            return
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        expected = float(evaluate(states[-1], first)["loss"])
        held_out = tables.evaluation(evaluate, first)
        np.testing.assert_allclose(float(held_out(first)["loss"]), expected, rtol=1e-5)
        tables.save(place, keep=1)
        assert [path.name for path in place.glob("tables-*")] == [f"tables-{STEPS}"]
        np.testing.assert_allclose(float(held_out(first)["loss"]), expected, rtol=1e-5)
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(tables.dense_state.params))


def check_refused(tables: autoshard.HostTables, place: pathlib.Path) -> None:
    """Where the first process cannot write, all are told soon."""
    in_the_way = place / f"tables-{HALF}.unfinished"
    if jax.process_index() == 0:
        place.mkdir()
        in_the_way.touch()
    with pytest.raises(TrainingError, match="cannot be written|first process of the run cannot go on"):
        tables.save(place)
    assert saved_step(place) is None
    if jax.process_index() == 0:
        in_the_way.unlink()


def check_saved(ids: str, folder: pathlib.Path) -> None:
    """A state that several processes saved is that of whole tables."""
    (states, _), step, (first,) = whole_tables(ids), training_step(), batches(1, ids)
    execution = autoshard.Execution("sync", num_workers=3)
    with autoshard.HostTables(step, state_of(step), first, execution=execution) as tables:
        assert tables.restore(folder) == STEPS
        found = tables.state()
    own, expected = ((s.step, s.params, s.opt_state) for s in (found, states[-1]))
    for x, y in zip(jax.tree.leaves(own), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def main(number: int, count: int, port: int, folder: pathlib.Path, *cases: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
    for mode, ids in (CASES[case] for case in cases):
        check(autoshard.Execution(mode, num_workers=2, prefetch=3), ids, count, folder)


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:4]), pathlib.Path(sys.argv[4]), *map(int, sys.argv[5:]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # an orderly end would wait for the others
