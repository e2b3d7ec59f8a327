"""What an earlier version of the package left on disk of its kernels does not stop this one."""

import os
import pickle
import subprocess
import sys

import pytest

from autoshard.solver import warm_up

PROGRAM = """
import numba, numpy as np, pathlib, pickle, sys
from autoshard.solver import warm_up
from autoshard.solver.bound.label_slack import label_slack
from autoshard.solver.labelling import labels_cost

for kernel in (labels_cost, label_slack):  # numba's names of its files
    module, line = kernel.__module__.rpartition(".")[2], kernel.py_func.__code__.co_firstlineno
    name = f"{module}.{kernel.__name__}-{line}.py{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}.nbi"
    stale = pickle.dumps(numba.__version__, protocol=-1) + pathlib.Path(sys.argv[1]).read_bytes()
    (pathlib.Path(kernel.stats.cache_path) / name).write_bytes(stale)
graph = warm_up._warm_up_graph()
labels = np.zeros(len(graph.label_start) - 1, np.int64)
if sys.argv[2] == "some":
    labels_cost.recompile()
else:
    try:
        labels_cost(graph, labels)
        sys.exit("the stale index was read")
    except ModuleNotFoundError:
        pass
assert not warm_up._is_on_disk(graph, labels)
assert labels_cost.signatures
label_slack(graph, graph.tables, np.zeros(1000), graph.unary)
assert label_slack.stats.cache_misses
"""


@pytest.mark.parametrize("which", ["some", "all"])
def test_indices_of_another_version(tmp_path, which):
    index = pickle.dumps(("stamp", {"key": os.path.join}), protocol=0).replace(b"posixpath", b"autoshard_of_yore")
    (tmp_path / "index").write_bytes(index)
    subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "index", which],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
        check=True,
    )


def test_one_process_compiles_at_a_time(tmp_path):
    program = "from autoshard.solver import warm_up as w; print(flush=True)\nwith w._one_at_a_time(): pass"
    with warm_up._one_at_a_time():
        # elsewhere, so that it imports the package from where this process has it
        other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=tmp_path)
        assert other.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(5 * warm_up._PAUSE_S)
    other.communicate(timeout=60)
    assert other.returncode == 0
