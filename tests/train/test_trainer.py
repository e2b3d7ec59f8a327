"""Whole runs on eight CPU devices: learning, stopping by Ctrl-C, resuming where the run stopped, and all they leave."""

import dataclasses
import io
import json
import os
import pathlib
import shutil
import signal
import threading
import time

import jax
import numpy as np
import pytest
import rich.console
import typer.testing
from autoshard_models.train_step import TrainFunctions
from single_worker import worker_of

from autoshard import Plan
from autoshard.checkpoints.checkpoints import Checkpoints
from autoshard.cli import app
from autoshard.elastic.worker import Worker
from autoshard.errors import ConfigError, ElasticError, TrainingError
from autoshard.train.config import TrainConfig, load_config
from autoshard.train.held_folder import held_folder
from autoshard.train.registry import load_data, train_functions
from autoshard.train.result import TrainResult
from autoshard.train.trainer import carry_out, train
from autoshard.train.work import model_flops

ON_DATA, ON_BOTH = {"data": 8}, {"data": 2, "tensor": 4}


def config_of(folder: pathlib.Path, mesh: dict[str, int] = ON_DATA, **train_settings) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"overrides": {"num_layers": 1, "embed_dim": 32, "num_heads": 4, "dropout_rate": 0.1}},
            "optimizer": {"schedule": "constant", "learning_rate": 1e-2},
            "data": {"batch_size": 8, "sequence_length": 16},
            "plan": {"mesh": mesh, "time_limit_s": 5},
            "train": {"log_every": 1, "output_dir": str(folder), **train_settings},
        }
    )


def run(config: TrainConfig) -> tuple[TrainResult, str]:
    """How a run ends, and what it prints."""
    printed = io.StringIO()
    return train(config, rich.console.Console(file=printed, width=200)), printed.getvalue()


def logged(folder: pathlib.Path, kind: str = "train") -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(folder: pathlib.Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in logged(folder)}


def stop_after_first_report(folder: pathlib.Path) -> threading.Thread:
    """Sends this process SIGINT, as Ctrl-C does, once the run in `folder` has reported a step."""

    def watch() -> None:
        metrics = folder / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@dataclasses.dataclass(frozen=True)
