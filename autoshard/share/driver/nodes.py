"""Which nodes are there: those of the cluster file as it is now, or those that Ray has."""

import logging
import os
import pathlib
from collections.abc import Callable

from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError, MissingExtraError, ShareError
from autoshard.share.pool import Node, nodes_of


def nodes_in_file(path: pathlib.Path, say: Callable[[str], None]) -> Callable[[], tuple[Node, ...]]:
    """The nodes of a cluster file; it is read again when it changes, so that nodes may come and go."""
    nodes, read_ns = nodes_of(Cluster.from_file(path)), path.stat().st_mtime_ns

    def look() -> tuple[Node, ...]:
        nonlocal nodes, read_ns
        try:
            changed_ns = path.stat().st_mtime_ns
            if changed_ns != read_ns:
                read_ns = changed_ns
                nodes = nodes_of(Cluster.from_file(path))
        except (OSError, AutoshardError) as error:
            say(f"warning: the nodes stay as they were: {error}")
        return nodes

    return look


def nodes_of_ray(group: str, devices_per_node: int, resource: str) -> Callable[[], tuple[Node, ...]]:
    """The nodes of the Ray cluster at `RAY_ADDRESS` that have as many devices as those of the cluster file.

    Args:
        group: the only group of the cluster file.
        devices_per_node: of its nodes.
        resource: what Ray calls the devices: `GPU`, `TPU` or `CPU`.

    Raises:
        MissingExtraError: Ray is not installed.
        ShareError: `RAY_ADDRESS` names no cluster.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if not address:
        raise ShareError(
            "--run --engine ray: the jobs share one Ray cluster, which RAY_ADDRESS names; it is not set. Start Ray "
            "(`ray start --head`), and set RAY_ADDRESS to its address, or to `auto` for the one on this machine."
        )
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError(
            "--engine ray needs Ray, which is not installed. Install it with: pip install 'autoshard[ray]'."
        ) from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ShareError(
            f"RAY_ADDRESS={address}: there is no Ray cluster: {reason:.200}. Start it, or correct it."
        ) from error
    numbers: dict[str, int] = {}

    def look() -> tuple[Node, ...]:
        there = [n for n in ray.nodes() if n["Alive"] and n["Resources"].get(resource, 0) >= devices_per_node]
        for node in there:
            numbers.setdefault(node["NodeID"], len(numbers))
        found = [Node(numbers[node["NodeID"]], group, devices_per_node) for node in there]
        return tuple(sorted(found, key=lambda node: node.number))

    return look
