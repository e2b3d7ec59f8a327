"""The `autoshard` command: its three sub-commands, its help and its errors."""

import pathlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from autoshard.cli import app
from autoshard.plans.plan import Plan

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
SMALL = ["model.overrides={num_layers: 1, embed_dim: 32, num_heads: 2}", "data.sequence_length=16"]


def invoke(*args: object):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("command", ["train", "plan", "explain", "compare", "diff", "export", "verify"])
def test_help_shows_an_example(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"autoshard {command} " in result.output.partition("Example")[2]


def test_a_plan_is_printed_saved_and_explained(tmp_path):
    out = tmp_path / "plan.json"
    result = invoke(
        "plan", CONFIGS / "gpt_125m.yaml", *SMALL, "--cluster", CONFIGS / "clusters" / "v100x16.yaml",
        "--mesh", "data=8,tensor=2", "--budget-gb", "3", "--time-limit", "5", "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    plan = Plan.load(out)
    assert plan.mesh_axes == {"data": 8, "tensor": 2} and plan.budget_bytes == 3e9
    explained = invoke("explain", out)
    assert explained.exit_code == 0
    assert explained.stdout == result.stdout


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["plan", "none.yaml"], "none.yaml"),
        (["explain", "none.json"], "none.json"),
        (["plan", CONFIGS / "quickstart.yaml", "data.batchsize=3"], "Did you mean `batch_size`?"),
        (["plan", CONFIGS / "quickstart.yaml", "--mesh", "data:4"], "NAME=SIZE"),
        (["plan", CONFIGS / "quickstart.yaml", "--mesh", "data=4,data=2"], "NAME=SIZE"),
        (["plan", CONFIGS / "quickstart.yaml", "--mesh", "data=0"], "plan.mesh.data"),
        (["plan", CONFIGS / "gpt_125m.yaml", *SMALL, "--mesh", "data=3"], "3"),
        (["plan", CONFIGS / "gpt_125m.yaml", "model.preset=huge"], "125m"),
    ],
)
def test_errors_are_one_message_and_status_2(args, told):
    result = invoke(*args)
    assert result.exit_code == 2
    assert told in one_line(result.stderr) and "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    assert invoke(*args, "--traceback").exception is not None


def test_training_on_other_devices_than_the_machine_s(tmp_path):
    """In a process of its own, since the number of devices is fixed at JAX's first use."""
    command = [sys.executable, "-c", "from autoshard.cli import app; app()", "train", CONFIGS / "quickstart.yaml"]
    command += [*SMALL, "train.steps=2", f"train.output_dir={tmp_path}", "--devices", "4"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert Plan.load(tmp_path / "plan.json").num_devices == 4
    assert "Step 2, loss 5." in done.stdout
