"""A plan with tables in host memory, run by several processes."""

import pathlib
import sys

import pytest
from together import free_port, run_together

PROGRAM = pathlib.Path(__file__).with_name("planned_process.py")


@pytest.mark.slow
def test_two_processes_run_as_the_first_has_planned():
    settings = ["2", str(free_port())]
    run_together([[sys.executable, str(PROGRAM), str(number), *settings] for number in range(2)])
