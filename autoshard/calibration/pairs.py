"""Speeds of single pairs of devices, by exchanges of arrays while all other devices are idle.

Each pair sends a small array and a large one both ways at once. The time of an exchange is a latency and the bytes over
a bandwidth, which the two times give.
"""

import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.calibration.partial import Times
from autoshard.calibration.programs import UNROLLED, Program, typical_and_spread
from autoshard.cluster import PairSpeeds, Uneven

SMALL_BYTES, LARGE_BYTES = 4096, 8 << 20
_AXIS = "pair"
Pair = tuple[int, int]


def pairs_of(num_devices: int) -> list[tuple[Pair, int]]:
    """What is timed: every pair of devices, and the bytes that each sends."""
    return [
        (pair, size) for pair in itertools.combinations(range(num_devices), 2) for size in (SMALL_BYTES, LARGE_BYTES)
    ]


def name_of(pair: Pair, size_bytes: int) -> str:
    """The name of an exchange among the timings of a calibration."""
    return f"exchange of {size_bytes} bytes between {pair[0]} and {pair[1]}"


def exchange(devices: Sequence[jax.Device], pair: Pair, size_bytes: int) -> Program:
    """A loop of exchanges between two devices."""
    mesh = Mesh([devices[n] for n in pair], (_AXIS,))
    spec = PartitionSpec(_AXIS)

    def loop(rounds: jax.Array, array: jax.Array) -> jax.Array:
        def body(round_: jax.Array, held: jax.Array) -> jax.Array:
            for _ in range(UNROLLED):
                held = lax.optimization_barrier(lax.ppermute(held, _AXIS, [(0, 1), (1, 0)]))
            return held

        return lax.fori_loop(0, rounds, body, array)

    mapped = jax.shard_map(loop, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec, check_vma=False)
    make = jax.jit(lambda: jnp.zeros(2 * size_bytes // 4, jnp.float32), out_shardings=NamedSharding(mesh, spec))
    return Program(jax.jit(mapped, donate_argnums=1), (make,))


def missing(times: Times, num_devices: int) -> Iterator[tuple[str, Pair, int]]:
    """The exchanges that have not been timed."""
    for pair, size_bytes in pairs_of(num_devices):
        if name_of(pair, size_bytes) not in times:
            yield name_of(pair, size_bytes), pair, size_bytes


def pair_speeds(times: Times, num_devices: int, date: str) -> PairSpeeds:
    """The figures of every pair."""
    rates = [[0.0] * num_devices for _ in range(num_devices)]
    latencies = [[0.0] * num_devices for _ in range(num_devices)]
    for i, j in itertools.combinations(range(num_devices), 2):
        small_s, large_s = (typical_and_spread(times[name_of((i, j), size)])[0] for size in (SMALL_BYTES, LARGE_BYTES))
        rate = (LARGE_BYTES - SMALL_BYTES) / max(large_s - small_s, 0.1 * large_s)
        rates[i][j] = rates[j][i] = rate
        latencies[i][j] = latencies[j][i] = max(small_s - SMALL_BYTES / rate, 0.1 * small_s)
    as_matrix = lambda rows: tuple(map(tuple, rows))
    return PairSpeeds(as_matrix(rates), as_matrix(latencies), f"Exchanges of pairs, measured on {date}.")


def are_alike(pairs: PairSpeeds) -> bool:
    """Whether all pairs have about one bandwidth, so that it does not matter which device is where."""
    return max(map(max, Uneven.of_pairs((), pairs, 0).tier_of_pair), default=0) == 0
