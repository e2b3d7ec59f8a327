"""Tables in the memory of several hosts: each process has workers with rows of their own."""

import pathlib
import sys

import pytest
from together import free_port, run_together

PROGRAM = pathlib.Path(__file__).with_name("hosted_process.py")


@pytest.mark.slow
def test_steps_over_rows_of_several_hosts_equal_those_over_whole_tables(tmp_path):
    count = 3  # an odd number: with two, whatever is not one's own is the other's
    for processes in (count, 1):  # one alone reads back what the others have saved
        settings = [str(processes), str(free_port()), str(tmp_path)]
        run_together([[sys.executable, str(PROGRAM), str(number), *settings] for number in range(processes)])
