"""Workers on a Ray cluster: of its three nodes one is killed; its driver is killed; Ray is missing."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import psutil
import pytest

from autoshard.errors import MissingExtraError
from autoshard.launch.engines.ray_cluster import RayEngine

HERE = pathlib.Path(__file__).parent
LIMIT_S = 240


def run(code: str, *arguments: str) -> subprocess.Popen[str]:
    pytest.importorskip("ray", reason="Ray, of the extra `ray`, is not installed")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, *((code,) if code.endswith(".py") else ("-c", code)), *arguments],
        env={**environment, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_processes_start_speak_and_end_on_three_nodes_and_one_node_is_killed(tmp_path):
    process = run(str(HERE / "ray_engine_run.py"), str(tmp_path))
    try:
        printed, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0 and "noticed after" in printed, printed


DRIVER = """
import pathlib, sys
from ray_nodes import ECHO_COMMAND
from autoshard.launch.engines.protocol import Command
from autoshard.launch.engines.ray_cluster import RayEngine
engine = RayEngine(pathlib.Path(sys.argv[1]), 1, 1, devices_per_worker=1)
print(engine.start(engine.capacity()[0], Command(ECHO_COMMAND, {}, sys.argv[1])).pid, flush=True)
while True:
    engine.poll(1)
"""


def listening(processes: list[psutil.Process]) -> set[str]:
    """Addresses at which processes listen."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return {address.removeprefix("::ffff:") for address in found}


@pytest.mark.slow
def test_a_ray_of_its_own_listens_on_loopback_alone_and_nothing_outlives_a_killed_driver(tmp_path):
    driver = run(DRIVER, str(tmp_path))
    try:
        line = driver.stdout.readline() if driver.stdout else ""
        while line and not line.strip().isdecimal():
            line = driver.stdout.readline() if driver.stdout else ""
        worker = psutil.Process(int(line))
        started = psutil.Process(driver.pid).children(recursive=True)
        assert worker in started and {process.name() for process in started} >= {"raylet", "gcs_server"}
        assert listening(started) == {"127.0.0.1"}
        driver.send_signal(signal.SIGKILL)
        agents = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # Ray's own, which take their time to end
        _, alive = psutil.wait_procs([process for process in started if process.name() not in agents], timeout=60)
        assert alive == []
    finally:
        driver.kill()
        driver.communicate()


def test_without_ray_the_error_tells_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'autoshard\[ray\]'"):
        RayEngine(tmp_path, 1, 1, devices_per_worker=1)


UNREACHABLE = """
import pathlib, sys
from autoshard.errors import ClusterError
from autoshard.launch.engines.ray_cluster import RayEngine
for address in ("127.0.0.1:1", "no port"):
    try:
        RayEngine(pathlib.Path(sys.argv[1]), 1, 1, devices_per_worker=1, address=address)
    except ClusterError as error:
        print(error)
"""


def test_an_address_at_which_no_ray_answers_is_refused_at_once(tmp_path):
    """Ray would try for minutes, and then end the process."""
    printed, _ = run(UNREACHABLE, str(tmp_path)).communicate(timeout=60)
    assert "The Ray cluster at 127.0.0.1:1 cannot be reached: [Errno 111]" in printed, printed
    assert "The Ray cluster at no port cannot be reached: " in printed, printed


TOO_LARGE = """
import pathlib, sys
from autoshard.launch.engines import ray_cluster
ray_cluster._START_LIMIT_S = 1
engine = ray_cluster.RayEngine(pathlib.Path(sys.argv[1]), 1, 1, devices_per_worker=100_000)
print(engine.why_few() if not engine.capacity() else "there is room")
engine.close()
"""


@pytest.mark.slow
def test_what_no_node_has_room_for_is_told(tmp_path):
    printed, _ = run(TOO_LARGE, str(tmp_path)).communicate(timeout=120)
    assert "Each takes 100000 CPU of one node; the Ray cluster has 1 node, of at most " in printed, printed
