"""`autoshard launch --emit`: the configuration, the command line and the size of a run reach its job file."""

import pathlib
import shlex

import pytest
import yaml
from typer.testing import CliRunner

from autoshard.cli import app
from autoshard.files import read_yaml, write_text_atomically
from autoshard.train.config import load_config

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs" / "quickstart.yaml")


def emitted(*arguments: str):
    return CliRunner().invoke(app, ["launch", CONFIG, "--emit", *arguments])


def test_the_command_of_a_slurm_job_is_a_training_command(tmp_path):
    folder = tmp_path / "a run"
    result = emitted(
        *("slurm", "--workers", "2:4", "--devices-per-worker", "2", "--max-crashes", "7"),
        *("train.checkpoint_every=20", f"train.output_dir={folder}", "data.name='python_sources'"),
    )
    assert result.exit_code == 0, result.output
    command = shlex.split(result.output.split(" worker \\\n")[1].splitlines()[0])
    config, *overrides = command[command.index("train") + 1 : command.index("&")]
    settings = load_config(config, overrides)
    assert settings.train.output_dir == str(folder) and settings.train.checkpoint_every == 20
    assert settings.distributed and settings.train.resume and settings.devices == 2
    assert "#SBATCH --nodes=2-4\n" in result.output and "#SBATCH --job-name=a-run\n" in result.output
    assert "attempt <= 7;" in result.output
    assert not folder.exists()


def test_the_configuration_of_a_job_set_is_in_its_file(tmp_path):
    result = emitted(
        *("kubernetes", "--workers", "4", "--gpus-per-worker", "8", "--image", "autoshard:1"),
        *("train.checkpoint_every=20", "data.batch_size=64"),
    )
    assert result.exit_code == 0, result.output
    config_map, _, jobs = yaml.safe_load_all(result.output)
    path = tmp_path / "config.yaml"
    write_text_atomically(path, config_map["data"]["config.yaml"])
    (worker,) = jobs["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    command = worker["command"]
    assert command[:4] == ["python", "-m", "autoshard", "train"]
    settings = load_config(path, command[5:])
    expected = load_config(CONFIG, ["train.checkpoint_every=20", "data.batch_size=64"])
    assert settings.model == expected.model and settings.data == expected.data and settings.plan == expected.plan
    assert settings.distributed and settings.devices is None and settings.train.output_dir == "/output"
    assert command[4].startswith(worker["volumeMounts"][0]["mountPath"]) and read_yaml(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slurm", "--gpus-per-worker", "8"], "train.checkpoint_every is null"),
        (["slurm", "--gpus-per-worker", "8", "--image", "a:1"], "--image: is for --emit kubernetes"),
        (["slurm", "train.checkpoint_every=20"], "give --gpus-per-worker"),
        (
            ["slurm", "train.checkpoint_every=20", "--gpus-per-worker", "8", "--devices-per-worker", "8"],
            "give --gpus-per-worker",
        ),
        (["kubernetes", "train.checkpoint_every=20", "--gpus-per-worker", "8"], "--image"),
        (
            ["kubernetes", "train.checkpoint_every=20", "--gpus-per-worker", "8", "--image", "x", "--workers", "2:4"],
            "fixed number of workers; received 2:4",
        ),
    ],
)
def test_what_is_missing_is_told(arguments, message):
    result = emitted(*arguments)
    assert result.exit_code == 2 and message in result.output


@pytest.mark.parametrize("option", [["--gpus-per-worker", "8"], ["--image", "a:1"]])
def test_what_only_job_files_have_is_refused_without_one(tmp_path, option):
    result = CliRunner().invoke(app, ["launch", CONFIG, f"train.output_dir={tmp_path / 'run'}", *option])
    assert result.exit_code == 2 and f"{option[0]}: is for job files" in " ".join(result.output.split())
    assert not list((tmp_path / "run").glob("*"))


def test_an_output_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["launch", CONFIG, f"train.output_dir={tmp_path / 'file'}"])
    assert result.exit_code == 2 and "file cannot be made: File exists." in " ".join(result.output.split())
