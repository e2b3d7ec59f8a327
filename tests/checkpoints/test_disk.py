"""Checkpoints on disk: whatever happens to their files, a state that is read back is one that was saved."""

import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from autoshard.checkpoints.checkpoints import Checkpoints
from autoshard.checkpoints.manifest import MANIFEST, UNCHECKED, read_manifest, write_manifest
from autoshard.checkpoints.verification import CORRUPT
from autoshard.cli import app
from autoshard.errors import ConfigError
from autoshard.launch.messages import Committed, NotSaved, Rejected, Tier

PROGRAM = pathlib.Path(__file__).with_name("saving.py")
SEED = 20261123


def state_of(step: int) -> dict:
    return {"w": jnp.arange(600.0).reshape(20, 30) + step, "bias": jnp.full(7, step, jnp.bfloat16), "step": step}


def assert_same(found: dict, expected: dict) -> None:
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def save(folder: pathlib.Path, *steps: int, keep: int = 5) -> list:
    told: list = []
    with Checkpoints(folder, keep, told.append) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_of(step), {"name": "test"})
    return told


def restore(folder: pathlib.Path) -> tuple[int, dict, list]:
    told: list = []
    with Checkpoints(folder, 5, told.append) as checkpoints:
        restored = checkpoints.restore(state_of(0))
        assert restored is not None and restored.source is Tier.DISK
    return restored.step, restored.state, told


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("two")
    assert save(folder, 1, 2) == [Committed(step=1, tier=Tier.DISK), Committed(step=2, tier=Tier.DISK)]
    return folder


def test_the_manifest_lists_every_file_and_every_shard(two):
    manifest = read_manifest(two / "2")
    there = {path.relative_to(two / "2").as_posix() for path in (two / "2").rglob("*") if path.is_file()}
    assert {entry.path for entry in manifest.files} == there - UNCHECKED and MANIFEST in there
    assert {leaf.name: (leaf.shape, leaf.dtype) for leaf in manifest.leaves} == {
        "w": ((20, 30), "float32"), "bias": ((7,), "bfloat16"), "step": ((), "int64")
    }  # fmt: skip
    assert all(leaf.shards for leaf in manifest.leaves)


def test_bit_flips_and_truncations_are_noticed_or_harmless(two, tmp_path):
    """A few of what benchmarks/corruption.py does five hundred times."""
    choose = random.Random(SEED)
    files = sorted(path.relative_to(two / "2") for path in (two / "2").rglob("*") if path.is_file())
    for number, name in enumerate([*files, *choose.choices(files, k=8)]):
        folder = tmp_path / str(number)
        shutil.copytree(two, folder)
        content = bytearray((folder / "2" / name).read_bytes())
        if number % 4 == 3:
            del content[choose.randrange(len(content)) :]
        else:
            content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        (folder / "2" / name).write_bytes(content)
        step, state, told = restore(folder)
        assert_same(state, state_of(step))
        if step == 2:  # harmless: only in what restoring does not read, or in the manifest's white space
            assert name.as_posix() in UNCHECKED and told == []
        else:
            (rejected,) = told
            assert step == 1 and rejected.file == name.as_posix()
            assert rejected.path == str(folder / f"2{CORRUPT}") and (folder / f"2{CORRUPT}").is_dir()


def test_a_lost_manifest_a_lost_file_and_a_stranger_are_noticed(two, tmp_path):
    for number, (name, content) in enumerate([(MANIFEST, None), ("run/metadata", None), ("state/more", b"")]):
        folder = tmp_path / str(number)
        shutil.copytree(two, folder)
        if content is None:
            (folder / "2" / name).unlink()
        else:
            (folder / "2" / name).write_bytes(content)
        step, state, (rejected,) = restore(folder)
        assert step == 1 and rejected.file == name
        assert_same(state, state_of(1))


def test_shards_that_orbax_reads_as_other_numbers_are_noticed(two, tmp_path):
    """As if the files were damaged before their checksums were taken: those of the shards are of the host's copies."""
    folder = tmp_path / "run"
    shutil.copytree(two, folder)
    other = read_manifest(folder / "1")
    mine = read_manifest(folder / "2")
    assert mine.leaves != other.leaves
    write_manifest(folder / "2", mine.model_copy(update={"leaves": other.leaves}))
    step, _, (rejected,) = restore(folder)
    assert step == 1 and rejected.file == "state" and "other numbers than were saved" in rejected.why


