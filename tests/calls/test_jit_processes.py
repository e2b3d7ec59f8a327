"""`autoshard.jit` in several processes: the first plans for all, and its errors are those of all."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

TIMEOUT_S = 240


@pytest.mark.slow
def test_the_first_process_plans_for_all(tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    program, reports = pathlib.Path(__file__).with_name("jit_process.py"), [tmp_path / f"{n}.json" for n in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(n), str(port), str(report)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ,
        )
        for n, report in enumerate(reports)
    ]
    try:
        printed = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    first, second = (json.loads(report.read_text()) for report in reports)
    assert first == second  # the certificate tells how long the solver took, to the last digit
    assert first["loss"] == pytest.approx(np.mean(np.arange(64.0) ** 2))
    assert "The first process cannot plan `planned_for_others`: MeshError" in first["error"]
    assert [text.count("planned in") for text in printed] == [1, 0]
