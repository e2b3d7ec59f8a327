"""Moves between two processes, and what a process is told when the other one stalls or dies."""

import ipaddress
import os
import pathlib
import signal
import sys
import threading

import pytest
from together import free_port, start

from autoshard.transfer.peers import host_towards_coordinator

TIMEOUT_S = 120


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What the two processes print, of which the second one kills itself at the end."""
    port, folder = free_port(), tmp_path_factory.mktemp("told")
    program = pathlib.Path(__file__).with_name("two_processes.py")
    logs = [folder / f"{number}.log" for number in range(2)]
    processes = [
        start(
            [sys.executable, str(program), f"127.0.0.1:{port}", str(number), str(folder)],
            os.environ | {"JAX_PLATFORMS": "cpu"},
            log,
        )
        for number, log in enumerate(logs)
    ]
    late = threading.Timer(TIMEOUT_S, lambda: [process.kill() for process in processes])
    late.start()
    for process in processes:
        process.join()
    late.cancel()
    texts = [log.read_text() for log in logs]
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL], texts
    return texts


def test_arrays_arrive(printed):
    assert all("moves agree" in out for out in printed) and "donated arrives" in printed[0]


def test_a_process_that_stalls_is_named_and_may_still_come(printed):
    (line,) = [line for line in printed[0].splitlines() if "stalled:" in line]
    assert "late activations must come from process 1, which has sent nothing for 0.5 s" in line
    assert "came after all: 16.0" in printed[0]


def test_a_process_that_dies_is_named_whenever_one_waits_or_moves(printed):
    lines = [line for line in printed[0].splitlines() if "died:" in line]
    assert len(lines) == 2
    assert all("lost gradients must come from process 1, but the transfer failed" in line for line in lines)


def test_a_host_listens_where_the_coordinator_can_reach_it(monkeypatch):
    assert host_towards_coordinator("127.0.0.1:9") == "127.0.0.1"
    assert host_towards_coordinator("[::1]:9") in ("::1", "127.0.0.1")  # the latter where there is no IPv6
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:9")
    assert ipaddress.ip_address(host_towards_coordinator(None)).is_loopback
    own = host_towards_coordinator("198.51.100.7:9")
    assert host_towards_coordinator(f"{own}:9") == own
