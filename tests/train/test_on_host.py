"""Training runs with embedding tables in host memory: the same losses as on devices, resumed, evaluated, refused."""

import io
import json
import pathlib
import shutil
from collections.abc import Mapping
from types import MappingProxyType

import pytest
import rich.console

from autoshard.errors import AutoshardError, ConfigError, TrainingError
from autoshard.train.config import TrainConfig
from autoshard.train.planning import make_plan
from autoshard.train.registry import train_functions
from autoshard.train.result import TrainResult
from autoshard.train.trainer import train

CLUSTERS = pathlib.Path(__file__).parents[2] / "configs" / "clusters"


ADAGRAD = MappingProxyType({"name": "adagrad"})


def config_of(folder: pathlib.Path, steps: int = 6, optimizer: Mapping = ADAGRAD, **sections) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"name": "dlrm", "overrides": {"table_rows": [200, 30, 8], "bottom_dims": [4], "embed_dim": 4}},
            "optimizer": {"learning_rate": 0.1, "schedule": "constant"} | optimizer,
            "data": {"batch_size": 32},
            "plan": {"mesh": {"data": 4, "tensor": 2}, "time_limit_s": 5},
            **sections,
            "train": {
                "steps": steps,
                "log_every": 1,
                "eval_every": 4,
                "eval_batches": 2,
                "output_dir": str(folder),
                **sections.get("train", {}),
            },
        }
    )


def run(config: TrainConfig) -> tuple[TrainResult, str]:
    text = io.StringIO()
    return train(config, rich.console.Console(file=text, width=200)), text.getvalue()


def told(folder: pathlib.Path, kind: str = "train") -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == kind}


@pytest.fixture(scope="module")
def on_devices(tmp_path_factory) -> pathlib.Path:
    """A run whose tables are on the devices."""
    folder = tmp_path_factory.mktemp("devices")
    run(config_of(folder))
    return folder


HOT = {"tables.0.embedding": 20, "tables.2.embedding": 7}


@pytest.mark.parametrize(
    ("mode", "hot"), [("sync", None), pytest.param("pipelined", None, marks=pytest.mark.exhaustive), ("pipelined", HOT)]
)
def test_losses_and_evaluations_are_those_of_tables_on_devices(mode, hot, on_devices, tmp_path):
    execution = {"mode": mode, "num_workers": 2, "hot_rows": hot, "sample_batches": 4}
    result, text = run(config_of(tmp_path, execution=execution))
    assert ("27 hot rows" in text) == (hot is not None)
    assert result == TrainResult(6, pytest.approx(told(on_devices)[6]["loss"], rel=1e-5), False, tmp_path)
    assert f"in host memory: {mode}" in text and (tmp_path / "plan.json").exists()
    for step, expected in told(on_devices).items():
        own = told(tmp_path)[step]
        assert own["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert own["staleness"] == 0 and 0 < own["rows"] <= 3 * 32 and own["step_time_s"] > 0
    own, expected = told(tmp_path, "eval"), told(on_devices, "eval")
    assert list(own) == list(expected) == [4, 6]
    for step in own:
        for name in ("loss", "auc", "normalized_entropy"):
            assert own[step][name] == pytest.approx(expected[step][name], rel=1e-4)


def test_a_run_is_resumed_with_other_workers_and_in_another_mode(on_devices, tmp_path):
    execution = {"mode": "pipelined", "num_workers": 3}
    run(config_of(tmp_path, 5, train={"checkpoint_every": 2, "keep_checkpoints": 2}, execution=execution))
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("tables-*"))
    assert kept == ["tables-4", "tables-5"]
    with pytest.raises(ConfigError, match="already holds a run, saved at step 5"):
        run(config_of(tmp_path, execution=execution))
    resumed = config_of(tmp_path, train={"resume": True}, execution={"mode": "sync", "num_workers": 1})
    result, text = run(resumed)
    assert "Resumed from the checkpoint of step 5" in text
    assert result.step == 6 and result.loss == pytest.approx(told(on_devices)[6]["loss"], rel=1e-5)
    assert run(resumed)[0] == TrainResult(6, None, False, tmp_path)
    kept_files = [(tmp_path / name).read_text() for name in ("plan.json", "config.yaml")]
    with pytest.raises(ConfigError, match="tables in host memory, saved at step 6; this one has them on"):
        run(config_of(tmp_path, 8, train={"resume": True}))
    other = {**ADAGRAD, "name": "sgd"}
    longer = config_of(tmp_path, 8, optimizer=other, train={"resume": True}, execution={"mode": "sync", "lazy": True})
    with pytest.raises(TrainingError, match="Resume with the model and optimizer that it was saved with"):
        run(longer)
    assert kept_files == [(tmp_path / name).read_text() for name in ("plan.json", "config.yaml")]
    shutil.rmtree(tmp_path / "checkpoints" / "tables-6")
    with pytest.raises(TrainingError, match="the checkpoint of step 6 has its rows in tables-6, which is missing"):
        run(config_of(tmp_path, 8, train={"resume": True}, execution={"mode": "sync"}))


