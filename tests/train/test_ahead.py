"""What a worker makes while it waits: the traced program and the data, before any device is there."""

import sys

import jax
from together import run_together

from autoshard.trace.trace import trace
from autoshard.train.ahead import prepare_ahead
from autoshard.train.config import TrainConfig
from autoshard.train.planning import arguments
from autoshard.train.work import model_flops

SMALL = {"model": {"name": "dlrm"}, "data": {"batch_size": 8}}

WAITS = f"""
import jax
from autoshard.train.ahead import prepare_ahead
from autoshard.train.config import TrainConfig
ahead = prepare_ahead(TrainConfig.model_validate({SMALL!r}))
jax.config.update("jax_num_cpu_devices", 3)  # refused once devices are there
assert jax.device_count() == 3 and ahead.functions() is ahead.whole
"""


def test_no_device_is_touched():
    run_together([[sys.executable, "-c", WAITS]])


def test_nothing_is_traced_again():
    ahead = prepare_ahead(TrainConfig.model_validate(SMALL))
    (step,), (evaluate,) = ahead.whole.step.traces.values(), ahead.whole.evaluate.traces.values()
    state, batch = arguments(ahead.config, ahead.whole)
    assert trace(ahead.whole.step, (state, batch), (0,)) is step
    assert model_flops(ahead.whole, state, batch) > 0
    assert list(ahead.whole.evaluate.traces.values()) == [evaluate]
    assert jax.tree.structure(ahead.data.batches.shapes()) == jax.tree.structure(batch)
