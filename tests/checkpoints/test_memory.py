"""The memory tier: states come back from files in memory, in any sharding, unless something in them is damaged."""

import errno
import os
import pathlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autoshard.checkpoints import slots, staging
from autoshard.checkpoints.checkpoints import Checkpoints
from autoshard.checkpoints.exchange import Peer, Server, new_key
from autoshard.checkpoints.memory import MemoryTier
from autoshard.checkpoints.slots import Layout
from autoshard.errors import FileFormatError, FolderError, TransferError
from autoshard.launch.messages import Committed, NotSaved, Tier
from autoshard.transfer.routes import Box

SPLIT, WHOLE = PartitionSpec("data", "tensor"), PartitionSpec()


def state_of(offset: float, spec: PartitionSpec = SPLIT) -> dict:
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    place = lambda x, s: jax.device_put(x, NamedSharding(mesh, s))
    return {
        "w": place(jnp.arange(64.0).reshape(8, 8) + offset, spec),
        "half": place(jnp.full((3, 5), offset, jnp.bfloat16), WHOLE),
        "step": place(jnp.int32(offset), WHOLE),
        "empty": place(jnp.zeros((0, 2)), WHOLE),
        "rng": place(jax.random.key(int(offset)), WHOLE),
    }


def numbers(state: dict) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state | {"rng": jax.random.key_data(state["rng"])})]


