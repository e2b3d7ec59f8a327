"""From a training step to where its tables live, by shape, and by the command."""

import pathlib

import jax
import pytest
from typer.testing import CliRunner

from autoshard.cli import app
from autoshard.cost.id_distribution import IdDistribution
from autoshard.errors import ConfigError
from autoshard.offloading.of_step import place_tables
from autoshard.train.config import load_config
from autoshard.train.planning import arguments
from autoshard.train.registry import staged_functions

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
CLUSTER = CONFIGS / "clusters" / "h100x8_cpu.yaml"
ROWS = [1_000_000_000, 5000, 3]
SETTINGS = [f"model.overrides={{table_rows: {ROWS}, num_numbers: 4}}", "optimizer.name=sgd", "plan.cache=false"]


@pytest.fixture(scope="module")
def program():
    config = load_config(CONFIGS / "dlrm_tiny.yaml", [*SETTINGS, "optimizer.weight_decay=0.0"])
    functions = staged_functions(config)
    return functions.step, *arguments(config, functions)


def test_tables_of_a_step_are_placed_by_shape(program):
    step, state, batch = program
    placed = place_tables(step, state, batch, cluster=CLUSTER, ids={"tables.0.embedding": IdDistribution(1.05)})
    tables = placed.situation.tables
    assert [(t.path, t.num_rows, t.num_ids) for t in tables] == [
        (f"tables.{n}.embedding", rows, 512) for n, rows in enumerate(ROWS)
    ]
    assert [(t.row_bytes, t.state_bytes) for t in tables] == [(64, 128)] * 3  # 16 numbers, and their momentum
    assert [t.ids.zipf_exponent for t in tables] == [1.05, 0, 0]
    dense = placed.situation.dense
    assert 0 < dense.step_s < 1e-2 and 0 < dense.memory_bytes < 1e9
    assert sum(x.size for x in jax.tree.leaves(state.params)) > 1e10  # nothing of that was allocated
    with pytest.raises(ConfigError, match="none called 'other'"):
        place_tables(step, state, batch, cluster=CLUSTER, ids={"other": IdDistribution()})


def test_the_command_prints_the_decision():
    result = CliRunner().invoke(
        app,
        [
            "tables",
            str(CONFIGS / "dlrm_tiny.yaml"),
            *SETTINGS,
            "--cluster",
            str(CLUSTER),
            "--zipf",
            "1.05",
            "devices=8",
        ],
    )
    assert result.exit_code == 0, result.output
    assert "3 tables of 128 GB" in result.output and "exponent 1.05" in result.output
    refused = CliRunner().invoke(app, ["tables", str(CONFIGS / "dlrm_tiny.yaml"), *SETTINGS])
    assert refused.exit_code == 2 and "Give --cluster" in refused.output
    refused = CliRunner().invoke(app, ["tables", str(CONFIGS / "gpt_tiny.yaml"), "--cluster", str(CLUSTER)])
    assert refused.exit_code == 2
