"""What a run keeps: checkpoints of sharded states, and a metrics file that survives a crash."""

import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autoshard.errors import ConfigError
from autoshard.interrupts import stop_on_signals
from autoshard.train.checkpoints import KEPT, Checkpoints
from autoshard.train.metrics import MetricsFile, StepMetrics


def sharded_state(spec: PartitionSpec, offset: float) -> dict:
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    place = lambda x, s: jax.device_put(x, NamedSharding(mesh, s))
    return {
        "w": place(jnp.arange(64.0).reshape(8, 8) + offset, spec),
        "layers": {0: place(jnp.float32(offset), PartitionSpec())},
        "rng": place(jax.random.key(int(offset)), PartitionSpec()),
    }


def test_a_state_comes_back_with_its_values_in_the_shardings_asked_for(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() is None
        checkpoints.save(3, sharded_state(PartitionSpec("data", "tensor"), 5.0))
    wanted = sharded_state(PartitionSpec(None, ("data", "tensor")), 0.0)
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(checkpoints.latest_step(), wanted)
    np.testing.assert_array_equal(restored["w"], np.arange(64.0).reshape(8, 8) + 5)
    assert restored["w"].sharding == wanted["w"].sharding
    assert float(restored["layers"][0]) == 5.0
    assert (jax.random.key_data(restored["rng"]) == jax.random.key_data(jax.random.key(5))).all()


def test_old_checkpoints_are_deleted_and_unfitting_or_damaged_ones_refused(tmp_path):
    state = sharded_state(PartitionSpec(), 0.0)
    with Checkpoints(tmp_path) as checkpoints:
        for step in range(KEPT + 2):
            checkpoints.save(step, state)
        checkpoints.save(KEPT + 1, state)
        assert checkpoints.latest_step() == KEPT + 1
        assert sorted(int(path.name) for path in tmp_path.iterdir()) == [2, 3]
        with pytest.raises(ConfigError, match="step 3"):
            checkpoints.restore(3, state | {"w": state["w"][:4]})
        shutil.rmtree(tmp_path / "3" / "default" / "d")
        with pytest.raises(ConfigError, match="step 3"):
            checkpoints.restore(3, state)


def metrics(step: int) -> StepMetrics:
    return StepMetrics(step, 1.5, 0.5, 20.0, False)


def test_metrics_after_the_resumed_step_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, after_step=0)
    for step in (1, 2, 3):
        file.write(metrics(step))
    path.write_text(path.read_text() + '{"step": 4, "lo')
    MetricsFile(path, after_step=2).write(metrics(7))
    assert [int(line.split(",")[0].removeprefix('{"step": ')) for line in path.read_text().splitlines()] == [1, 2, 7]
    MetricsFile(path, after_step=0)
    assert path.read_text() == ""


def test_the_first_interrupt_is_a_request_and_the_second_is_not():
    with pytest.raises(KeyboardInterrupt), stop_on_signals() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        signal.raise_signal(signal.SIGINT)
