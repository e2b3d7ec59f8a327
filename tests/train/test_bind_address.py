"""The coordinator listens where it is told, and nowhere else; a process that is told all does not ask Slurm."""

import os
import socket
import sys
import time

import psutil
import pytest
from together import free_port, start

from autoshard.train.processes import bind_address

ADDRESSES = {
    "first-node": ["10.0.0.7"],
    "debian": ["127.0.1.1"],
    "both": ["fd00::7", "127.0.1.1", "10.0.0.7"],
    "six": ["fd00::7"],
    "10.0.0.8": ["10.0.0.8"],
    "127.0.0.1": ["127.0.0.1"],
    "fd00::8": ["fd00::8"],
}


@pytest.mark.parametrize(
    ("coordinator", "bind"),
    [
        ("127.0.0.1:80", "127.0.0.1:80"),
        ("localhost:80", "localhost:80"),
        ("10.0.0.8:80", "10.0.0.8:80"),
        ("[fd00::8]:80", "[fd00::8]:80"),
        ("first-node:80", "10.0.0.7:80"),
        ("both:80", "10.0.0.7:80"),
        ("six:80", "[fd00::7]:80"),
        ("debian:80", None),
        ("unknown:80", None),
        (None, None),
        ("", None),
    ],
)
def test_the_coordinator_listens_where_the_others_reach_it(monkeypatch, coordinator, bind):
    def found(host, port):
        if host not in ADDRESSES:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in ADDRESSES[host]]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert bind_address(coordinator) == bind


CODE = """
import jax, time
jax.config.update("jax_num_cpu_devices", 3)
from autoshard.train.processes import join_processes
join_processes()
print("local devices", jax.local_device_count(), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("bind", [None, "0.0.0.0"])
def test_the_coordinator_listens_where_it_is_told(bind, tmp_path):
    port, output = free_port(), tmp_path / "output"
    environment = {
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "1",
        "JAX_PROCESS_ID": "0",
        # a step of Slurm, from which JAX would take this process's number and one device
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
    }
    if bind is not None:
        environment["JAX_COORDINATOR_BIND_ADDRESS"] = f"{bind}:{port}"
    process = start([sys.executable, "-c", CODE], environment, output, tmp_path / "errors")
    try:
        while process.is_alive() and not (output.exists() and output.read_text()):
            time.sleep(0.05)
        assert output.read_text() == "local devices 3\n"
        listening = [c.laddr for c in psutil.Process(process.pid).net_connections() if c.status == psutil.CONN_LISTEN]
        addresses = {address.ip.removeprefix("::ffff:") for address in listening}
        at_port = {address.ip.removeprefix("::ffff:") for address in listening if address.port == port}
        assert at_port == {"127.0.0.1"} == addresses if bind is None else at_port and at_port <= {"0.0.0.0", "::"}
    finally:
        process.kill()
        process.join()
