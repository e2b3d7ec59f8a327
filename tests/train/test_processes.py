"""Runs of two processes with four CPU devices each, beside those of one process with eight."""

import io
import json
import os
import pathlib
import sys

import pytest
import rich.console
from together import free_port, run_together

from autoshard.files import write_text_atomically, yaml_text
from autoshard.train.config import TrainConfig
from autoshard.train.trainer import train

ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


def config_of(folder: pathlib.Path, steps: int, **settings) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"name": "dlrm"},
            "optimizer": {"name": "sgd", "schedule": "constant", "learning_rate": 0.05},
            "data": {"batch_size": 8},
            "plan": {"mesh": {"data": 4, "tensor": 2}, "time_limit_s": 5},
            "train": {"steps": steps, "log_every": 1, "output_dir": str(folder), "eval_every": 2, "resume": True},
            **settings,
        }
    )


def run_two_processes(path: pathlib.Path) -> list[str]:
    """What each prints."""
    command = [sys.executable, "-c", "from autoshard.cli import app; app()", "train", str(path)]
    common = os.environ | {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    common["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(ONE_THREAD, "")  # so that devices are measured by probes
    return run_together([command] * 2, [common | {"JAX_PROCESS_ID": str(number)} for number in range(2)])


def lines_of(folder: pathlib.Path) -> dict[tuple[str, int], float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(line["kind"], line["step"]): line["loss"] for line in lines}


@pytest.mark.slow
def test_two_processes_train_as_one_does_and_one_can_continue_their_run(tmp_path):
    together, alone = tmp_path / "together", tmp_path / "alone"
    config = config_of(together, 2, devices=4, distributed=True)
    write_text_atomically(tmp_path / "run.yaml", yaml_text(config.model_dump(mode="json", exclude_unset=True)))
    first, second = run_two_processes(tmp_path / "run.yaml")
    assert "completed step: 2," in first and "completed step" not in second
    printed = io.StringIO()
    train(config_of(together, 4), rich.console.Console(file=printed, width=200))
    assert "Continuing with the plan" in printed.getvalue() and "checkpoint of step 2" in printed.getvalue()
    train(config_of(alone, 4), rich.console.Console(file=io.StringIO()))
    found, expected = lines_of(together), lines_of(alone)
    assert set(expected) == {*(("train", step) for step in (1, 2, 3, 4)), ("eval", 2), ("eval", 4)}
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_two_hosts_train_with_tables_in_their_memory_as_one_does(tmp_path):
    together, alone = tmp_path / "together", tmp_path / "alone"
    settings = {"execution": {"mode": "pipelined", "num_workers": 2, "lazy": True}}
    config = config_of(together, 2, devices=4, distributed=True, **settings)
    write_text_atomically(tmp_path / "run.yaml", yaml_text(config.model_dump(mode="json", exclude_unset=True)))
    first, second = run_two_processes(tmp_path / "run.yaml")
    assert "completed step: 2," in first and "completed step" not in second
    printed = io.StringIO()
    train(config_of(together, 4, **settings), rich.console.Console(file=printed, width=200))
    assert "Resumed from the checkpoint of step 2" in printed.getvalue()
    train(config_of(alone, 4, **settings), rich.console.Console(file=io.StringIO()))
    assert lines_of(together) == pytest.approx(lines_of(alone), rel=1e-5)


@pytest.mark.slow
def test_two_processes_share_their_batches_out_and_train_as_one_does(tmp_path):
    together, alone = tmp_path / "together", tmp_path / "alone"
    settings = {
        "data": {"batch_size": 16},
        "plan": {"mesh": {"data": 8}, "pins": {"counts": ["data"]}, "time_limit_s": 5},
        "stragglers": {"mode": "migrate", "parts": 16, "emulate": {3: 4}},
    }
    config = config_of(together, 3, devices=4, distributed=True, **settings)
    write_text_atomically(tmp_path / "run.yaml", yaml_text(config.model_dump(mode="json", exclude_unset=True)))
    first, _ = run_two_processes(tmp_path / "run.yaml")
    assert "completed step: 3," in first
    train(config_of(alone, 3, **settings), rich.console.Console(file=io.StringIO()))
    assert lines_of(together) == pytest.approx(lines_of(alone), rel=1e-5)


@pytest.mark.slow
def test_two_processes_compile_by_arrays_and_see_the_same_times_of_several_steps_at_once():
    """Of two, as long as an exchange takes less than a hundredth of them; of five where steps are short."""
    script = str(pathlib.Path(__file__).parent / "watched_process.py")
    address = f"127.0.0.1:{free_port()}"
    environment = os.environ | {"XLA_FLAGS": ONE_THREAD, "JAX_PLATFORMS": "cpu"}
    commands = [[sys.executable, script, address, str(number)] for number in range(2)]
    first, second = (json.loads(text.splitlines()[-1]) for text in run_together(commands, [environment] * 2))
    assert first == second and [len(rows) for rows in first] == [0, 2, 0, 2, 0, 2, 0, 0, 0, 0, 5]
    steps_s = [step_s for rows in first for *_, step_s in rows]
    assert steps_s == [1e3] * 4 + [1e-3] * 7 and all(min(times) > 0 for rows in first for *times, _ in rows)
