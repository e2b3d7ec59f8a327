"""Training configurations: what is accepted, and what an error tells."""

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import ConfigError, FileFormatError
from autoshard.train.config import TrainConfig, load_config


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> pathlib.Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def test_an_empty_file_means_the_defaults(written):
    assert load_config(written("")) == TrainConfig()


def test_overrides_replace_and_add_entries(written):
    config = load_config(
        written("train: {steps: 5, seed: 3}\nmodel: {overrides: {num_layers: 1}}"),
        ["train.steps=7", "optimizer.learning_rate=1e-3", "plan.mesh={data: 4, tensor: 2}", "devices=8"]
        + ["model.overrides.dtype=bfloat16", "optimizer.clip_norm=null"],
    )
    assert (config.train.steps, config.train.seed) == (7, 3)
    assert config.optimizer.learning_rate == 1e-3 and config.optimizer.clip_norm is None
    assert list(config.plan.mesh.items()) == [("data", 4), ("tensor", 2)]
    assert config.model.overrides == {"num_layers": 1, "dtype": "bfloat16"}
    assert config.devices == 8


def test_a_preset_may_look_like_a_number(written):
    assert load_config(written("model: {name: unet}"), ["model.preset=64"]).model.preset == "64"


def test_an_override_is_read_as_the_file_is(written):
    """By YAML 1.2: `010` is ten, and a date is text, as a name of a folder may be."""
    items = ["data.seed=010", "train.output_dir=2026-11-30", "train.steps=1e3"]
    config = load_config(written(""), items)
    assert (config.data.seed, config.train.output_dir, config.train.steps) == (10, "2026-11-30", 1000)
    assert config == load_config(written("data: {seed: 010}\ntrain: {output_dir: 2026-11-30, steps: 1e3}"))


@pytest.mark.parametrize("value", [".inf", ".nan", "&a 1", "!!python/object:os.x", "[1"])
def test_an_override_may_hold_what_a_file_may_hold(written, value):
    with pytest.raises(ConfigError, match="override 'optimizer.learning_rate="):
        load_config(written(""), [f"optimizer.learning_rate={value}"])


def test_a_later_override_wins(written):
    assert load_config(written(""), ["train.steps=1", "train.steps=2"]).train.steps == 2


def test_paths_in_the_file_are_relative_to_it_and_overridden_ones_are_not(written, tmp_path):
    path = written("plan: {cluster: a.yaml}\ndata: {path: /b}")
    config = load_config(path)
    assert config.plan.cluster == str(tmp_path / "a.yaml") and config.data.path == "/b"
    assert load_config(path, ["plan.cluster=c.yaml"]).plan.cluster == str(pathlib.Path("c.yaml").absolute())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("optimizer: {learning_rat: 1}", ["optimizer.learning_rat", "1", "`learning_rate`"]),
        ("trian: {steps: 1}", ["trian", "steps", "`train`"]),
        ("train: {steps: 0}", ["train.steps", "greater than 0", "received 0"]),
        ("train: {steps: 1.5}", ["train.steps", "received 1.5"]),
        ("train: {steps: true}", ["train.steps", "should be a number", "received True"]),
        ("optimizer: {clip_norm: false}", ["optimizer.clip_norm", "should be a number", "received False"]),
        ("plan: {mesh: true}", ["plan.mesh", "received True"]),
        ("train: 3", ["train", "received 3"]),
        ("optimizer: {schedule: step}", ["optimizer.schedule", "'cosine'", "'step'"]),
        ("plan: {mesh: {data: 0}}", ["plan.mesh.data", "received 0"]),
        ("model: {overrides: {num_layers: [a]}}", ["model.overrides.num_layers"]),
        ("plan: {annotations: [{replicat: 2}]}", ["plan.annotations.0.replicat: no such key", "`replicate`"]),
        ("plan: {annotations: [{}]}", ["plan.annotations.0: an annotation is either `replicate`, or `split`"]),
        ("plan: {micro_batches: some}", ["plan.micro_batches: must be a whole number, or 'as_written' or 'search';"]),
        ("plan: {stages: 2}", ["plan.stages: must be a mapping of names to values; received 2"]),
        ("execution: {worker_cpus: []}", ["execution.worker_cpus: must be a list that is not empty"]),
        ("stragglers: {emulate: {1: 0.5}}", ["stragglers.emulate.1", "greater than or equal to 1"]),
    ],
)
def test_errors_name_file_key_value_and_next_step(written, text, told):
    path = written(text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    for part in [str(path), *told]:
        assert part in str(error.value)


def test_every_fault_is_listed(written):
    with pytest.raises(ConfigError) as error:
        load_config(written("train: {steps: -1}\ndata: {batchsize: 4}"))
    assert "train.steps" in str(error.value) and "`batch_size`" in str(error.value)


@pytest.mark.parametrize("item", ["train.steps", "=3", "train.=3", "train.steps=[1", "train.steps.more=1"])
def test_malformed_overrides_are_refused(written, item):
    with pytest.raises(ConfigError, match="[Oo]verride"):
        load_config(written("train: {steps: 2}"), [item])


def test_what_is_not_a_mapping_is_refused(written):
    with pytest.raises(ConfigError, match="mapping of sections"):
        load_config(written("[1, 2]"))


def test_a_missing_file_is_a_file_error(tmp_path):
    with pytest.raises(FileFormatError):
        load_config(tmp_path / "none.yaml")


KEYS = st.sampled_from(["train", "steps", "plan", "mesh", "model", "overrides", "devices", "x", "", "a b"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4), st.lists(KEYS, min_size=1, max_size=3), st.text(max_size=8))
def test_any_input_is_either_valid_or_refused_with_an_autoshard_error(tmp_path_factory, data, key, value):
    import json

    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(json.dumps(data))
    try:
        config = load_config(path, [f"{'.'.join(key)}={value}"])
    except (ConfigError, FileFormatError):
        return
    assert isinstance(config, TrainConfig)
