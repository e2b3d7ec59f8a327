"""The programs behind the probes: loops over one operation, on all devices at once, and their times.

A loop runs on every device by `shard_map`, as a planned step does, so that devices that share cores, memory or wires
slow each other down as they will in a step. One round of the loop runs the operation `UNROLLED` times; each time reads
an array of which an element depends on the result before, so that nothing can be left out, moved or merged. The time of
one operation is the time of the loop with it, less that of the loop without rounds, over the number of operations. The
caller subtracts what the loop itself takes for each: the idle loop has a kernel that does hardly any work in place of
the operation and of the kernel that changes the element.

The rate of memory is that of data that no cache holds: the loop goes through the rows of an array that is larger than
caches, and makes of one at a time the same row of another array. In a step most of what a kernel reads was written long
before, and what it writes goes elsewhere: caches fetch that, too, before it is written.
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.calibration.probes import (
    COLD_SHARE,
    ELEMENTWISE_CHAIN,
    FUNCTION_CHAIN,
    NUM_INDEPENDENT,
    ROW_BY_ROW,
    Measures,
    Probe,
)
from autoshard.cluster import CollectiveKind, Slice

UNROLLED = 4
MOST_ROUNDS = 5000
IDLE_SHAPE = (64, 8)
"""Rows and columns of the arrays of the loop without an operation."""

_OUTER, _GROUP, _INNER = "outer", "group", "inner"
_SPEC = PartitionSpec((_OUTER, _GROUP, _INNER))


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A loop that is compiled when it is first timed.

    Attributes:
      loop: (number of rounds, array, others) -> array; the array is donated.
      makers: Make the array and the others.
    """

    loop: Callable[..., jax.Array]
    makers: tuple[Callable[[], jax.Array], ...]

    def seconds(self, target_s: float, repeats: int) -> tuple[float, ...]:
        """Seconds of one operation, `repeats` times; each loop takes about `target_s`."""
        first, *others = (make() for make in self.makers)

        def once(rounds: int) -> float:
            nonlocal first
            started = time.perf_counter()
            first = self.loop(rounds, first, *others)
            first.block_until_ready()
            return time.perf_counter() - started

        once(1)
        about_s = max(once(1), 1e-6)
        rounds = 1
        while about_s < target_s / 4 and rounds < MOST_ROUNDS:  # short loops tell little of how long a round takes
            rounds = min(MOST_ROUNDS, rounds * max(2, min(20, round(target_s / about_s / 2))))
            about_s = once(rounds)
        rounds = max(1, min(MOST_ROUNDS, round(rounds * target_s / about_s)))
        # disturbances only add time: the least of several is what an undisturbed empty loop takes
        empty_s = min(once(0) for _ in range(3))
        return tuple(max(once(rounds) - empty_s, 0.0) / (rounds * UNROLLED) for _ in range(repeats))


def program(probe: Probe | None, hardware: Slice, devices: Sequence[jax.Device]) -> Program:
    """Makes the loop of `probe`, or of no operation at all.

    Args:
      hardware: What the devices are; their hardware levels.
      devices: The devices, in the order of `hardware`.
    """
    mesh = _mesh(probe, hardware, devices)
    if probe is None:
        step, shapes, dtype = _row_maker(_ROWS[Measures.MEMORY]), [IDLE_SHAPE] * 2, "float32"
    elif probe.measures in ROW_BY_ROW:
        rows = max(2, math.ceil(hardware.device_type.memory_bytes * COLD_SHARE / (4 * probe.shape[0])))
        step, shapes, dtype = _row_maker(_ROWS[probe.measures]), [(rows, *probe.shape)] * 2, probe.dtype
    else:
        operation, shapes, dtype = _operation(probe)
        step = _dependent(operation)

    def loop(rounds: jax.Array, first: jax.Array, *others: jax.Array) -> jax.Array:
        def body(turn: jax.Array, array: jax.Array) -> jax.Array:
            for k in range(UNROLLED):
                array = step(turn * UNROLLED + k, array, *others)
            return array

        return lax.fori_loop(0, rounds, body, first)

    specs = (PartitionSpec(), *[_SPEC] * len(shapes))
    mapped = jax.shard_map(loop, mesh=mesh, in_specs=specs, out_specs=_SPEC, check_vma=False)
    return Program(jax.jit(mapped, donate_argnums=1), tuple(_maker(shape, dtype, mesh) for shape in shapes))


