"""Batches: a function of (seed, step), windows of the corpus, targets one byte later."""

import numpy as np
import pytest

from autoshard.errors import ConfigError
from autoshard.train.data import batches, python_sources, text_files

CORPUS = (np.arange(1000) % 251).astype(np.uint8)


def batch(step: int, seed: int = 0) -> dict[str, np.ndarray]:
    return batches(CORPUS, batch_size=4, sequence_length=10, seed=seed)[step]


def test_shapes_types_and_shift():
    got = batch(0)
    assert got["inputs"].shape == got["targets"].shape == (4, 10)
    assert got["inputs"].dtype == got["targets"].dtype == np.int32
    np.testing.assert_array_equal(got["inputs"][:, 1:], got["targets"][:, :-1])


def test_rows_are_windows_of_the_corpus():
    steps = np.diff(np.concatenate([batch(3)["inputs"], batch(3)["targets"][:, -1:]], axis=1)) % 251
    assert (steps == 1).all()


def test_a_batch_depends_on_seed_and_step_alone():
    np.testing.assert_array_equal(batch(5)["inputs"], batch(5)["inputs"])
    assert (batch(5)["inputs"] != batch(6)["inputs"]).any()
    assert (batch(5, seed=0)["inputs"] != batch(5, seed=1)["inputs"]).any()


def test_every_window_can_be_drawn_and_the_shortest_corpus_has_one():
    first_bytes = {
        int(x)
        for step in range(60)
        for x in batches(np.arange(12, dtype=np.uint8), batch_size=4, sequence_length=9, seed=0)[step]["inputs"][:, 0]
    }
    assert first_bytes == {0, 1, 2}
    only = batches(np.arange(3, dtype=np.uint8), batch_size=1, sequence_length=2, seed=0)[0]
    np.testing.assert_array_equal(only["targets"], [[1, 2]])
    with pytest.raises(ConfigError, match="sequence_length"):
        batches(np.arange(2, dtype=np.uint8), batch_size=1, sequence_length=2, seed=0)


def test_text_of_a_file_and_of_a_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"two")
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "sub" / "c").write_bytes(b"\xff")
    assert text_files(str(tmp_path / "b.txt")).tobytes() == b"two"
    assert text_files(str(tmp_path)).tobytes() == b"onetwo\xff"


def test_missing_or_empty_data_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="Check the path"):
        text_files(str(tmp_path))
    with pytest.raises(ConfigError, match="Check the path"):
        text_files(str(tmp_path / "none"))


def test_python_sources_are_python():
    text = python_sources().tobytes()
    assert len(text) > 1e6 and b"def " in text
