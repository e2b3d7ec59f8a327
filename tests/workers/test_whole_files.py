"""A worker that crashes fails one test, and all others run, each once."""

import os
import pathlib
import re
import subprocess
import sys

CONFTEST = """
import pytest
from whole_files import WholeFiles

def pytest_xdist_make_scheduler(config, log):
    return WholeFiles(config, log)
"""

FILE = """
import os, pathlib, pytest

@pytest.mark.parametrize("n", range({size}))
def test(n):
    if ({file}, n) in {crashes}:
        os._exit(1)
    with open(pathlib.Path(__file__).parent / "ran", "a") as ran:
        ran.write(f"{file}.{{n}}\\n")
"""


def test_a_crash_fails_one_test_and_all_others_run_once(tmp_path):
    sizes, crashes = (3, 1, 4, 1, 2, 1, 1), {(0, 2), (2, 1), (6, 0)}
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for file, size in enumerate(sizes):
        (tmp_path / f"test_{file}.py").write_text(FILE.format(file=file, size=size, crashes=crashes))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "."]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert re.search(rf"{len(crashes)} failed, {sum(sizes) - len(crashes)} passed", done.stdout), done.stdout
    every = {(file, n) for file, size in enumerate(sizes) for n in range(size)}
    ran = sorted(tuple(map(int, line.split("."))) for line in (tmp_path / "ran").read_text().split())
    assert ran == sorted(every - crashes)
