"""The compilation cache of a run: whole entries or none, nobody else's, and found by every process of a generation."""

import json
import os
import pathlib
import sys

import pytest
from together import free_port, run_together

from autoshard.elastic.compile_cache import COMPILE_CACHE, CheckedCache, use_compile_cache
from autoshard.errors import FolderError

WORKER = """
import json, pathlib, sys
import jax, jax.monitoring
from autoshard.elastic.compile_cache import use_compile_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

address, rank, run_dir = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
hits, compiled = [], []
jax.monitoring.register_event_listener(
    lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None
)
jax.monitoring.register_event_duration_secs_listener(
    lambda name, _, **__: compiled.append(name) if name.endswith("/backend_compile_duration") else None
)
jax.config.update("jax_num_cpu_devices", 2)
use_compile_cache(run_dir)
jax.distributed.initialize(address, 2, rank)
split = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))
x = jax.jit(lambda: jax.numpy.arange(8.0), out_shardings=split)()
y = float(jax.jit(lambda x: (x * x).sum())(x))
pathlib.Path(sys.argv[4]).write_text(json.dumps({"hits": len(hits), "compiled": len(compiled), "result": y}))
jax.distributed.shutdown()
"""


def generation(folder: pathlib.Path) -> list[dict]:
    """What two processes of two devices report; the second of them stands for all but the first."""
    address = f"127.0.0.1:{free_port()}"
    reports = [folder.parent / f"{folder.name}-{rank}.json" for rank in range(2)]  # Gloo prints, too
    run_together(
        [[sys.executable, "-c", WORKER, address, str(rank), str(folder), str(reports[rank])] for rank in (0, 1)]
    )
    return [json.loads(report.read_text()) for report in reports]


@pytest.mark.slow
def test_a_later_generation_compiles_nothing_in_any_of_its_processes(tmp_path):
    first, later = generation(tmp_path), generation(tmp_path)
    assert all(told["compiled"] >= 2 and told["result"] == 140.0 for told in first + later)
    assert all(told["hits"] == told["compiled"] for told in later)
    assert first[0]["hits"] == 0
    assert (tmp_path / COMPILE_CACHE).stat().st_mode & 0o777 == 0o700


def test_an_entry_is_as_it_was_written_or_is_not_there(tmp_path):
    cache = CheckedCache(tmp_path)
    assert cache.get("jit_f-0") is None
    cache.put("jit_f-0", b"program")
    cache.put("jit_f-0", b"another")
    assert cache.get("jit_f-0") == b"program"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("position", [0, 15, 16, 22])
def test_a_damaged_entry_is_removed_and_can_be_written_again(tmp_path, position):
    cache = CheckedCache(tmp_path)
    cache.put("jit_f-0", b"program")
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="is damaged, and is removed"):
        assert cache.get("jit_f-0") is None
    cache.put("jit_f-0", b"program")
    assert cache.get("jit_f-0") == b"program"


@pytest.mark.parametrize("length", [0, 3, 20])
def test_a_truncated_entry_is_no_entry(tmp_path, length):
    cache = CheckedCache(tmp_path)
    cache.put("jit_f-0", b"program")
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:length])
    with pytest.warns(UserWarning, match="is damaged"):
        assert cache.get("jit_f-0") is None


def test_a_cache_that_cannot_be_written_costs_a_warning(tmp_path):
    cache = CheckedCache(tmp_path / "missing")
    with pytest.warns(UserWarning, match="cannot be written"):
        cache.put("jit_f-0", b"program")


def test_executables_that_others_may_have_put_there_are_refused(tmp_path):
    folder = tmp_path / COMPILE_CACHE
    folder.mkdir()
    os.chmod(folder, 0o777)
    with pytest.raises(FolderError, match="may be written to by its owner only"):
        use_compile_cache(tmp_path)
