"""What a killed supervisor started does not outlive it, whatever it is at: here it knows nothing of supervisors."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

PARENT = """
import sys, time
from autoshard.launch.engines.protocol import Command
from autoshard.launch.engines.worker_process import WorkerProcess
process = WorkerProcess(Command((sys.executable, "-c", "import time; time.sleep(100)"), {}, sys.argv[1]), "log")
print(process.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does it")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_worker_that_does_not_listen_dies_with_its_supervisor(tmp_path, is_stopped):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    while "-I" in worker.cmdline():  # it is not yet what it is to become
        time.sleep(0.02)
    if is_stopped:
        worker.send_signal(signal.SIGSTOP)
    parent.kill()
    parent.wait()
    until_s = time.monotonic() + 30
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until_s:
        time.sleep(0.02)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
