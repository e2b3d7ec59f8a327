"""`autoshard.jit` in several processes: the first plans for all, and its errors are those of all."""

import json
import pathlib
import sys

import jax
import numpy as np
import pytest
from together import free_port, run_together

PROGRAM = pathlib.Path(__file__).with_name("jit_process.py")


@pytest.mark.slow
def test_the_first_process_plans_for_all(tmp_path):
    port, reports = str(free_port()), [tmp_path / f"{n}.json" for n in range(2)]
    printed = run_together([[sys.executable, str(PROGRAM), str(n), port, str(reports[n])] for n in range(2)])
    first, second = (json.loads(report.read_text()) for report in reports)
    assert first == second  # the certificate tells how long the solver took, to the last digit
    assert first["loss"] == pytest.approx(np.mean(np.arange(64.0) ** 2))
    assert "The first process cannot plan `planned_for_others`: MeshError" in first["error"]
    noise = float(jax.random.normal(jax.random.key(1), (8, 8)).trace())
    assert first["noisy"] == first["raw"] == pytest.approx(noise, rel=1e-5)  # keys that each process made for itself
    assert [text.count("planned in") for text in printed] == [3, 0]
