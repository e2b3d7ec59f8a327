"""What each process reads of a batch, and what a run has read in the end, whatever ended its processes on the way."""

import contextlib

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autoshard.train.config import TrainConfig
from autoshard.train.data import Batches
from autoshard.train.data.images import digits, enlarged, image_batches
from autoshard.train.data.language import next_token
from autoshard.train.feed import BatchReader, examples_of, feed, shard_at
from autoshard.train.registry import load_data

SIZE = 16


def sharding_of(*axes: str | tuple[str, ...] | None) -> NamedSharding:
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, PartitionSpec(*axes))


# ---- which examples a process needs


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("data",), range(4)),
        ((("data", "tensor"),), range(4)),
        ((("tensor", "data"),), (0, 1, 8, 9)),
        ((None, "data"), range(16)),
        ((), range(16)),
    ],
)
def test_a_process_reads_the_examples_of_its_own_devices(axes, expected):
    """The first two devices are (data 0, tensor 0) and (data 0, tensor 1); the batch has 16 examples of 3 rows."""
    shape = (3 * SIZE, 4)
    index_of = sharding_of(*axes).devices_indices_map(shape)
    own = [index_of[device] for device in jax.devices()[:2]]
    assert examples_of(SIZE, [(shape[0], index) for index in own]).tolist() == list(expected)


def test_a_shard_that_ends_within_an_example_needs_all_of_it():
    shards = [(12, (slice(2, 4),)), (4, (slice(3, 4),))]  # rows 2 and 3 of 12 are of examples 0 and 1 of 4
    assert examples_of(4, shards).tolist() == [0, 1, 3]


@given(
    st.sets(st.integers(0, 7), min_size=1),
    st.sampled_from([("data",), (("tensor", "data"),), ("tensor", "data"), (None, "tensor"), ()]),
    st.sampled_from([1, 2, 3]),
)
@settings(max_examples=50, deadline=None)
def test_shards_of_a_process_come_from_its_own_examples(devices, axes, rows):
    """A process with any of the devices makes their shards of what it has read, as the whole batch has them."""
    whole = np.random.default_rng(0).random((rows * SIZE, 4))
    index_of = sharding_of(*axes).devices_indices_map(whole.shape)
    own = [index_of[jax.devices()[n]] for n in devices]
    examples = examples_of(SIZE, [(len(whole), index) for index in own])
    read = whole.reshape(SIZE, rows, 4)[examples].reshape(-1, 4)
    for index in own:
        np.testing.assert_array_equal(shard_at(index, read, len(whole), SIZE, examples), whole[index])


def test_a_batch_on_the_devices_is_the_whole_one_however_its_arrays_lie():
    config = TrainConfig.model_validate({"model": {"name": "graph_network"}, "data": {"batch_size": SIZE}})
    batches = load_data(config).batches
    layouts = [("data",), ("tensor", None), (("data", "tensor"),), (), (("tensor", "data"),)]
    shardings = {name: sharding_of(*axes) for name, axes in zip(batches.shapes(), layouts, strict=True)}
    placed, whole = BatchReader(batches, shardings).batch(3), batches[3]
    for name, array in placed.items():
        assert array.sharding == shardings[name]
        np.testing.assert_array_equal(array, whole[name])


class Watched(np.ndarray):
    """An array that counts what is read from it."""

    num_read = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        Watched.num_read += np.size(found)
        return np.asarray(found)


def test_a_text_is_read_only_where_its_own_examples_lie():
    corpus = np.arange(1000).astype(np.uint8).view(Watched)
    Watched.num_read = 0
    batch = next_token(corpus, np.random.default_rng(0), SIZE, 8, np.array([3, 7, 8]))
    assert batch["inputs"].shape == (3, 8) and Watched.num_read == 3 * 9


# ---- what is read in the end

PASS_IMAGES, CHECKPOINT_EVERY, STEPS = 1204, 3, 45
"""Images to train on; steps between two checkpoints; steps of a run, which sees each image twice at 60 a step."""


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 15)), max_size=6))
@settings(max_examples=8, deadline=None)
def test_no_example_is_skipped_or_read_twice_in_what_is_committed(generations):
    """Generations of some number of processes are lost some steps after they began; the last ends the run.

    What one read since its last checkpoint is lost with it, and read again by the next: the committed lineage are the
    steps that the next goes on from. In it each image comes once in a pass through the data, in the same order as in a
    run that nothing disturbs.
    """
    data, size = digits(), 60
    batches = image_batches(
        data, "train", batch_size=size, seed=5, eval_fraction=0.33, image_size=8, num_channels=1, is_labelled=False
    )
    lineage: list[list[bytes]] = []
    for num_processes, steps in [*generations, (2, STEPS)]:
        first = len(lineage)
        last = min(first + steps, STEPS)
        with contextlib.ExitStack() as stack:
            fed = [
                stack.enter_context(feed(part_of(batches, own), first, None))
                for own in np.array_split(np.arange(size), num_processes)
            ]
            for _ in range(first, last):
                lineage.append([image.tobytes() for own in fed for image in next(own).batch["images"]])
        saved = last if last == STEPS else last - last % CHECKPOINT_EVERY
        del lineage[max(saved, first) :]
    undisturbed = [[image.tobytes() for image in batches[step]["images"]] for step in range(STEPS)]
    assert lineage == undisturbed
    seen = [name for step in lineage for name in step]
    to_train_on = sorted(image.tobytes() for image in enlarged(data.images[-PASS_IMAGES:], 8, 1))
    assert sorted(seen[:PASS_IMAGES]) == sorted(seen[PASS_IMAGES : 2 * PASS_IMAGES]) == to_train_on


def part_of(batches: Batches, own: np.ndarray) -> Batches:
    """The batches of a process that holds some of the examples."""
    return Batches(len(own), lambda examples: batches.of(own[examples]))
