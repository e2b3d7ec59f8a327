"""Tables in the memory of several hosts: each process has workers with rows of their own."""

import pathlib
import sys

import hosted_process
import pytest
from together import free_port, run_together

PROGRAM = pathlib.Path(__file__).with_name("hosted_process.py")


@pytest.mark.slow
@pytest.mark.parametrize("cases", [range(3), pytest.param([3], marks=pytest.mark.exhaustive)], ids=["often", "more"])
def test_steps_over_rows_of_several_hosts_equal_those_over_whole_tables(cases, tmp_path):
    count = 3  # an odd number: with two, whatever is not one's own is the other's
    settings = [str(count), str(free_port()), str(tmp_path), *map(str, cases)]
    run_together([[sys.executable, str(PROGRAM), str(number), *settings] for number in range(count)])
    saved = [hosted_process.CASES[case] for case in cases if hosted_process.CASES[case][0] != "async"]
    for mode, ids in saved:  # this process alone reads back what the others have saved
        hosted_process.check_saved(ids, tmp_path / f"{mode}-{ids}")
