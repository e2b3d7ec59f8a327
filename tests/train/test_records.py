"""What a run reads and keeps: batches, checkpoints of sharded states, and logs that survive a crash."""

import io
import json
import shutil
import signal
import sys

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autoshard import files
from autoshard.checkpoints.checkpoints import Checkpoints
from autoshard.errors import ConfigError, MissingExtraError, TrainingError
from autoshard.files import append_text
from autoshard.interrupts import stop_on_signals
from autoshard.train.config import TrainSection
from autoshard.train.data import Batches
from autoshard.train.feed import feed
from autoshard.train.metrics import EvalReport, MetricsFile, StepReport, StepWork
from autoshard.train.reports import Reports
from autoshard.train.tensorboard import check_tensorboard


def sharded_state(spec: PartitionSpec, offset: float) -> dict:
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    place = lambda x, s: jax.device_put(x, NamedSharding(mesh, s))
    return {
        "w": place(jnp.arange(64.0).reshape(8, 8) + offset, spec),
        "layers": {0: place(jnp.float32(offset), PartitionSpec())},
        "rng": place(jax.random.key(int(offset)), PartitionSpec()),
    }


def save(folder, step: int, state: dict, keep: int = 2) -> None:
    with Checkpoints(folder, keep) as checkpoints:
        checkpoints.save(step, state, {"name": "test"})


def test_a_state_comes_back_with_its_values_in_the_shardings_asked_for(tmp_path):
    save(tmp_path, 3, sharded_state(PartitionSpec("data", "tensor"), 5.0))
    wanted = sharded_state(PartitionSpec(None, ("data", "tensor")), 0.0)
    with Checkpoints(tmp_path, 2) as checkpoints:
        restored = checkpoints.restore(wanted).state
    np.testing.assert_array_equal(restored["w"], np.arange(64.0).reshape(8, 8) + 5)
    assert restored["w"].sharding == wanted["w"].sharding
    assert float(restored["layers"][0]) == 5.0
    assert (jax.random.key_data(restored["rng"]) == jax.random.key_data(jax.random.key(5))).all()


def test_a_state_may_be_donated_while_it_is_being_written(tmp_path):
    overwritten = jax.jit(lambda x: -x - 1, donate_argnums=0)
    large = jax.device_put(jnp.arange(2.0**20), sharded_state(PartitionSpec("data"), 0.0)["layers"][0].sharding)
    with Checkpoints(tmp_path, 2) as checkpoints:
        assert checkpoints.latest_step() is None
        checkpoints.save(1, {"large": large}, {})
        after = jax.block_until_ready(overwritten(large))
        assert large.is_deleted()
        restored = checkpoints.restore({"large": after}).state
    np.testing.assert_array_equal(restored["large"], np.arange(2.0**20))


def test_old_checkpoints_are_deleted_and_unfitting_ones_refused(tmp_path):
    state = sharded_state(PartitionSpec(), 0.0)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in range(4):
            checkpoints.save(step, state, {})
        checkpoints.save(3, state, {})
        checkpoints.wait()
        assert checkpoints.latest_step() == 3
        assert sorted(int(path.name) for path in tmp_path.iterdir()) == [2, 3]
        for unfitting, told in [
            (state | {"w": state["w"][:4]}, r"`w` is saved as float32\[8, 8\], but the state needs float32\[4, 8\]"),
            (state | {"w": state["w"].astype(jnp.int32)}, r"needs int32\[8, 8\]"),
            (state | {"more": state["w"]}, r"lacks `more`"),
            ({name: leaf for name, leaf in state.items() if name != "w"}, r"holds `w`, which"),
        ]:
            with pytest.raises(ConfigError, match=f"step 3 .*{told}"):
                checkpoints.restore(unfitting)