def _dependent(operation: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """(number of the step, array, others) -> the array with one element taken from the operation's result."""

    def step(_: jax.Array, array: jax.Array, *others: jax.Array) -> jax.Array:
        result = lax.optimization_barrier(operation(array, *others))
        return array.at[(0,) * array.ndim].set(result[(0,) * result.ndim].astype(array.dtype))

    return step


def _row_maker(make: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """(number, array, source) -> the array with its row of that number, counted round, made of that of the source."""

    def step(number: jax.Array, array: jax.Array, source: jax.Array) -> jax.Array:
        row = number % array.shape[0]
        return lax.dynamic_update_index_in_dim(array, make(lax.dynamic_index_in_dim(source, row)), row, 0)

    return step


def typical_and_spread(seconds: Sequence[float]) -> tuple[float, float]:
    """The lower quartile, and the range between the quartiles as a share of the median.

    What disturbs a timing makes it longer; so the lower quartile is nearer to the undisturbed time than the median is,
    and a single timing that came out too short does not decide.
    """
    if len(seconds) < 2:
        return seconds[0], 0.0
    low, middle, high = statistics.quantiles(seconds, method="inclusive")
    return low, (high - low) / middle if middle else 0.0


def _mesh(probe: Probe | None, hardware: Slice, devices: Sequence[jax.Device]) -> Mesh:
    """The devices as groups of the probe's size along its level: (groups outside, a group, devices inside)."""
    inner = size = 1
    if probe is not None and probe.collective is not None:
        size = probe.size
        for level in hardware.levels[: probe.level]:
            inner *= level.size
    return Mesh(np.array(devices).reshape(-1, size, inner), (_OUTER, _GROUP, _INNER))


def _maker(shape: tuple[int, ...], dtype: str, mesh: Mesh) -> Callable[[], jax.Array]:
    """Makes random numbers of variance 1 over the last dimension, so that products keep their scale."""
    whole = (mesh.size * shape[0], *shape[1:])
    make = lambda: (jax.random.normal(jax.random.key(0), whole) / shape[-1] ** 0.5).astype(dtype)
    return jax.jit(make, out_shardings=NamedSharding(mesh, _SPEC))


def _operation(probe: Probe) -> tuple[Callable[..., jax.Array], list[tuple[int, ...]], str]:
    """The operation, the shapes of its operands on one device, and their dtype."""
    match probe.measures:
        case Measures.LAUNCH | Measures.PRODUCT:
            rows, summed, columns = probe.shape
            return jnp.matmul, [(rows, summed), (summed, columns)], probe.dtype
        case Measures.FUNCTION:
            return _repeated(_functions, probe.rounds), [probe.shape], probe.dtype
        case Measures.ELEMENTWISE:
            return _repeated(_multiplications, probe.rounds), [probe.shape], probe.dtype
        case Measures.COPY:
            return lambda x: _rows_first(x * 0.5), [probe.shape], probe.dtype
        case Measures.TRANSPOSED:
            return lambda x: _rows_first(x.T * 0.5), [probe.shape], probe.dtype
        case Measures.COLLECTIVE:
            assert probe.collective is not None
            operation = _collective(probe.collective, probe.size)
            return operation, [(probe.shape[0] // 4,)], probe.dtype
        case Measures.INNER:
            assert probe.collective is not None
            return _inner_collective(probe.collective, probe.size), [probe.shape], probe.dtype
        case Measures.INDEPENDENT:
            assert probe.collective is not None
            own, (size_bytes, wide) = _collective(probe.collective, probe.size), probe.shape
            many = lambda x, y: jnp.stack([*(own(x[k])[0] for k in range(NUM_INDEPENDENT)), _product(x, y)])
            return many, [(NUM_INDEPENDENT, size_bytes // 4), (wide, wide)], probe.dtype
        case _:
            assert probe.measures is Measures.BESIDE
            (wide,) = probe.shape
            return lambda x, y: _product(x, y)[None], [(NUM_INDEPENDENT, 1), (wide, wide)], probe.dtype


def _rows_first(x: jax.Array) -> jax.Array:
    """A matrix, stored row by row."""
    return with_layout_constraint(x, Layout((0, 1)))


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    """An element of a product of `y`, all of which is made, in every round since `x` has a part in it."""
    return lax.optimization_barrier(y.at[0, 0].set(x[0, 0]) @ y)[0, 0]


def _repeated(operation: Callable[[jax.Array], jax.Array], rounds: int) -> Callable[[jax.Array], jax.Array]:
    """An operation so often, one after another."""
    return lambda x: functools.reduce(lambda y, _: operation(y), range(rounds), x)


def _functions(x: jax.Array) -> jax.Array:
    chain = (jnp.exp, jnp.tanh, lambda y: lax.rsqrt(y + 2), lambda y: jnp.log(y + 2))
    assert len(chain) == FUNCTION_CHAIN
    for function in chain:
        x = function(x)
    return x


def _multiplications(x: jax.Array) -> jax.Array:
    y = x
    for _ in range(ELEMENTWISE_CHAIN):
        y = y * x + x
    return y


def _collective(kind: CollectiveKind, size: int) -> Callable[[jax.Array], jax.Array]:
    """The collective on an array that is its larger side, as planned steps have it."""
    match kind:
        case CollectiveKind.ALL_GATHER:
            return lambda x: lax.all_gather(x[: x.shape[0] // size], _GROUP, tiled=True)
        case CollectiveKind.ALL_REDUCE:
            return lambda x: lax.psum(x, _GROUP)
        case CollectiveKind.REDUCE_SCATTER:
            return lambda x: lax.psum_scatter(x, _GROUP, tiled=True)
        case CollectiveKind.ALL_TO_ALL:
            return lambda x: lax.all_to_all(x.reshape(size, -1), _GROUP, 0, 0).reshape(-1)
        case CollectiveKind.PERMUTE:
            return lambda x: lax.ppermute(x, _GROUP, [(i, (i + 1) % size) for i in range(size)])


def _inner_collective(kind: CollectiveKind, size: int) -> Callable[[jax.Array], jax.Array]:
    """The collective on a matrix that is its larger side, whose columns are spread over the devices.

    Its result is stored row by row, as most of what computes with it wants it.
    """
    if kind is CollectiveKind.ALL_GATHER:
        return lambda x: _rows_first(lax.all_gather(x[:, : x.shape[1] // size], _GROUP, axis=1, tiled=True))
    if kind is CollectiveKind.REDUCE_SCATTER:
        return lambda x: _rows_first(lax.psum_scatter(x, _GROUP, scatter_dimension=1, tiled=True))
    assert kind is CollectiveKind.ALL_TO_ALL
    return lambda x: _rows_first(lax.all_to_all(x, _GROUP, 0, 1, tiled=True))


_ROWS = {Measures.MEMORY: lambda row: row * 0.5 + 0.5, Measures.BOTH: _functions}
"""What the probes of memory do to a row."""
