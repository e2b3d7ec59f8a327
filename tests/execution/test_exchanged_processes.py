"""Steps with tables on the devices of several processes equal those on one device, wherever tables lie."""

import pathlib
import socket
import subprocess
import sys

import pytest

TIMEOUT_S = 240


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_steps_of_several_processes_equal_one_device(count):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    program = pathlib.Path(__file__).with_name("exchanged_process.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(number), str(count), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(count)
    ]
    printed = []
    try:
        printed = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
    printed += [process.communicate()[0] for process in processes[len(printed) :]]
    assert [process.returncode for process in processes] == [0] * count, "\n\n".join(printed)
