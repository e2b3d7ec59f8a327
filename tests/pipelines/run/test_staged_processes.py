"""Staged steps in several processes equal those on one device; if one dies or stalls amid one, the others are told."""

import itertools
import os
import pathlib
import sys
import threading
import time

import pytest
from together import free_port, start

TIMEOUT_S = 240
TOLD_S = 6
"""`timeout_s`, which holds from the third step on."""


def run_processes(devices, event, folder):
    """What all but the last of some processes print, which have these numbers of devices; see staged_process.py."""
    port = free_port()
    program = pathlib.Path(__file__).with_name("staged_process.py")
    arguments = [",".join(map(str, devices)), event, str(TOLD_S)]
    logs = [folder / f"{number}.log" for number in range(len(devices))]
    processes = []
    for number, log in enumerate(logs):
        command = [sys.executable, str(program), f"127.0.0.1:{port}", str(number), *arguments]
        processes.append(start(command, os.environ | {"JAX_PLATFORMS": "cpu"}, log, log.with_suffix(".errors")))
    kill_all = lambda: [process.kill() for process in processes]
    late = threading.Timer(TIMEOUT_S, kill_all)
    late.start()
    try:
        # nobody ends before all are over, so each is read up to there
        return list(map(until_over, processes[:-1], logs))
    finally:
        late.cancel()
        kill_all()
        for process in processes:
            process.join()


def until_over(process, log):
    """The lines that a process writes before it is over, or dies."""
    while True:
        is_alive = process.is_alive()
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        if "over\n" in lines or not is_alive:
            return list(itertools.takewhile(lambda line: line != "over\n", lines))
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "event", "words"),
    [((2, 1, 1), "killed", "the transfer failed"), ((2, 1, 1), "stopped", "which has sent nothing for")],
)
def test_steps_in_several_processes(devices, event, words, tmp_path):
    for lines in run_processes(devices, event, tmp_path):
        differ, agree, told, again = [line for line in lines if "[Gloo]" not in line]
        assert (differ, agree) == ("plans differ\n", "steps agree\n")
        assert told.startswith("after ") and "must come from process" in told
        # one without a part in the plan waits for the metrics that process 0 sends
        assert words in told or "metric loss must come from process 0, which has sent nothing for" in told
        assert again.startswith("again: An earlier step failed")
