"""A Ray cluster of three nodes on this machine, on the loopback address alone, and a worker that does not train."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import psutil

ECHO = """
import os, sys
messages = int(os.environ["AUTOSHARD_MESSAGES_FD"])
tell = lambda text: os.write(messages, text.encode() + b"\\n")
tell("ready")
for line in sys.stdin:
    if line == "quit\\n":
        sys.exit(3)
    tell(f"heard {line.strip()} in {os.getcwd()} with {os.environ.get('JAX_OF_THE_DRIVER')}")
os._exit(1)
"""
"""A worker's script: repeats what it hears, and ends with its standard input."""

ECHO_COMMAND = (sys.executable, "-c", ECHO)


@contextlib.contextmanager
def three_nodes() -> Iterator[tuple[str, list[Any]]]:
    """The address of a cluster, and its three nodes, of one CPU each; the head has none."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # before Ray is imported: loopback only
    import ray
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "num_cpus": 0, "include_dashboard": False})
    try:
        yield cluster.address, [cluster.add_node(**options) for _ in range(3)]
    finally:
        ray.shutdown()
        cluster.shutdown()


def kill_node(node: Any) -> None:
    """Kills all that runs on a node at once, as when its power fails."""
    raylets = [psutil.Process(info.process.pid) for infos in node.all_processes.values() for info in infos]
    all_of_it = [process for raylet in raylets for process in (raylet, *raylet.children(recursive=True))]
    for process in all_of_it:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
