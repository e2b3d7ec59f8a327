"""The Ray engine on three nodes, one of which is killed; `test_ray.py` runs this in a process of its own.

Ray keeps threads, signal handlers and environment variables in the process of its driver for good.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from ray_nodes import ECHO_COMMAND, kill_node, three_nodes

from autoshard.launch.engines.protocol import Command, Exit, Line
from autoshard.launch.engines.ray_cluster import RayEngine

LIMIT_S = 60
news: dict[int, list[Line | Exit]] = {}


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, news
        for item in engine.poll(0.2):
            news.setdefault(item.process, []).append(item)


def said(process: int) -> list[bytes]:
    return [item.text for item in news.get(process, []) if isinstance(item, Line)]


def listeners() -> list[str]:
    """Addresses at which processes of Ray listen."""
    table = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    mine = [line.split()[3] for line in table.splitlines() if "ray" in line or "gcs" in line]
    return [address for address in mine if "127.0.0.1" not in address]


run_dir = pathlib.Path(sys.argv[1])
os.environ["JAX_OF_THE_DRIVER"] = "yes"
with three_nodes() as (address, nodes):
    signal.signal(signal.SIGTERM, handler := lambda number, frame: None)
    engine = RayEngine(run_dir, 2, 3, devices_per_worker=1, address=address)
    assert signal.getsignal(signal.SIGTERM) is handler  # Ray's own would end the supervisor
    slots = engine.capacity()
    assert [slot.number for slot in slots] == [0, 1, 2]
    assert len({slot.host for slot in slots}) == len({slot.memory_dir for slot in slots}) == 3
    assert listeners() == []

    command = Command(ECHO_COMMAND, {}, str(run_dir / "logs"))
    workers = [engine.start(slot, command) for slot in slots]
    standby = engine.start(slots[0], command)
    for worker in workers:
        assert engine.free_address(worker.slot).startswith("127.0.0.1:")
        engine.send(worker.number, "hello\n")
    heard = f"heard hello in {os.getcwd()} with yes".encode()
    until(lambda: all(said(worker.number) == [b"ready", heard] for worker in workers) and bool(said(standby.number)))

    engine.send(workers[0].number, "quit\n")
    until(lambda: news[workers[0].number][-1] == Exit(workers[0].number, 3))
    workers[0] = engine.start(slots[0], command)
    engine.stop([standby.number])
    engine.terminate(workers[1].number)
    until(lambda: news[workers[1].number][-1] == Exit(workers[1].number, -signal.SIGTERM))
    assert not os.path.exists(f"/proc/{standby.pid}")

    node = next(node for node in nodes if slots[2].host.endswith(node.node_id[:8]))
    began_s = time.monotonic()
    kill_node(node)
    until(lambda: news[workers[2].number][-1] == Exit(workers[2].number, None))
    print(f"noticed after {time.monotonic() - began_s:.2f} s")
    assert engine.capacity() == slots[:2]
    gone = engine.start(slots[2], command)
    until(lambda: news.get(gone.number) == [Exit(gone.number, None)])
    assert isinstance(news[standby.number][-1], Line)  # no end is told of what was stopped
    until(lambda: bool(said(workers[0].number)))
    engine.send(workers[0].number, "still there\n")
    until(lambda: len(said(workers[0].number)) == 2)
    os.makedirs(slots[0].memory_dir)
    engine.forget_memory()
    assert not os.path.exists(slots[0].memory_dir)
    engine.close()
    assert not os.path.exists(os.path.dirname(slots[0].memory_dir))
    assert not os.path.exists(f"/proc/{workers[0].pid}")