def test_checkpoints_of_earlier_versions_are_refused_and_stay(two, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(two, folder)
    (folder / "2" / MANIFEST).unlink()
    path = folder / "2" / "_CHECKPOINT_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"custom_metadata": {}}))
    with Checkpoints(folder, 5) as checkpoints, pytest.raises(ConfigError, match="earlier version"):
        checkpoints.restore(state_of(0))
    assert (folder / "2").is_dir()


def malformed(folder: pathlib.Path) -> int:
    """A checkpoint of a few hundred bytes whose description of an array asks for more memory than there is."""
    zarray = {
        "chunks": [1 << 40, 1 << 20], "compressor": None, "dimension_separator": ".", "dtype": "<f4",
        "fill_value": None, "filters": None, "order": "C", "shape": [1 << 40, 1 << 20], "zarr_format": 2,
    }  # fmt: skip
    (folder / "state" / "w").mkdir(parents=True)
    (folder / "state" / "w" / ".zarray").write_text(json.dumps(zarray))
    key = {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}
    metadata = {"tree_metadata": {"('w',)": key}, "use_ocdbt": False, "use_zarr3": False}
    (folder / "state" / "_METADATA").write_text(json.dumps(metadata))
    handler = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": {"state": handler}}))
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_malformed_checkpoint_that_would_end_the_process_is_one_rejection(two, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(two, folder)
    assert malformed(folder / "3") < 1000
    told: list = []
    with Checkpoints(folder, 5, told.append) as checkpoints, pytest.raises(ConfigError, match="earlier version"):
        checkpoints.restore(state_of(0))
    (folder / "3" / "_CHECKPOINT_METADATA").unlink()
    step, state, told = restore(folder)
    assert step == 2 and [type(message) for message in told] == [Rejected]
    assert_same(state, state_of(2))


def test_too_little_space_costs_a_warning_and_nothing_is_left(tmp_path, monkeypatch):
    told: list = []
    with Checkpoints(tmp_path, 2, told.append) as checkpoints:
        checkpoints.save(1, state_of(1), {})
        checkpoints.wait()
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
        checkpoints.save(2, state_of(2), {})
        assert checkpoints.latest_step() == 1
    assert [type(message) for message in told] == [Committed, NotSaved] and "0.0 MB free" in told[1].why
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def run_saving(folder: pathlib.Path, mode: str, *before: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*before, sys.executable, str(PROGRAM), str(folder), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_disk_that_fills_up_in_mid_write_costs_a_warning_and_no_step(tmp_path):
    """A real one: a file system of 40 MB in memory, in a name space of its own."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here without being root")
    shell = f'mount -t tmpfs -o size=40m none "{tmp_path}" && exec "$0" "$@"'
    process = run_saving(tmp_path, "full", "unshare", "-rm", "sh", "-c", shell)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    said = json.loads(output.splitlines()[-1])
    assert said["kinds"] == ["committed", "not_saved", "committed"] and "the disk is full" in said["why"]
    assert said["left"] == ["1", "filler"] and said["restored"] == 3


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_saves_leaves_what_can_be_restored_and_no_junk(tmp_path):
    choose = random.Random(SEED)
    process = run_saving(tmp_path, "for ever")
    assert process.stdout is not None
    while "saved 4" not in process.stdout.readline():
        pass
    time.sleep(choose.random() / 20)
    process.send_signal(signal.SIGKILL)
    process.wait()
    told: list = []
    like = {"w": jnp.zeros((1 << 20,), jnp.float32)}
    with Checkpoints(tmp_path, 2, told.append) as checkpoints:
        restored = checkpoints.restore(like)
    assert restored is not None and told == []
    np.testing.assert_array_equal(restored.state["w"], np.full(1 << 20, restored.step, np.float32))
    assert all(path.name.isdecimal() for path in tmp_path.iterdir())


def test_a_run_is_checked_from_the_command_line(two, tmp_path):
    shutil.copytree(two, tmp_path / "checkpoints")
    told, damaged = CliRunner(), tmp_path / "checkpoints" / "2" / "run" / "metadata"
    result = told.invoke(app, ["check", str(tmp_path)])
    assert result.exit_code == 0 and "2 of 2 checkpoints are sound" in result.output
    damaged.write_bytes(damaged.read_bytes().replace(b"test", b"tesu"))
    result = told.invoke(app, ["check", str(tmp_path), "--json", str(tmp_path / "found.json")])
    assert result.exit_code == 1 and "1 of 2 checkpoints are sound" in result.output
    first, second = json.loads((tmp_path / "found.json").read_text())
    assert first["faults"] == [] and [fault["file"] for fault in second["faults"]] == ["run/metadata"]
    damaged.parent.parent.rename(tmp_path / "checkpoints" / f"2{CORRUPT}")
    assert told.invoke(app, ["check", str(tmp_path / "checkpoints")]).exit_code == 1
    assert told.invoke(app, ["check", str(tmp_path / "checkpoints" / "1")]).exit_code == 2