class Runs:
    """A run stopped by Ctrl-C at step `stopped_at` and resumed until `last`; one on another mesh from there; one whole.

    Of each: the folder, and what it printed.
    """

    stopped_at: int
    last: int
    whole: tuple[pathlib.Path, str]
    resumed: tuple[pathlib.Path, str]
    elsewhere: tuple[pathlib.Path, str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    stopped, whole, elsewhere = (tmp_path_factory.mktemp("runs") / name for name in ("stopped", "whole", "elsewhere"))
    handler = signal.getsignal(signal.SIGINT)
    watcher = stop_after_first_report(stopped)
    first, _ = run(config_of(stopped, steps=100_000))
    watcher.join()
    assert first.interrupted and 0 < first.step < 100_000
    assert signal.getsignal(signal.SIGINT) is handler
    shutil.copytree(stopped, elsewhere)
    last = max(first.step + 3, 14)
    with pytest.raises(ConfigError, match="train.resume=true"):
        run(config_of(stopped, steps=last))
    second, continued = run(config_of(stopped, steps=last, resume=True))
    assert (second.step, second.interrupted) == (last, False)
    _, moved = run(config_of(elsewhere, ON_BOTH, steps=last, resume=True))
    asked_for = {"tensorboard": True, "profile_first_step": 4, "profile_steps": 2}
    wanted = config_of(whole, steps=last, checkpoint_every=2, eval_every=6, eval_batches=2, **asked_for)
    _, printed = run(wanted)
    assert load_config(whole / "config.yaml") == wanted
    return Runs(first.step, last, (whole, printed), (stopped, continued), (elsewhere, moved))


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one_exactly(runs):
    folder, printed = runs.resumed
    assert "Continuing with the plan of this run" in printed and f"checkpoint of step {runs.stopped_at}" in printed
    assert losses(folder) == losses(runs.whole[0])
    assert run(config_of(folder, steps=runs.last, resume=True))[0] == TrainResult(runs.last, None, False, folder)


@pytest.mark.slow
def test_a_run_resumed_on_another_mesh_keeps_its_losses(runs):
    folder, printed = runs.elsewhere
    assert "Planning again: the configuration has another `plan`" in printed
    assert Plan.load(folder / "plan.json").mesh_axes == ON_BOTH
    whole, moved = losses(runs.whole[0]), losses(folder)
    assert list(moved) == list(whole)
    np.testing.assert_allclose(list(moved.values()), list(whole.values()), rtol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(runs):
    config = config_of(runs.resumed[0], steps=runs.last + 1, resume=True)
    other = config.model.model_copy(update={"overrides": config.model.overrides | {"num_layers": 2}})
    told = rf"checkpoint of step {runs.last} .* lacks `[\w.]*params.*` float32"
    kept = [(runs.resumed[0] / name).read_text() for name in ("plan.json", "config.yaml")]
    with pytest.raises(ConfigError, match=told):
        run(config.model_copy(update={"model": other}))
    assert kept == [(runs.resumed[0] / name).read_text() for name in ("plan.json", "config.yaml")]


@pytest.mark.slow
def test_a_run_learns_and_its_log_has_maxtext_s_form(runs):
    folder, printed = runs.whole
    lines = logged(folder)
    assert [line["step"] for line in lines] == list(range(1, runs.last + 1))
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert [line["compiled"] for line in lines] == [True] + [False] * (len(lines) - 1)
    for line in lines:
        assert line["items_per_s_per_device"] == pytest.approx(8 * 16 / 8 / line["step_time_s"])
        assert 0 <= line["data_wait_s"] <= line["step_time_s"]
    # Products of the forward pass by hand: for each of 8 x 16 tokens, 2 operations for each weight of the block's four
    # projections and two layers of four times the width, and of the output layer; and 2 x 2 x 16 x 32 for attention.
    forward = 8 * 16 * (2 * (4 * 32 * 32 + 2 * 32 * 128 + 32 * 256) + 2 * 2 * 16 * 32)
    rate = 3 * forward / 8 / lines[-1]["step_time_s"] / 1e12
    assert lines[-1]["model_tflops_per_s_per_device"] == pytest.approx(rate)
    last = lines[-1]
    assert (
        f"completed step: {runs.last}, seconds: {last['step_time_s']:.3f}, TFLOP/s/device: {rate:.3f}, "
        f"Tokens/s/device: {last['items_per_s_per_device']:.3f}, total_weights: 128, loss: {last['loss']:.3f}\n"
    ) in printed
    assert f"eval metrics after step: {runs.last}, loss=" in printed


@pytest.mark.slow
def test_evaluation_equals_that_of_the_unsharded_model_without_dropout(runs):
    folder = runs.whole[0]
    config = load_config(folder / "config.yaml")
    functions, data = train_functions(config), load_data(config)
    reported = {line["step"]: line["loss"] for line in logged(folder, "eval")}
    assert list(reported) == sorted({*range(6, runs.last + 1, 6), runs.last})
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.eval_shape(functions.init, 0)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), like)
    with Checkpoints(folder / "checkpoints", keep=2) as checkpoints:
        assert checkpoints.latest_step() == runs.last
        state = checkpoints.restore(like).state
    evaluate = jax.jit(functions.evaluate)
    expected = np.mean([float(evaluate(state, data.eval_batches[n])["loss"]) for n in range(2)])
    assert reported[runs.last] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_checkpoints_are_kept_and_tell_their_run(runs):
    folder = runs.whole[0]
    kept = sorted(int(path.name) for path in (folder / "checkpoints").iterdir())
    even = runs.last - runs.last % 2
    assert kept == ([even - 2, even] if even == runs.last else [even, runs.last])
    identity = json.loads((folder / "checkpoints" / str(runs.last) / "run" / "metadata").read_text())
    assert TrainConfig.model_validate(identity["config"]) == load_config(folder / "config.yaml")
    assert identity["plan"] == json.loads((folder / "plan.json").read_text())


@pytest.mark.slow
def test_events_for_tensorboard_and_a_trace_are_there(runs):
    from tensorboardX.proto.event_pb2 import Event

    folder = runs.whole[0]
    (file,) = (folder / "tensorboard").iterdir()
    events = [Event.FromString(content) for content in tf_records(file.read_bytes())]
    scalars = {(v.tag, e.step): v.simple_value for e in events for v in e.summary.value}
    for step, loss in losses(folder).items():
        assert scalars["train/loss", step] == np.float32(loss)
    assert ("eval/loss", runs.last) in scalars
    assert [path.stat().st_size > 0 for path in (folder / "profile").rglob("*.xplane.pb")] == [True]