def test_layers_at_the_host_make_no_difference_and_come_back_to_the_devices(tmp_path):
    """Those of the numbers and the products of all pairs: 10 numbers an example are sent in place of 3 rows of 4."""
    bottom = [f"bottom.layers.{number}.{name}" for number in (0, 1) for name in ("bias", "kernel")]
    plan = {"mesh": {"data": 8}, "time_limit_s": 5}
    of = lambda name, steps, layers, **more: config_of(
        tmp_path / name,
        steps,
        optimizer={**ADAGRAD, "clip_norm": None},
        plan=plan,
        execution={"mode": "sync", "num_workers": 2, "host_layers": layers},
        train={"eval_every": 2, "checkpoint_every": 2, **more},
    )
    run(of("without", 4, None))
    _, text = run(of("with", 2, bottom))
    assert "at the host: 1.28 kB in place of 1.54 kB of rows of" in text
    resumed, _ = run(of("with", 4, None, resume=True))
    assert resumed.step == 4
    for kind in ("train", "eval"):
        own, expected = told(tmp_path / "with", kind), told(tmp_path / "without", kind)
        assert list(own) == list(expected)
        for step in own:
            assert own[step]["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5)
    with pytest.raises(ConfigError, match="its optimizer adds up rows of all tables at .*without clipping"):
        run(config_of(tmp_path / "clipped", execution={"mode": "sync", "host_layers": bottom}))


def test_rows_are_never_staler_than_the_bound(on_devices, tmp_path):
    execution = {"mode": "async", "max_staleness": 1, "num_workers": 2}
    result, _ = run(config_of(tmp_path, execution=execution))
    assert max(line["staleness"] for line in told(tmp_path).values()) <= 1
    assert result.loss == pytest.approx(told(on_devices)[6]["loss"], rel=0.2)


def test_small_tables_stay_on_devices_where_the_cluster_decides(on_devices, tmp_path):
    plan = {"cluster": str(CLUSTERS / "h100x8_cpu.yaml"), "mesh": {"data": 8}}
    result, text = run(config_of(tmp_path, 2, execution={"mode": "auto"}, plan=plan, train={"eval_every": None}))
    assert "All tables are better on the devices" in text
    assert result.loss == pytest.approx(told(on_devices)[2]["loss"], rel=1e-4)


def test_the_step_over_rows_is_planned_where_tables_are_too_large(tmp_path):
    overrides = {"table_rows": [1_000_000_000, 30, 8], "embed_dim": 128, "bottom_dims": [128]}
    big = config_of(
        tmp_path,
        execution={"mode": "auto"},
        plan={"cluster": str(CLUSTERS / "h100x8_cpu.yaml"), "mesh": {"data": 8}, "time_limit_s": 5},
        model={"name": "dlrm", "overrides": overrides},
    )
    text: list[str] = []
    plan = make_plan(big, train_functions(big), tell=text.append)
    (rows,) = [a.shape for a in plan.arguments if a.name == "state.params.tables.0.embedding"]
    assert rows == (32, 128) and "in host memory" in text[0]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"optimizer": {"name": "adamw"}, "execution": {"mode": "sync"}}, "lazy"),
        ({"execution": {"mode": "auto"}}, "no plan.cluster"),
        ({"execution": {"mode": "sync", "tables": ["tables.9.embedding"]}}, "tables.9.embedding"),
        ({"execution": {"mode": "sync"}, "stragglers": {"mode": "migrate"}}, "stragglers.mode"),
        ({"execution": {"mode": "sync"}, "plan": {"stages": {}}}, "plan.stages"),
        ({"execution": {"mode": "sync"}, "plan": {"pipelines": "search"}}, "plan.pipelines"),
    ],
)
def test_what_does_not_fit_is_refused(settings, what, tmp_path):
    with pytest.raises(AutoshardError, match=what):
        run(config_of(tmp_path, **settings))
