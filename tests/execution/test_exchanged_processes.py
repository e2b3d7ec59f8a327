"""Steps with tables on the devices of several processes equal those on one device, wherever tables lie."""

import pathlib
import sys

import pytest
from together import free_port, run_together

PROGRAM = pathlib.Path(__file__).with_name("exchanged_process.py")


@pytest.mark.slow
def test_steps_of_several_processes_equal_one_device():
    count = 3  # an odd number: with two, whatever is not one's own is the other's
    port = str(free_port())
    run_together([[sys.executable, str(PROGRAM), str(number), str(count), port] for number in range(count)])