def tf_records(content: bytes) -> list[bytes]:
    """The records of a TFRecord file: length (8 bytes), its checksum (4), the record, its checksum (4)."""
    records, start = [], 0
    while start < len(content):
        size = int.from_bytes(content[start : start + 8], "little")
        records.append(content[start + 12 : start + 12 + size])
        start += 12 + size + 4
    return records


@pytest.mark.slow
def test_a_run_none_of_whose_checkpoints_is_undamaged_says_that_it_begins_anew(runs, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(runs.resumed[0], folder)
    saved = [path for path in (folder / "checkpoints").iterdir() if path.is_dir()]
    for path in saved:
        (path / "state" / "_METADATA").unlink()
    _, printed = run(config_of(folder, steps=runs.last + 1, resume=True))
    assert printed.count("warning: a checkpoint is damaged") == len(saved) > 0
    assert "begins anew, with step 1" in printed and "completed step: 1," in printed


def test_model_flops_count_products_of_the_forward_pass_thrice():
    product = lambda state, batch: {"loss": (jax.nn.relu(batch @ state["w"]) @ state["v"]).sum()}
    state = {"w": jax.ShapeDtypeStruct((4, 6), "float32"), "v": jax.ShapeDtypeStruct((6, 2), "float32")}
    functions = TrainFunctions(lambda seed: state, lambda state, batch: (state, {}), product)
    batch = jax.ShapeDtypeStruct((8, 4), "float32")
    assert model_flops(functions, state, batch) == 3 * (2 * 8 * 4 * 6 + 2 * 8 * 6 * 2)


def test_a_folder_in_which_another_run_goes_on_is_refused(tmp_path):
    """Before that run has saved anything; it keeps its files, and no supervisor is taken to be there."""
    with held_folder(config_of(tmp_path), Worker.alone()):
        with pytest.raises(ElasticError, match=rf"one process that trains, and process {os.getpid()} is it"):
            run(config_of(tmp_path, steps=1))
        asked = typer.testing.CliRunner().invoke(app, ["scale", str(tmp_path), "--workers", "2"])
    assert asked.exit_code == 2 and "nobody supervises a run here" in " ".join(asked.output.split())
    assert [path.name for path in tmp_path.iterdir()] == ["supervisor.lock"]


def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="train.output_dir"):
        run(config_of(tmp_path / "file", steps=1))


def test_a_cluster_of_another_number_of_devices_is_refused_before_anything_is_planned(tmp_path):
    cluster = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x16.yaml"
    config = config_of(tmp_path, steps=1)
    config = config.model_copy(update={"plan": config.plan.model_copy(update={"cluster": str(cluster)})})
    with pytest.raises(ConfigError, match=r"h100x16.yaml describes 16, and JAX sees 8. Add plan.cluster=null"):
        run(config)
    assert not (tmp_path / "plan.json").exists()


def test_a_full_disk_costs_no_step_but_a_run_whose_last_state_it_takes_ends_with_an_error(tmp_path, monkeypatch):
    usage, calls = shutil.disk_usage(tmp_path), []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: calls.append(path) or usage._replace(free=1000))
    printed = io.StringIO()
    with pytest.raises(TrainingError, match=r"after step 2, the last one .* is not saved .* no checkpoint is there"):
        train(config_of(tmp_path, steps=2, checkpoint_every=1), rich.console.Console(file=printed, width=200))
    told = " ".join(printed.getvalue().split())
    assert (
        told.count("the checkpoint of step 1 is not saved") == told.count("the checkpoint of step 2 is not saved") == 1
    )
    assert len(calls) == 2 and list(losses(tmp_path)) == [1, 2]


@pytest.mark.slow
def test_the_last_state_reaches_the_disk_where_its_generation_died_with_it_in_memory(tmp_path):
    """Else the supervisor takes the run for finished, and frees the memory."""
    config = config_of(tmp_path / "run", steps=2, resume=True)

    def generation(number: int) -> TrainResult:
        worker = worker_of(config.train.output_dir, tmp_path / "memory", number)
        quiet = rich.console.Console(file=io.StringIO())
        return carry_out(config, train_functions(config), load_data(config), quiet, worker)

    checkpoints = tmp_path / "run" / "checkpoints"
    generation(1)
    shutil.rmtree(checkpoints)  # as if it had been killed before it wrote any
    assert generation(2).step == 2
    assert [path.name for path in checkpoints.iterdir()] == ["2"]
    assert list(losses(tmp_path / "run")) == [1, 2]
