"""Batches: what each kind of example is made of, and what is held out."""

import pathlib

import numpy as np
import pytest

from autoshard.errors import ConfigError
from autoshard.train.data.clicks import click_batch
from autoshard.train.data.graphs import graph_batch
from autoshard.train.data.images import digits, enlarged, image_batches
from autoshard.train.data.language import corrupted_length, corrupted_spans, masked_pairs, next_token
from autoshard.train.data.text import part_of, python_sources, text_files

CORPUS = (np.arange(1000) % 251).astype(np.uint8)
"""Each byte tells the next."""


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def are_consecutive(tokens: np.ndarray) -> np.ndarray:
    return (np.diff(tokens, axis=-1) % 251 == 1).all(axis=-1)


# ---- text


def test_next_tokens_are_windows_and_all_of_them_are_drawn():
    batch = next_token(CORPUS, rng(), 4, 10)
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert are_consecutive(np.concatenate([batch["inputs"], batch["targets"][:, -1:]], axis=1)).all()
    firsts = next_token(np.arange(12, dtype=np.uint8), rng(), 100, 9)["inputs"][:, 0]
    assert set(firsts.tolist()) == {0, 1, 2}


def test_masked_pairs():
    batch, mask = masked_pairs(CORPUS, rng(), 400, 33, vocab_size=260), 259
    targets, is_masked, follows = batch["targets"], batch["is_masked"], batch["follows"]
    assert (targets[:, [0, 16, 32]] == [258, 257, 257]).all() and not is_masked[:, [0, 16, 32]].any()
    first, second = targets[:, 1:16], targets[:, 17:32]
    assert are_consecutive(first).all() and are_consecutive(second).all()
    joined = are_consecutive(np.concatenate([first, second], axis=1))
    assert joined[follows == 1].all() and joined[follows == 0].mean() < 0.05  # one random piece in 251 follows
    assert 0.4 < follows.mean() < 0.6
    assert (batch["segments"] == (np.arange(33) >= 17)).all()
    changed = batch["inputs"] != targets
    assert not changed[~is_masked].any()
    assert 0.13 < is_masked[:, 1:16].mean() < 0.17
    assert 0.77 < (batch["inputs"][is_masked] == mask).mean() < 0.83
    assert 0.87 < changed[is_masked].mean() < 0.93  # a tenth stays as it is


@pytest.mark.parametrize(("input_length", "target_length"), [(64, 32), (512, 512), (40, 5), (2, 3)])
def test_corrupted_spans_put_back_give_the_text(input_length, target_length):
    batch = corrupted_spans(CORPUS, rng(), 8, input_length, target_length, vocab_size=400)
    length = corrupted_length(input_length, target_length)
    for row in range(8):
        inputs = batch["inputs"][row][batch["is_input"][row]]
        targets = batch["targets"][row][batch["is_target"][row]]
        np.testing.assert_array_equal(batch["shifted_targets"][row, 1:], batch["targets"][row, :-1])
        assert batch["shifted_targets"][row, 0] == 0
        starts = np.flatnonzero(targets >= 256)
        assert targets[starts].tolist() == list(range(399, 399 - len(starts), -1)) and starts[-1] == len(targets) - 1
        spans = {targets[a]: targets[a + 1 : b] for a, b in zip(starts[:-1], starts[1:], strict=True)}
        assert set(spans) == set(inputs[inputs >= 256].tolist())
        whole = np.concatenate([spans.get(token, [token]) for token in inputs])
        assert len(whole) == length and are_consecutive(whole)


def test_corrupted_text_is_as_long_as_fits():
    """0.15 * 568 = 85 tokens in 28 spans leave 568 - 85 + 28 = 511; one more token would make 512 or more."""
    assert corrupted_length(511, 114) == 568 and corrupted_length(512, 512) == 569
    with pytest.raises(ConfigError, match="sequence_length"):
        corrupted_length(64, 2)


def test_parts_are_disjoint_and_each_long_enough():
    corpus = np.arange(100, dtype=np.uint8)
    train, held_out = (part_of(corpus, part, 0.05, 20) for part in ("train", "eval"))
    assert train.tolist() == list(range(80)) and held_out.tolist() == list(range(80, 100))
    assert part_of(corpus, "eval", 0.25, 20).size == 25 and part_of(corpus, "train", 0.99, 20).size == 20
    with pytest.raises(ConfigError, match="it holds 100"):
        part_of(corpus, "train", 0.05, 51)


