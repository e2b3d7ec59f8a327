"""Tables in the memory of several hosts: each process has workers with rows of their own."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("hosted_process.py")


def run(count: int, folder: pathlib.Path) -> None:
    """Runs so many processes of the script together, and checks that all end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    logs = [(folder / f"{count}-{n}.log").open("w+") for n in range(count)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(n), str(count), str(port), str(folder)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for n, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(240) for process in processes]
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            log.seek(0)
    assert codes == [0] * count, "\n".join(log.read()[-3000:] for log in logs)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_steps_over_rows_of_several_hosts_equal_those_over_whole_tables(count, tmp_path):
    run(count, tmp_path)
    run(1, tmp_path)
