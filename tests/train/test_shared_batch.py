"""Runs whose replicas share their batches out: the same training, whoever is slow, by a trace of times."""

import dataclasses
import io
import json
import pathlib

import jax
import numpy as np
import optax
import pytest
import rich.console
from slow_rank import FROM, RANKS, SLOW, Trace

from autoshard import TrainStep, UnevenStep
from autoshard.errors import ConfigError
from autoshard.train.config import StragglersSection, TrainConfig, config_of_text
from autoshard.train.metrics import StragglerReport
from autoshard.train.planning import arguments
from autoshard.train.registry import train_functions
from autoshard.train.slow_replicas import SlowReplicas
from autoshard.train.trainer import train

STEPS, PARTS = 50, 32


def config_of(folder: pathlib.Path, stragglers: dict, optimizer: dict | None = None, **plan) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"overrides": {"num_layers": 1, "embed_dim": 32, "num_heads": 4}},
            "optimizer": {"schedule": "constant", "learning_rate": 1e-2, **(optimizer or {})},
            "data": {"batch_size": 16, "sequence_length": 16},
            "plan": {"time_limit_s": 5, **plan},
            "train": {"steps": 4, "log_every": 1, "output_dir": str(folder)},
            "stragglers": stragglers,
        }
    )


def losses(config: TrainConfig) -> list[float]:
    train(config, rich.console.Console(file=io.StringIO()))
    lines = (pathlib.Path(config.train.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if line["kind"] == "train"]


def test_a_run_is_that_in_as_many_micro_batches(tmp_path):
    """Rank 2 is slowed, so that shares may change amid the run."""
    shared = losses(config_of(tmp_path / "a", {"mode": "migrate", "parts": 16, "emulate": {2: 3}}))
    plain = losses(config_of(tmp_path / "b", {}, {"num_micro_batches": 16}, mesh={"data": 8}))
    assert len(shared) == 4
    np.testing.assert_allclose(shared, plain, rtol=1e-4)


@dataclasses.dataclass
class Shares:
    """What a run's step has of shares."""

    step: UnevenStep
    counts: np.ndarray
    slowed: np.ndarray
    mesh: jax.sharding.Mesh | None = None


def test_a_slow_replica_is_named_gets_fewer_parts_and_later_as_many_as_others():
    step = UnevenStep(TrainStep(lambda p, b, r: (0.0, {}), optax.sgd(0.1)), RANKS, PARTS)
    shares, reports, counts = Shares(step, step.even, np.ones(RANKS, int)), list[StragglerReport](), []
    watched = SlowReplicas(StragglersSection(mode="migrate", parts=PARTS), shares, reports.append, Trace())
    for number in range(1, STEPS + 1):
        watched.before_step(number)
        watched.after_step(number, 0.1, None)
        counts.append(shares.counts.tolist())
    named = next(r for r in reports if r.slow)
    assert [rank for rank, _ in named.slow] == [SLOW] and named.slow[0][1] == pytest.approx(4.0, rel=0.1)
    assert FROM + 3 <= named.step <= FROM + 4
    # seven replicas of speed 1 and one of 1/4: 32 parts end after five turns, of which the slow one takes one
    assert counts[named.step][SLOW] == 1 and max(counts[named.step]) == 5 and sum(counts[named.step]) == PARTS
    assert named.done.startswith("moved 3 of 32 parts") and named.after_s / named.before_s == pytest.approx(
        5 / 16, rel=0.1
    )
    assert any(r.done == f"measured since step {named.step}" for r in reports)
    assert counts[-1] == [4] * RANKS


def test_a_replica_that_is_not_there_cannot_be_slowed():
    step = UnevenStep(TrainStep(lambda p, b, r: (0.0, {}), optax.sgd(0.1)), RANKS, PARTS)
    section = StragglersSection(mode="migrate", parts=PARTS, emulate={RANKS: 2.0}, emulate_from=50)
    with pytest.raises(ConfigError, match=f"ranks of axis `data` are 0 to {RANKS - 1}; received {RANKS}"):
        SlowReplicas(section, Shares(step, step.even, np.ones(RANKS, int)), print, Trace())


@pytest.mark.parametrize(
    ("stragglers", "plan", "message"),
    [
        ({"parts": 16}, {"mesh": {"data": 2, "tensor": 4}}, r"one axis of a mesh; received plan.mesh="),
        ({"parts": 3}, {}, r"stragglers.parts: must divide data.batch_size; received 3 and 16"),
        ({"parts": 4}, {}, r"each of 8 devices must have a part .* received 4"),
        ({"parts": 16}, {"stages": {"num_stages": 2}}, r"stragglers.parts: the stages of a step .* received 16"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(tmp_path, stragglers, plan, message):
    with pytest.raises(ConfigError, match=message):
        train_functions(config_of(tmp_path, {"mode": "auto", **stragglers}, **plan))


def test_parts_are_never_left_out():
    with pytest.raises(ConfigError, match="nothing is left out: mode is migrate, auto or off, not resize"):
        config_of_text(json.dumps({"stragglers": {"mode": "resize", "parts": 8}}), "test")


def test_the_axis_has_the_name_that_the_mesh_has(tmp_path):
    config = config_of(tmp_path, {"mode": "auto", "parts": 16}, mesh={"fsdp": 8})
    functions = train_functions(config)
    assert functions.step.axis == "fsdp" and functions.step.replicas == 8
    assert [x.shape for x in arguments(config, functions)[2:]] == [(8,)]