def test_what_was_left_half_written_is_no_checkpoint_and_goes_away(tmp_path):
    state = sharded_state(PartitionSpec(), 0.0)
    save(tmp_path, 1, state)
    half = tmp_path / "2.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "1", half)
    (half / "commit_success.txt").unlink(missing_ok=True)
    with Checkpoints(tmp_path, 2) as checkpoints:
        assert checkpoints.latest_step() == 1
        checkpoints.save(2, state, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_a_reason(tmp_path):
    checkpoints = Checkpoints(tmp_path / "folder", 2)
    shutil.rmtree(tmp_path / "folder")
    (tmp_path / "folder").write_text("")
    with pytest.raises(TrainingError, match="could not be written"):
        checkpoints.save(1, sharded_state(PartitionSpec(), 0.0), {})
        checkpoints.wait()


WORK = StepWork(num_devices=8, items=4096, item="images", model_flops=8e15, planned_flops=2e15)


def report(step: int, **metrics: float) -> StepReport:
    return StepReport(step, {"loss": 1.5, **metrics}, 0.5, 0.125, False, WORK)


def test_lines_have_maxtext_s_form():
    assert report(7, accuracy=0.25).line() == (
        "completed step: 7, seconds: 0.500, TFLOP/s/device: 2000.000, Images/s/device: 1024.000, total_weights: 4096, "
        "loss: 1.500, accuracy: 0.25"
    )
    evaluated = EvalReport(7, {"loss": 2.0, "accuracy": 0.5}, 100, 1.0)
    assert evaluated.line() == "eval metrics after step: 7, loss=2.000, accuracy=0.5, total_weights=100"
    assert report(7).record()["planned_tflops_per_s_per_device"] == 4000


def test_metrics_after_the_resumed_step_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, after_step=0)
    for step in (1, 2, 3):
        file.write(report(step))
    file.write(EvalReport(2, {"loss": float("nan")}, 100, 1.0))
    path.write_text(path.read_text() + '{"step": 4, "lo')
    MetricsFile(path, after_step=2).write(report(7))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(x["kind"], x["step"], x["loss"]) for x in lines] == [
        ("train", 1, 1.5), ("train", 2, 1.5), ("eval", 2, None), ("train", 7, 1.5),
    ]  # fmt: skip
    MetricsFile(path, after_step=0)
    assert path.read_text() == ""


def test_tensorboard_without_its_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(MissingExtraError, match=r"autoshard\[tensorboard\]"):
        check_tensorboard()


def test_batches_are_fed_in_order_from_any_step_on_and_laid_as_asked():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    wanted = {"x": NamedSharding(mesh, PartitionSpec("data"))}
    whole = grain.MapDataset.range(7).map(lambda n: {"x": np.full((8, 2), n)})
    batches = Batches(8, lambda examples: whole.map(lambda batch: {"x": batch["x"][examples]}))
    with feed(batches, 4, wanted) as coming:
        fed = [next(coming) for _ in range(3)]
        assert [int(one.batch["x"][0, 0]) for one in fed] == [4, 5, 6]
        assert all(one.batch["x"].sharding == wanted["x"] and one.wait_s >= 0 for one in fed)
        with pytest.raises(TrainingError, match="end before step 8"):
            next(coming)


def test_the_first_interrupt_is_a_request_and_the_second_is_not():
    with pytest.raises(KeyboardInterrupt), stop_on_signals() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        signal.raise_signal(signal.SIGINT)


def test_lines_that_a_full_disk_did_not_take_follow_when_there_is_room(tmp_path, monkeypatch):
    file = MetricsFile(tmp_path / "metrics.jsonl", after_step=0)
    file.write(report(1))
    with monkeypatch.context() as full:
        full.setattr(files, "append_text", lambda path, text: append_text("/dev/full", text))
        for step in (2, 3):
            with pytest.raises(OSError, match="No space left"):
                file.write(report(step))
    file.write(report(4))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_a_full_disk_costs_the_reports_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "append_text", lambda path, text: append_text("/dev/full", text))
    printed = io.StringIO()
    with Reports(TrainSection(steps=9), tmp_path, rich.console.Console(file=printed, width=200), 0) as reports:
        reports.report(report(1))
        reports.report(report(2))
    assert printed.getvalue().count("warning: the metrics cannot be written: [Errno 28]") == 1
    assert printed.getvalue().count("completed step") == 2
