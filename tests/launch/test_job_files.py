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
        (
            ["kubernetes", "train.checkpoint_every=20", "--gpus-per-worker", "8", "--image", "a 1"],
            "has no white space; received 'a 1'",
        ),
        (["slurm", "--engine", "ray"], "--engine ray: is for the supervisor"),
        (["slurm", "--rejoin-after", "5"], "--rejoin-after: is for the supervisor"),
        (["slurm", "--stall-limit", "5"], "--stall-limit: is for the supervisor"),
        (["slurm", "--max-preemptions", "5"], "--max-preemptions: is for the supervisor"),
        (["kubernetes", "--no-standbys"], "--no-standbys: is for the supervisor"),
        (["kubernetes", "--no-plan-ahead"], "--no-plan-ahead: is for the supervisor"),
    ],
)
def test_what_is_missing_is_told(arguments, message):
    result = emitted(*arguments)
    assert result.exit_code == 2 and message in result.output


@pytest.mark.parametrize(
    ("arguments", "devices"),
    [
        (["--emit", "slurm", "--workers", "1:2", "--gpus-per-worker", "8"], "8 to 16"),
        (["--emit", "slurm", "--workers", "4", "--gpus-per-worker", "8"], "32"),
        (["--emit", "kubernetes", "--image", "a:1", "--workers", "4", "--gpus-per-worker", "8"], "32"),
        (["--workers", "2:4", "--devices-per-worker", "1"], "2 to 4"),
    ],
)
def test_workers_that_are_not_those_of_the_cluster_file_are_refused(tmp_path, arguments, devices):
    cluster = pathlib.Path(CONFIG).parent / "clusters" / "h100x16.yaml"
    own = [f"plan.cluster={cluster}", "train.checkpoint_every=20", f"train.output_dir={tmp_path / 'run'}"]
    result = CliRunner().invoke(app, ["launch", CONFIG, *arguments, *own])
    told = " ".join(result.output.split())
    assert result.exit_code == 2 and not (tmp_path / "run").exists()
    assert f"h100x16.yaml describes 16, and the workers have {devices}. Add plan.cluster=null" in told


def test_a_cluster_file_of_the_image_need_not_be_here():
    arguments = [
        "kubernetes",
        "--image",
        "a:1",
        "--workers",
        "4",
        "--gpus-per-worker",
        "8",
        "train.checkpoint_every=20",
    ]
    result = emitted(*arguments, "plan.cluster=/in/the/image.yaml")
    assert result.exit_code == 0 and "cluster: /in/the/image.yaml\n" in result.output


def test_the_home_folder_is_meant_by_a_tilde():
    result = emitted("slurm", "--gpus-per-worker", "8", "train.checkpoint_every=20", "train.output_dir=~/a-run")
    assert f"logs={pathlib.Path.home()}/a-run/logs\n" in result.output


def test_the_configuration_of_a_job_set_can_be_read_line_by_line():
    result = emitted("kubernetes", "--gpus-per-worker", "8", "--image", "a:1", "train.checkpoint_every=20")
    assert "  config.yaml: |\n    model:\n      name: gpt\n" in result.output


@pytest.mark.parametrize("option", [["--gpus-per-worker", "8"], ["--image", "a:1"]])
def test_what_only_job_files_have_is_refused_without_one(tmp_path, option):
    result = CliRunner().invoke(app, ["launch", CONFIG, f"train.output_dir={tmp_path / 'run'}", *option])
    assert result.exit_code == 2 and f"{option[0]}: is for job files" in " ".join(result.output.split())
    assert not list((tmp_path / "run").glob("*"))


def test_an_output_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["launch", CONFIG, f"train.output_dir={tmp_path / 'file'}"])
    assert result.exit_code == 2 and "file cannot be made: File exists." in " ".join(result.output.split())