def test_text_of_a_file_and_of_a_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_bytes(b"two")
    (tmp_path / "a.txt").write_bytes(b"one")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "sub" / "c").write_bytes(b"\xff\x00")
    assert text_files(str(tmp_path / "b.txt")).tobytes() == b"two"
    assert text_files(str(tmp_path)).tobytes() == b"onetwo\xff\x00"


def test_unusable_data_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="holds none"):
        text_files(str(tmp_path))
    with pytest.raises(ConfigError, match=r"none cannot be read: No such file"):
        text_files(str(tmp_path / "none"))
    (tmp_path / "good").write_bytes(b"x")
    (tmp_path / "bad").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"bad cannot be read"):
        text_files(str(tmp_path))
    if pathlib.Path("/dev/null").exists():
        with pytest.raises(ConfigError, match="neither"):
            text_files("/dev/null")


def test_python_sources_are_python():
    text = python_sources().tobytes()
    assert len(text) > 1e6 and b"def " in text


# ---- images


def test_digits_are_each_seen_once_an_epoch_and_held_out_ones_never():
    data = digits()
    settings = {"batch_size": 100, "seed": 3, "eval_fraction": 0.11, "image_size": 8, "num_channels": 1}
    train, held_out = (image_batches(data, part, is_labelled=True, **settings) for part in ("train", "eval"))
    seen = lambda batches, steps: [x.tobytes() for step in steps for x in batches[step]["images"]]
    assert len(data.labels) == 1797  # 198 are held out, 1,599 are not
    all_images = sorted(x.tobytes() for x in enlarged(data.images, 8, 1))
    assert sorted(seen(train, range(16))[:1599] + seen(held_out, range(2))[:198]) == all_images
    assert sorted(seen(train, range(32))[1599:3198]) == sorted(seen(train, range(16))[:1599])
    assert seen(train, range(16)) != seen(train, range(16, 32))
    assert set(train[0]["labels"].tolist()) == set(range(10))


def test_digits_are_enlarged_and_framed():
    image = np.zeros((1, 8, 8), np.float32)
    image[0, 0, 0], image[0, 7, 7] = 16, 8
    large = enlarged(image, 19, 3)
    expected = np.full((19, 19), -1.0)
    expected[1:3, 1:3], expected[15:17, 15:17] = 1, 0
    np.testing.assert_array_equal(large, np.broadcast_to(expected[..., None], (1, 19, 19, 3)))


# ---- clicks and graphs


def test_clicks_follow_numbers_and_categories():
    batch = click_batch(rng(1), 20_000, 2, (1000, 3))
    clicks, categories = batch["clicks"], batch["categories"]
    assert set(np.unique(clicks)) == {0, 1}
    assert ((categories >= 0) & (categories < [1000, 3])).all()
    weights = np.random.default_rng(0).standard_normal(2)
    upper = batch["numbers"] @ weights > 0
    assert clicks[upper].mean() > clicks[~upper].mean() + 0.1
    # Category n has probability log((n + 2) / (n + 1)) / log(rows + 1): a half, 0.29 and 0.21 of three.
    shares = np.bincount(categories[:, 1]) / 20_000
    np.testing.assert_allclose(shares, np.log2([2, 1.5, 4 / 3]) / 2, atol=0.02)
    rates = [clicks[categories[:, 1] == n].mean() for n in range(3)]
    assert max(rates) > min(rates) + 0.1


def test_targets_of_graphs_come_from_the_edges_that_arrive():
    sizes = {"num_nodes": 6, "num_edges": 20, "node_features": 3, "edge_features": 2, "num_targets": 4}
    batch = graph_batch(rng(1), 5, **sizes)
    senders, receivers = batch["senders"], batch["receivers"]
    graph = np.repeat(np.arange(5), 20)
    assert (senders // 6 == graph).all() and (receivers // 6 == graph).all()
    rule = np.random.default_rng(0)
    a, b, d, c = (rule.standard_normal((m, n)) / np.sqrt(m) for m, n in ((3, 8), (2, 8), (8, 4), (3, 4)))
    expected = batch["nodes"] @ c
    for sender, receiver, edge in zip(senders, receivers, batch["edges"], strict=True):
        expected[receiver] += np.tanh(batch["nodes"][sender] @ a + edge @ b) / np.sqrt(20 / 6) @ d
    np.testing.assert_allclose(batch["targets"], expected, rtol=1e-4, atol=1e-5)