def assert_same(found: dict, expected: dict) -> None:
    for ours, theirs in zip(numbers(found), numbers(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def commit(folder: pathlib.Path, steps: range, told: list | None = None, run: str = "run") -> None:
    tier = MemoryTier(folder, "here", run, (told if told is not None else []).append)
    for step in steps:
        tier.commit(step, state_of(step))
    tier.wait()
    tier.close()


def restore(folder: pathlib.Path, like: dict, run: str = "run", at_least: int = 0):
    tier = MemoryTier(folder, "here", run, [].append)
    try:
        return tier.restore(like, at_least)
    finally:
        tier.close()


def files(folder: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    return sorted(folder.glob(f"*/*/{pattern}"))


@pytest.mark.parametrize("spec", [SPLIT, WHOLE, PartitionSpec(None, ("data", "tensor"))])
def test_the_newest_state_comes_back_in_the_sharding_asked_for(tmp_path, spec):
    told: list = []
    commit(tmp_path, range(1, 6), told)
    assert told == [Committed(step=step, tier=Tier.MEMORY) for step in range(1, 6)]
    wanted = state_of(0, spec)
    step, found = restore(tmp_path, wanted)
    assert step == 5
    assert_same(found, state_of(5))
    assert found["w"].sharding == wanted["w"].sharding and found["rng"].dtype == wanted["rng"].dtype
    assert len(files(tmp_path, "slot-*.bin")) == 1  # the others' memory is free again


def test_a_damaged_state_is_passed_over_for_the_one_before(tmp_path):
    commit(tmp_path, range(1, 5))
    newest = files(tmp_path, "step-4.json")[0]
    number = int(newest.read_text().partition('"slot": ')[2][0])
    path = newest.parent / f"slot-{number}.bin"
    content = bytearray(path.read_bytes())
    content[70] ^= 1
    path.write_bytes(content)
    step, found = restore(tmp_path, state_of(0))
    assert step == 3
    assert_same(found, state_of(3))


def test_states_in_other_shardings_do_not_take_the_place_of_what_is_safe(tmp_path):
    """The first state of a run is placed, and those that follow are as a compiled step leaves them."""
    told: list = []
    tier = MemoryTier(tmp_path, "here", "run", told.append)
    steps_there = lambda: sorted(int(path.stem.removeprefix("step-")) for path in files(tmp_path, "step-*.json"))
    tier.commit(1, state_of(1))
    tier.commit(2, state_of(2, PartitionSpec("data")))  # really another: what is safe stays beside it
    tier.wait()
    assert steps_there() == [1, 2]
    for step in (3, 4):
        tier.commit(step, state_of(step, PartitionSpec(("data",), None)))  # the same, written otherwise
        tier.wait()
    assert steps_there() == [2, 3, 4] and len(files(tmp_path, "layout.json")) == 1
    assert told == [Committed(step=step, tier=Tier.MEMORY) for step in range(1, 5)]
    tier.close()
    step, found = restore(tmp_path, state_of(0))
    assert step == 4
    assert_same(found, state_of(4))


def test_a_state_that_cannot_be_kept_leaves_those_before_it(tmp_path, monkeypatch):
    told: list = []
    tier = MemoryTier(tmp_path, "here", "run", told.append)
    for step in (1, 2):
        tier.commit(step, state_of(step))
    tier.wait()

    def full(path: pathlib.Path, content: object) -> None:
        raise FileFormatError(f"{path}: no space is left")

    monkeypatch.setattr(slots, "write_sealed", full)
    for step in (3, 4):
        tier.commit(step, state_of(step))
        tier.wait()
    tier.close()
    (unsaved,) = told[2:]  # one warning, not one for each step
    assert unsaved.step == 3 and "no space is left" in unsaved.why
    step, found = restore(tmp_path, state_of(0))
    assert step == 2
    assert_same(found, state_of(2))


@pytest.mark.parametrize("pattern", ["layout.json", "step-*.json", "slot-*.bin"])
def test_what_is_cut_short_is_no_state(tmp_path, pattern):
    commit(tmp_path, range(1, 3))
    for path in files(tmp_path, pattern):
        path.write_bytes(path.read_bytes()[:-1])
    assert restore(tmp_path, state_of(0)) is None
    assert list(tmp_path.glob("*/*")) == []


def test_other_runs_other_states_and_older_ones_are_not_taken(tmp_path):
    commit(tmp_path, range(1, 3))
    assert restore(tmp_path, state_of(0), run="another") is None
    tier = MemoryTier(tmp_path, "here", "run", [].append)
    assert tier.latest_step() == 2
    tier.close()
    assert restore(tmp_path, {"w": state_of(0)["w"]}) is None
    commit(tmp_path, range(1, 3))
    assert restore(tmp_path, state_of(0), at_least=3) is None


def test_a_new_session_frees_what_the_last_one_left_once_it_has_states_of_its_own(tmp_path):
    commit(tmp_path, range(1, 3))
    tier = MemoryTier(tmp_path, "here", "run", [].append)
    assert tier.restore(state_of(0))[0] == 2
    for step, folders in [(3, 2), (4, 2), (5, 1)]:
        tier.commit(step, state_of(step))
        tier.wait()
        assert len(list(tmp_path.glob("*/*"))) == folders
    tier.close()
    assert restore(tmp_path, state_of(0))[0] == 5


@pytest.mark.parametrize(("is_distant", "has_room"), [(False, False), (True, True), (True, False)])
def test_a_state_may_be_donated_as_soon_as_it_is_committed(tmp_path, monkeypatch, is_distant, has_room):
    """On CPUs, and the ways of accelerators: from a copy on the device, or waiting for the copy to the host."""
    monkeypatch.setattr(staging, "_is_distant", lambda shard: is_distant)
    monkeypatch.setattr(staging, "_has_room", lambda shards: has_room)
    overwritten = jax.jit(lambda s: s | {"w": -s["w"]}, donate_argnums=0)
    tier = MemoryTier(tmp_path, "here", "run", [].append)
    state, expected = state_of(7), state_of(7)
    tier.commit(7, state)
    jax.block_until_ready(overwritten(state))
    assert state["w"].is_deleted()
    tier.wait()
    tier.close()
    assert_same(restore(tmp_path, expected)[1], expected)


@pytest.mark.parametrize("is_distant", [False, True])
def test_nothing_is_given_up_for_a_state_that_is_not_computed_yet(tmp_path, monkeypatch, is_distant):
    """It waits for the other processes, which may be two steps behind: one of them may have none of the two newest."""
    monkeypatch.setattr(staging, "_is_distant", lambda shard: is_distant)
    monkeypatch.setattr(staging, "_has_room", lambda shards: True)
    tier = MemoryTier(tmp_path, "here", "run", [].append)
    for step in range(1, 4):
        tier.commit(step, {"w": jnp.ones((256, 256))})
        tier.wait()
    slow = jax.jit(lambda w: jax.lax.fori_loop(0, 600, lambda _, w: jnp.tanh(w @ w), w))
    jax.block_until_ready(slow(jnp.ones((256, 256))))  # compiled
    state, seen = {"w": slow(jnp.ones((256, 256)))}, []

    def look():
        while True:
            found = [path.name for path in files(tmp_path, "step-*.json")]
            if state["w"].is_ready():
                return
            seen.append(found)

    watching = threading.Thread(target=look)
    watching.start()
    tier.commit(4, state)
    tier.wait()
    tier.close()
    watching.join()
    assert seen and all(found == ["step-1.json", "step-2.json", "step-3.json"] for found in seen)
    assert [path.name for path in files(tmp_path, "step-*.json")] == ["step-2.json", "step-3.json", "step-4.json"]


def test_folders_that_others_may_write_to_are_refused(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(FolderError, match="chmod 700"):
        MemoryTier(folder, "here", "run", [].append)


def test_a_folder_that_vanishes_costs_a_warning_and_the_next_step_is_kept_again(tmp_path):
    told: list = []
    tier = MemoryTier(tmp_path, "here", "run", told.append)
    tier.commit(1, state_of(1))
    tier.wait()
    (run,) = tmp_path.iterdir()
    (session,) = run.iterdir()
    for path in session.iterdir():
        path.unlink()
    session.rmdir()
    tier.commit(2, state_of(2))
    tier.commit(3, state_of(3))
    tier.wait()
    tier.close()
    assert [type(message) for message in told] == [Committed, NotSaved, Committed]
    assert restore(tmp_path, state_of(0))[0] == 3


def saveable(offset: float) -> dict:
    """Without what Orbax refuses."""
    return {name: leaf for name, leaf in state_of(offset).items() if name != "empty"}


def test_the_newest_of_both_tiers_is_taken(tmp_path):
    def opened():
        return Checkpoints(tmp_path / "disk", 2, memory=MemoryTier(tmp_path / "memory", "here", "run", [].append))

    with opened() as checkpoints:
        assert checkpoints.restore(saveable(0)) is None and checkpoints.latest_step() is None
        checkpoints.save(1, saveable(1), {})
        checkpoints.commit(2, saveable(2))
        checkpoints.wait()
        assert [checkpoints.latest_step(tier) for tier in (None, Tier.DISK, Tier.MEMORY)] == [2, 1, 2]
    with opened() as checkpoints:
        restored = checkpoints.restore(saveable(0))
        assert (restored.step, restored.source) == (2, Tier.MEMORY)
        assert_same(restored.state, saveable(2))
        checkpoints.save(3, saveable(3), {})
    with opened() as checkpoints:
        restored = checkpoints.restore(saveable(0))
        assert (restored.step, restored.source) == (3, Tier.DISK)
        assert_same(restored.state, saveable(3))


def test_memory_that_is_full_costs_one_warning_and_nothing_else(tmp_path, monkeypatch):
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    told: list = []
    commit(tmp_path, range(1, 6), told)
    (warning,) = told
    assert isinstance(warning, NotSaved) and warning.step == 1 and "No space left" in warning.why
    assert list(tmp_path.glob("*/*")) == []
    monkeypatch.undo()
    assert restore(tmp_path, state_of(0)) is None


def test_the_two_ends_of_a_connection_prove_that_they_know_the_key(tmp_path):
    server = Server("127.0.0.1", new_key(), tmp_path)
    with pytest.raises(TransferError, match="cannot be used"):
        Peer(server.address, new_key())
    server.close()


def test_a_server_gives_out_nothing_but_pieces(tmp_path):
    key = new_key()
    server = Server("127.0.0.1", key, tmp_path / "inside")
    (tmp_path / "secret").write_text("layout")
    peer = Peer(server.address, key)
    for name in ("../secret", "/etc", "0123456789abcdef-1"):
        with pytest.raises(TransferError, match="refused"):
            peer.fetch(name, 1, 0, Box((), ()))
    with pytest.raises(TransferError, match="no folder for a copy"):
        peer.keep("../0123456789abcdef-1-copy", Layout(session="0" * 16, started_s=0, leaves=(), pieces=(), num_sole=0))
    peer.close()
    server.close()
