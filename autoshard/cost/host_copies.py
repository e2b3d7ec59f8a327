"""Seconds of copies between the memory of a host and a device.

    T = latency + bytes / bandwidth        of the link between them, each way

State on the host is copied in for its update and out behind it, next to kernels that take a fiftieth of the time (64
GB/s of PCIe 5 beside 3,350 GB/s of an H100's memory), and the update before it is made first. So a plan counts both in
full; that the link could be busy in both directions at once is not counted on. That is an upper bound.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from autoshard.cluster import Link

Offload = Literal["never", "state", "activations", "all"]
"""What may lie in the memory of the host: nothing, state that only the update reads, residuals, or both."""


def host_copy_s(link: Link, size_bytes: float) -> float:
    """What it takes to copy `size_bytes` between a device and its host."""
    return link.latency_s + size_bytes / link.bandwidth_bytes_per_s


def round_trips_s(link: Link, sizes_bytes: Sequence[float]) -> np.ndarray:
    """[n] what it takes to copy each of these sizes to a device and back; nothing for 0 bytes."""
    return np.array([2 * host_copy_s(link, size_bytes) if size_bytes else 0.0 for size_bytes in sizes_bytes])
