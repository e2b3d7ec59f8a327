"""Shipped configurations of the whole zoo: they load, and their data are what their models read."""

import io
import json
import pathlib

import numpy as np
import pytest
import rich.console
from autoshard_models.zoo import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.train.config import TrainConfig, load_config
from autoshard.train.registry import batch_shapes, load_data
from autoshard.train.trainer import train

CONFIGS = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_first_batches_have_the_stated_shapes(path):
    config = load_config(path, ["data.batch_size=1"])
    data, stated = load_data(config), batch_shapes(config)
    for batch in (data.batches[0], data.eval_batches[0]):
        assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
            name: (x.shape, x.dtype) for name, x in stated.items()
        }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_are_named_by_their_model_and_fit_it(path):
    config = load_config(path)
    others = ("gpt3_175b", "quickstart", "shared_batch_tiny", "stragglers_tiny")
    assert path.stem in (f"{config.model.name}_{config.model.preset}", *others)
    assert config.plan.cluster is None or pathlib.Path(config.plan.cluster).is_file()
    assert pathlib.Path(config.train.output_dir) == pathlib.Path("runs", path.stem)
    assert batch_shapes(config)


def test_every_preset_of_every_family_has_a_configuration():
    shipped = {(config.model.name, config.model.preset) for config in map(load_config, CONFIGS)}
    twins = {"gpt_linen", "vit_linen"}  # their sizes are those of the NNX models
    assert shipped == {
        (name, preset)
        for name, family in FAMILIES.items()
        for preset in family.presets
        if preset == "tiny" or name not in twins
    }


def tiny(name: str, **data_settings) -> TrainConfig:
    return TrainConfig.model_validate({"model": {"name": name}, "data": {"batch_size": 4, **data_settings}})


def is_equal(batch: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(batch[name], other[name]) for name in batch)


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.endswith("_linen")])
def test_a_batch_depends_on_seed_and_step_alone(name):
    data, again, other = load_data(tiny(name)), load_data(tiny(name)), load_data(tiny(name, seed=2**40))
    for batches, batches_again, others in (
        (data.batches, again.batches, other.batches),
        (data.eval_batches, again.eval_batches, None),
    ):
        in_order = [batches[step] for step in range(3)]
        assert all(is_equal(in_order[step], batches_again[step]) for step in (2, 0, 1))
        assert not is_equal(in_order[0], in_order[1]) and not is_equal(in_order[1], in_order[2])
        assert others is None or not is_equal(in_order[0], others[0])
    assert not is_equal(data.batches[0], data.eval_batches[0])
    assert is_equal(data.batches[10**6], again.batches[10**6])


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.endswith("_linen")])
def test_some_examples_of_a_batch_are_those_of_the_whole_batch(name):
    """Bit by bit, whichever are asked for: so each process can read its own, and together they have all of them."""
    size = 12
    data = load_data(tiny(name, batch_size=size))
    stated = batch_shapes(tiny(name, batch_size=size))
    for batches in (data.batches, data.eval_batches):
        assert {n: (x.shape, x.dtype) for n, x in batches.shapes().items()} == {
            n: (x.shape, x.dtype) for n, x in stated.items()
        }
    wholes = {(part, n): batches[n] for part, batches in enumerate((data.batches, data.eval_batches)) for n in (0, 9)}

    @given(st.sets(st.integers(0, size - 1), min_size=1).map(sorted), st.sampled_from(sorted(wholes)))
    @settings(max_examples=25, deadline=None)
    def some_are_like_the_whole(examples: list[int], which: tuple[int, int]) -> None:
        part, number = which
        found = (data.batches, data.eval_batches)[part].rows(number, np.array(examples))
        assert found.keys() == stated.keys()
        for key, whole in wholes[which].items():
            expected = whole.reshape(size, -1)[examples]
            assert found[key].dtype == whole.dtype and found[key].shape[1:] == whole.shape[1:]
            assert found[key].reshape(len(examples), -1).tobytes() == expected.tobytes()

    some_are_like_the_whole()


@pytest.mark.slow
def test_a_run_on_images_learns(tmp_path):
    path = next(path for path in CONFIGS if path.stem == "wide_resnet_tiny")
    settings = ["train.steps=10", "plan.mesh={data: 8}", "train.log_every=1", f"train.output_dir={tmp_path}"]
    train(load_config(path, settings), rich.console.Console(file=io.StringIO()))
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 10 and np.mean(losses[-4:]) < np.mean(losses[:4]) - 0.3
