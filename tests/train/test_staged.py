"""A run in stages on two kinds of devices: it trains, is saved, resumed with the plan it had, and evaluated."""

import dataclasses
import io
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import rich.console

from autoshard import StagedPlan
from autoshard.checkpoints.checkpoints import Checkpoints
from autoshard.train.config import PlanSection, TrainConfig
from autoshard.train.registry import load_data, train_functions
from autoshard.train.trainer import carry_out
from autoshard.train_step import TrainStep

CLUSTER = """\
format: autoshard-cluster
version: 1
name: two-kinds
groups:
  - {name: one, device_type: CPU-generic, num_nodes: 1, devices_per_node: 1, intra_node: Shared-memory}
  - {name: seven, device_type: CPU-generic, num_nodes: 1, devices_per_node: 7, intra_node: Ethernet-10G}
between_groups: Shared-memory
"""
"""The eight devices of the tests, as a slice of one and a slice of seven that are badly joined."""

LAST = 3


def config_of(folder: pathlib.Path, name: str, **train_settings) -> TrainConfig:
    (folder / "cluster.yaml").write_text(CLUSTER)
    stages = {"num_stages": 2, "num_micro_batches": 2, "micro_batch_sizes": [2], "most_devices_per_stage": 1}
    return TrainConfig.model_validate(
        {
            "model": {"overrides": {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "dropout_rate": 0.1}},
            "optimizer": {"name": "sgd", "clip_norm": None, "schedule": "constant", "learning_rate": 1e-2},
            "data": {"batch_size": 4, "sequence_length": 8},
            "plan": {"cluster": str(folder / "cluster.yaml"), "stages": {**stages, "schedules": ["1f1b"]}},
            "train": {"log_every": 1, "output_dir": str(folder / name), **train_settings},
        }
    )


def run(config: TrainConfig) -> str:
    """What a run prints."""
    printed = io.StringIO()
    console = rich.console.Console(file=printed, width=200)
    carry_out(config, train_functions(config), load_data(config), console)
    return printed.getvalue()


def logged(folder: pathlib.Path, kind: str = "train") -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == kind}


@dataclasses.dataclass(frozen=True)
class Runs:
    """One run that went through, and a copy of it as it was at step 2 that went on from there; what each printed."""

    folder: pathlib.Path
    whole: str
    resumed: str


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    folder = tmp_path_factory.mktemp("staged")
    kept = {"steps": LAST, "checkpoint_every": 2, "eval_every": LAST, "eval_batches": 1}
    whole = run(config_of(folder, "whole", **kept))
    shutil.copytree(folder / "whole", folder / "resumed")
    shutil.rmtree(folder / "resumed" / "checkpoints" / str(LAST))
    resumed = run(config_of(folder, "resumed", resume=True, **kept))
    return Runs(folder, whole, resumed)


@pytest.mark.slow
def test_the_plan_cuts_the_step_over_both_slices(runs):
    plan = StagedPlan.load(runs.folder / "whole" / "plan.json")
    (pipeline,) = plan.arrangement.pipelines
    assert {submesh.slice for submesh in pipeline.submeshes} == {0, 1} and len(pipeline.stages) == 2
    assert plan.donates_state and plan.configuration is not None
    assert runs.whole.startswith(plan.explain().partition("\n\n")[0])


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(runs):
    assert "Continuing with the plan of this run" in runs.resumed
    assert "Resumed from the checkpoint of step 2, from disk." in runs.resumed
    whole, resumed = logged(runs.folder / "whole"), logged(runs.folder / "resumed")
    assert list(whole) == list(resumed) == [1, 2, LAST]
    assert whole == resumed
    assert logged(runs.folder / "whole", "eval") == logged(runs.folder / "resumed", "eval") != {}


@pytest.mark.slow
def test_state_and_evaluation_are_those_of_the_same_step_on_one_device(runs):
    """The step in the plan's micro-batches, called as the ordinary function that it is."""
    config = config_of(runs.folder, "whole")
    functions, data = train_functions(config), load_data(config)
    step = functions.step.in_parts(StagedPlan.load(runs.folder / "whole" / "plan.json").parts)
    state, losses, take = functions.init(0), {}, jax.jit(step)
    for number in range(LAST):
        state, metrics = take(state, dict(data.batches[number]))
        losses[number + 1] = float(metrics["loss"])
    found = logged(runs.folder / "whole")
    np.testing.assert_allclose(list(found.values()), list(losses.values()), rtol=1e-5)
    evaluated = float(jax.jit(functions.evaluate)(state, dict(data.eval_batches[0]))["loss"])
    assert logged(runs.folder / "whole", "eval")[LAST] == pytest.approx(evaluated, rel=1e-5)
    with Checkpoints(runs.folder / "whole" / "checkpoints", 2) as checkpoints:
        saved = checkpoints.restore(jax.tree.map(lambda x: x, state)).state
    for ours, theirs in zip(jax.tree.leaves(saved.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_micro_batches_of_the_optimizer_are_those_of_one_program(tmp_path):
    """With dropout and clipping: which examples make one up, their order, and what each draws."""
    config = config_of(tmp_path, "run", steps=2)
    optimizer = config.optimizer.model_copy(update={"num_micro_batches": 2, "clip_norm": 0.1})
    staged = config.model_copy(update={"optimizer": optimizer})
    run(staged)
    whole = staged.model_copy(update={"plan": PlanSection()})
    functions, batches = train_functions(whole), load_data(whole).batches
    state, losses, take = functions.init(0), [], jax.jit(functions.step)
    for number in range(2):
        state, metrics = take(state, dict(batches[number]))
        losses.append(float(metrics["loss"]))
    assert StagedPlan.load(tmp_path / "run" / "plan.json").parts == (2, 2)
    np.testing.assert_allclose(list(logged(tmp_path / "run").values()), losses, rtol=2e-6)
    with Checkpoints(tmp_path / "run" / "checkpoints", 2) as checkpoints:
        saved = checkpoints.restore(state).state
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), saved.params, state.params)


def test_loss_scaling_is_that_of_the_models(tmp_path):
    config = config_of(tmp_path, "run")
    scaled = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"loss_scaling": True})})
    functions = train_functions(scaled)
    state, batch = jax.eval_shape(functions.init, 0), load_data(scaled).batches[0]
    assert isinstance(functions.step, TrainStep)
    new, metrics = jax.eval_shape(functions.step, state, dict(batch))
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert {"loss", "loss_scale", "is_finite"} <= set(metrics)
