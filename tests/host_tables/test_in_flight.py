"""The different rows of batches, and which are in flight: each row's newest step that may not be written back yet."""

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.host_tables.in_flight import InFlight, Patch, Patcher
from autoshard.host_tables.sharding import Layout, RowArray

ROWS, CAPACITIES, SLOTS = (40, 7, 300), (12, 7, 30), 4


def layout_of(rows, capacities, num_workers=1):
    arrays = tuple(RowArray(f"t{t}", t, n, (2,), "float32", 4) for t, n in enumerate(rows))
    return Layout(arrays, tuple(rows), tuple(capacities), num_workers, SLOTS)


def drawn(rng, layout):
    """Keys of the ids of a batch, of each table some, no more different ones than there is room for."""
    batch = []
    for table, most in enumerate(layout.capacities):
        some = rng.integers(0, layout.num_rows[table], rng.integers(0, most + 1))
        ids = rng.choice(some, rng.integers(0, 3 * most)) if len(some) else some
        batch.append(layout.keys(table, ids))
    return batch


def newest(batches, step, since):
    """(table, position) -> (step, position there), found by looking through all steps."""
    found = {}
    for table, keys in enumerate(batches[step]):
        for to, key in enumerate(keys):
            for old in range(since, step):
                at = np.flatnonzero(batches[old][table] == key)
                if len(at):
                    found[table, to] = old, int(at[0])
    return found


@pytest.mark.parametrize("newest_first", [False, True], ids=["by key", "newest first"])
@pytest.mark.parametrize("has_marks", [True, False], ids=["marks", "sorted"])
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_different_rows_and_the_newest_steps_that_have_them(seed, num_workers, has_marks, newest_first):
    rng, layout = np.random.default_rng(seed), layout_of(ROWS, CAPACITIES, num_workers)
    in_flight, batches, since = InFlight(layout, SLOTS, has_marks, newest_first), [], 0
    for step in range(40):
        in_flight.begin(step)
        batch = []
        for table, ids in enumerate(drawn(rng, layout)):
            first, numbers = in_flight.different(table, ids)
            keys = ids[first]
            assert len(set(keys.tolist())) == len(keys)
            assert (keys[numbers] == ids).all()
            owners = layout.owners(table, keys)
            assert (np.diff(owners.astype(int)) >= 0).all()
            assert layout.spans(table, keys) == [
                (int((owners < w).sum()), int((owners <= w).sum())) for w in range(num_workers)
            ]
            batch.append(keys)
        batches.append(batch)
        since = max(since, step - SLOTS + 1, int(rng.integers(step - SLOTS, step + 1)))
        found = in_flight.found(since)
        told = {
            (table, int(to)): (int(old), int(at))
            for table, own in enumerate(found)
            for to, old, at in zip(own.to, own.steps, own.at, strict=True)
        }
        assert told == newest(batches, step, since)
        for table, keys in enumerate(batch if newest_first else []):
            for start, stop in layout.spans(table, keys):  # those in flight are the first, the newest before all others
                steps = [told[table, to][0] if (table, to) in told else -1 for to in range(start, stop)]
                assert steps == sorted(steps, reverse=True)
        patched = {}
        for patch in in_flight.patches(found):
            for table, pairs in enumerate(zip(*patch.places, strict=True)):
                for to, at in zip(*pairs, strict=True):
                    if to < CAPACITIES[table]:
                        assert (table, int(to)) not in patched
                        patched[table, int(to)] = patch.step, int(at)
        assert patched == told


def test_patches_put_rows_of_earlier_steps_in_place():
    # a batch has rows 1, 2, 3, 9 at its positions 0 to 3; 1 was the first row of step 7, 3 and 9 those of step 8
    new = {7: [jnp.array([[71.0], [73.0], [75.0], [0.0]])], 8: [jnp.array([[83.0], [89.0], [0.0], [0.0]])]}
    rows = [jnp.array([[1.0], [2.0], [3.0], [9.0]])]
    for patch in (Patch(7, np.array([[[0, 4]], [[0, 0]]])), Patch(8, np.array([[[2, 3]], [[0, 1]]]))):
        rows = Patcher([0])(rows, new[patch.step], patch)
    assert np.asarray(rows[0]).tolist() == [[71.0], [2.0], [83.0], [89.0]]


def test_sizes_of_patches_grow_and_are_few():
    rng, layout = np.random.default_rng(0), layout_of((1000,), (512,))
    in_flight, sizes = InFlight(layout, SLOTS, has_marks=True), {1: [], 2: [], 3: []}
    for step in range(200):
        in_flight.begin(step)
        in_flight.different(0, rng.choice(1000, rng.integers(100, 500), replace=False))
        for patch in in_flight.patches(in_flight.found(max(0, step - 3))):
            sizes[step - patch.step].append(patch.places.shape[2])
    for own in sizes.values():
        assert own == sorted(own)
        assert len(set(own)) < 20
