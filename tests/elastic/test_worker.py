"""What a worker of a run in code leaves on disk when its loop ends."""

import os
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from single_worker import worker_of
from together import start

import autoshard
from autoshard.checkpoints.checkpoints import Checkpoints
from autoshard.elastic.worker import Cadence, run_identity
from autoshard.errors import TrainingError


def checkpoints(worker, folder):
    return worker.checkpoints(folder / "checkpoints", Cadence(disk_every=None, memory_every=1, keep=2), dict)


def test_a_state_that_memory_alone_has_is_saved_when_no_step_is_left(tmp_path):
    first = worker_of(tmp_path, tmp_path / "memory", 1)
    with checkpoints(first, tmp_path):
        state = first.restore(jnp.zeros(4))
        for step in (1, 2):
            state = state + 1
            first.commit(step, state)
    assert not list((tmp_path / "checkpoints").iterdir())  # it was killed before it wrote any
    second = worker_of(tmp_path, tmp_path / "memory", 2)
    with checkpoints(second, tmp_path):
        np.testing.assert_array_equal(second.restore(jnp.zeros(4)), [2, 2, 2, 2])
        second.save_last_commit()
    with Checkpoints(tmp_path / "checkpoints", 2, lambda message: None) as kept:
        found = kept.restore(jnp.zeros(4))
    assert found is not None and found.step == 2
    np.testing.assert_array_equal(found.state, [2, 2, 2, 2])


def test_a_last_state_that_cannot_be_saved_is_an_error(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    worker = worker_of(tmp_path, tmp_path / "memory", 1)
    with checkpoints(worker, tmp_path):
        worker.commit(1, worker.restore(jnp.zeros(4)) + 1)
        with pytest.raises(TrainingError, match="after step 1, the last one of this run, is not saved"):
            worker.save_last_commit()


def test_what_a_worker_prints_on_a_full_disk_does_not_end_it(tmp_path):
    code = (
        "from autoshard.elastic.output import print_without_fail; print_without_fail(); print('x'); raise SystemExit(7)"
    )
    for output in (pathlib.Path("/dev/full"), tmp_path / "output"):
        process = start([sys.executable, "-c", code], os.environ, output)
        process.join()
        assert process.exitcode == 7
    assert (tmp_path / "output").read_text() == "x\n"


def test_a_plan_that_is_gone_is_named(tmp_path):
    with pytest.raises(TrainingError, match=r"plan\.json cannot be read any more"):
        run_identity(tmp_path)


def test_each_program_of_a_run_keeps_its_plan(tmp_path):
    """The first is that of the run, also where others are planned behind it."""
    train, evaluate = lambda params, x: params - jnp.mean(x @ params), lambda params, x: jnp.mean(x @ params)
    shapes = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    plans, written = [], []
    for generation in (1, 2):
        worker = worker_of(tmp_path, tmp_path / "memory", generation)
        plans.append([worker.plan(fn, *shapes) for fn in (train, evaluate)])
        written.append({file.name: file.stat().st_ino for file in tmp_path.glob("plans/*/*.json")})
    assert plans[0] == plans[1] and plans[0][0] != plans[0][1]
    assert written[0] == written[1] and set(written[0]) == {"plan.json", "plan-2.json"}  # an inode: none is made anew
    assert autoshard.Plan.load(tmp_path / "plan.json") == plans[0][0]
