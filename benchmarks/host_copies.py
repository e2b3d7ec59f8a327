"""Copies between the GPU at hand and its host: how fast they are, both ways at once, and beside kernels.

    python benchmarks/host_copies.py

Needs a GPU. Plans price a copy by latency and bandwidth of the link to the host, one after another, and hide none of
them (`autoshard/cost/host_copies.py`). One JSON line a case: seconds of a call, the median of several.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

SIZES = (2**20, 2**24, 2**28, 2**30)
"""Bytes of a copy."""
REPEATS = 7
WIDTH, PRODUCTS = 8192, 24
"""Of the products beside a copy: bfloat16, square."""
STREAMED_BYTES, PASSES = 2**31, 16
"""Of the array that kernels beside a copy go through, and how often."""


def seconds(run: Callable[..., object], *args: object) -> float:
    """The median time of a call, after two that do not count."""
    found = []
    for _ in range(REPEATS + 2):
        started = time.perf_counter()
        jax.block_until_ready(run(*args))
        found.append(time.perf_counter() - started)
    return statistics.median(found[2:])


def products(x: jax.Array) -> jax.Array:
    """Kernels bound by arithmetic."""
    y = x
    for _ in range(PRODUCTS):
        y = jax.lax.optimization_barrier(y @ x)
    return y


def passes(x: jax.Array) -> jax.Array:
    """Kernels bound by memory."""
    for _ in range(PASSES):
        x = jax.lax.optimization_barrier(x * 0.5 + 0.5)
    return x


def main() -> None:
    mesh = jax.make_mesh((1,), ("one",))
    device, host = (NamedSharding(mesh, PartitionSpec(), memory_kind=kind) for kind in ("device", "pinned_host"))
    to_device = lambda x: jax.device_put(x, jax.memory.Space.Device)
    to_host = lambda x: jax.device_put(x, jax.memory.Space.Host)

    def array(size_bytes: int) -> jax.Array:
        return jax.jit(lambda: jax.random.normal(jax.random.key(0), (size_bytes // 4,)), out_shardings=device)()

    def told(case: str, size_bytes: int, time_s: float, **more: float) -> None:
        rate = size_bytes / time_s if size_bytes else 0.0
        print(
            json.dumps({"case": case, "bytes": size_bytes, "seconds": time_s, "bytes_per_s": rate, **more}), flush=True
        )

    jit = jax.jit
    matrix = (jax.random.normal(jax.random.key(1), (WIDTH, WIDTH)) / WIDTH**0.5).astype(jnp.bfloat16)
    stream = array(STREAMED_BYTES)
    alone: Sequence[tuple[str, Callable[..., jax.Array], jax.Array]] = (
        ("products", products, matrix),
        ("passes", passes, stream),
    )
    kernels_s = {name: seconds(jit(kernels), x) for name, kernels, x in alone}
    for name, time_s in kernels_s.items():
        told(name, 0, time_s)
    for size_bytes in SIZES:
        here = array(size_bytes)
        there = jax.device_put(here, host)
        fetch = jit(to_device, in_shardings=host, out_shardings=device)
        store = jit(to_host, in_shardings=device, out_shardings=host)
        both = jit(lambda x, y: (to_device(x), to_host(y)), in_shardings=(host, device), out_shardings=(device, host))
        told("to device", size_bytes, seconds(fetch, there))
        told("to host", size_bytes, seconds(store, here))
        told("both at once", 2 * size_bytes, seconds(both, there, here))
    for name, kernels, x in alone:
        beside_fetch = jit(
            lambda x, y, k=kernels: (to_device(x), k(y)), in_shardings=(host, device), out_shardings=device
        )
        beside_store = jit(
            lambda x, y, k=kernels: (to_host(x), k(y)), in_shardings=device, out_shardings=(host, device)
        )
        told(f"to device beside {name}", size_bytes, seconds(beside_fetch, there, x), kernels_s=kernels_s[name])
        told(f"to host beside {name}", size_bytes, seconds(beside_store, here, x), kernels_s=kernels_s[name])


if __name__ == "__main__":
    main()
