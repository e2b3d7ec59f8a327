"""`plan.pipelines: search`: a run takes what is faster, one program or stages, and goes on with it."""

import io
import json
import pathlib

import jax
import numpy as np
import pytest
import rich.console

import autoshard
from autoshard.errors import ConfigError
from autoshard.train.ahead import prepare_ahead
from autoshard.train.config import TrainConfig
from autoshard.train.plan_reuse import kept_plan
from autoshard.train.planning import write_config_problem
from autoshard.train.registry import load_data, runs_in_stages, train_functions
from autoshard.train.trainer import carry_out

CLUSTER = """\
format: autoshard-cluster
version: 1
name: apart
groups:
  - {name: cpus, device_type: CPU-generic, num_nodes: 8, devices_per_node: 1, intra_node: Shared-memory,
     inter_node: Ethernet-10G}
"""
"""The eight devices of the tests, each a node of its own."""


def config_of(folder: pathlib.Path, name: str, plan: dict, steps: int = 2, **sections) -> TrainConfig:
    (folder / "cluster.yaml").write_text(CLUSTER)
    return TrainConfig.model_validate(
        {
            "model": {"overrides": {"num_layers": 4, "embed_dim": 128, "num_heads": 2, "dropout_rate": 0.0}},
            "optimizer": {"name": "sgd", "clip_norm": None, "schedule": "constant", "learning_rate": 1e-2},
            "data": {"batch_size": 32, "sequence_length": 16},
            "plan": {"cluster": str(folder / "cluster.yaml"), **plan},
            "train": {"steps": steps, "log_every": 1, "output_dir": str(folder / name), "resume": True},
            **sections,
        }
    )


SEARCHED = {
    "pipelines": "search",
    "stages": {"num_stages": 4, "micro_batch_sizes": [4], "schedules": ["zb-h1"], "most_devices_per_stage": 1},
}


def run(config: TrainConfig, functions=None) -> str:
    """What a run prints."""
    printed = io.StringIO()
    console = rich.console.Console(file=printed, width=200)
    carry_out(config, functions or train_functions(config), load_data(config), console)
    return printed.getvalue()


def losses(folder: pathlib.Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_a_run_takes_the_stages_that_are_faster_and_goes_on_with_them(tmp_path):
    config = config_of(tmp_path, "either", SEARCHED)
    assert not runs_in_stages(config), "only the plan tells"
    functions, data = train_functions(config), load_data(config)
    run(config, functions)
    plan = autoshard.load(tmp_path / "either" / "plan.json")
    assert plan.is_staged and any(c.description.startswith("one program") for c in plan.considered)
    kept = kept_plan(config, prepare_ahead(config).functions(), tmp_path / "either")
    assert kept.plan == plan, kept.reason
    state, step, expected = functions.init(config.train.seed), jax.jit(functions.step), []
    for number in range(2):
        state, metrics = step(state, data.batches[number])
        expected.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses(tmp_path / "either"), expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("plan", "sections", "message"),
    [
        ({"mesh": {"data": 8}}, {}, "received mesh="),
        ({}, {"stragglers": {"mode": "migrate"}}, "stragglers.mode"),
        ({}, {"optimizer": {"num_micro_batches": 2}}, "plan.pipelines `search`"),
    ],
)
def test_what_only_one_program_has_is_refused(tmp_path, plan, sections, message):
    with pytest.raises(ConfigError, match=message):
        run(config_of(tmp_path, "refused", {**SEARCHED, **plan}, **sections))


def test_a_problem_file_holds_one_program(tmp_path):
    config = config_of(tmp_path, "problem", {"pipelines": "search"})
    with pytest.raises(ConfigError, match="plan.pipelines"):
        write_config_problem(config, train_functions(config), tmp_path / "problem.npz", rich.console.Console())
