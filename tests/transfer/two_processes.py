"""What each of two processes with two CPU devices each runs in the test of moves between processes.

Arguments: the coordinator's address, the number of the process, and a folder in which they tell each other things.
Each line that it prints is one thing found out.
"""

import itertools
import os
import pathlib
import random
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.errors import TransferError
from autoshard.transfer.cross_mesh import CrossMeshTransfer
from autoshard.transfer.routes import find_routes

ADDRESS, NUMBER, FOLDER = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])


def layout(devices, spec):
    return NamedSharding(Mesh(np.array([jax.devices()[n] for n in devices]), ("x",)), P(*spec))


def laid(values, sharding):
    """`values` in that layout; only shape and type where no device of it is here."""
    if not sharding.addressable_devices:
        return jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)
    if jnp.issubdtype(values.dtype, jax.dtypes.prng_key):
        indices = sharding.addressable_devices_indices_map(values.shape).items()
        shards = [jax.device_put(values[index], device) for device, index in indices]
        return jax.make_array_from_single_device_arrays(values.shape, sharding, shards)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def plain(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def check(meshes, values, source, target, **options):
    moved = meshes.move(laid(values, source), target, **options)
    assert (
        moved.shape == values.shape
        and moved.dtype == values.dtype
        and moved.sharding.is_equivalent_to(target, moved.ndim)
    )
    assert isinstance(moved, jax.Array) == bool(target.addressable_devices)
    if isinstance(moved, jax.Array):
        meshes.wait(moved)
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(plain(shard.data), plain(values)[shard.index])


def moves(meshes):
    """Random layouts over any devices, and types, some of several at once."""
    rng = random.Random(1)
    whole = np.arange(8 * 12).reshape(8, 12)
    fixed = [((0, 1), (2, 3)), ((0, 1), (2,)), ((3,), (0, 1)), ((2, 3), (0, 1, 2, 3)), ((1, 3), (0, 2))]
    for source, target in fixed:
        for one, two in itertools.product([("x",), (None, "x"), ()], [("x",), ()]):
            check(meshes, whole.astype(np.float32), layout(source, one), layout(target, two))
    for dtype in (jnp.bool_, jnp.int8, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4):
        devices = [rng.sample(range(4), rng.choice([1, 2, 4])) for _ in range(2)]
        check(meshes, whole.astype(dtype), *(layout(some, rng.choice([("x",), (None, "x")])) for some in devices))
    check(meshes, np.float32(3), layout((0, 1), ()), layout((3,), ()))
    check(meshes, np.zeros((0, 4), np.int32), layout((0, 1), ("x",)), layout((3,), ()))
    check(meshes, jax.random.split(jax.random.key(3), 4), layout((0, 1), ("x",)), layout((1, 3), ()))
    routes = find_routes((8, 12), layout((0, 1), ("x",)), layout((2, 3), ()))
    assert sum(route.box.size for route in routes.distinct() if route.crosses) == 8 * 12
    copied = [route for one in routes.targets for route in one.routes if route.receiver != one.device]
    assert sum(route.box.size for route in copied) == 8 * 12
    print("moves agree")


def donation(meshes):
    """What was sent with may_alias=False arrives although it is donated at once."""
    whole = np.arange(1 << 20, dtype=np.float32)
    array = laid(whole, layout((2, 3), ("x",)))
    moved = meshes.move(array, layout((0, 1), ("x",)), may_alias=False)
    if NUMBER == 1:
        jax.jit(lambda x: x + 1, donate_argnums=0)(array)
        assert array.is_deleted()
    else:
        meshes.wait(moved)
        for shard in moved.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index])
        print("donated arrives")


def told(*names):
    """Waits until the other process has written the file of each name."""
    for name in names:
        while not (FOLDER / name).exists():
            time.sleep(0.01)


def failures(meshes):
    """The second process first stalls, then dies; the first is told of both."""
    source, target = layout((2, 3), ("x",)), layout((0, 1), ())
    array = laid(np.ones((4, 4), np.float32), source)
    if NUMBER == 1:
        told("offer")
        meshes.move(array, target)
        told("die")
        os.kill(os.getpid(), signal.SIGKILL)
    moved = meshes.move(array, target, name="late activations")
    total = jax.jit(jnp.sum)(moved)
    try:
        meshes.wait(total, timeout_s=0.5)
    except TransferError as error:
        print("stalled:", error)
    (FOLDER / "offer").touch()
    meshes.wait(total)
    print("came after all:", total)
    moved = meshes.move(array, target, name="lost gradients")
    total = jax.jit(jnp.sum)(moved)
    (FOLDER / "die").touch()
    for waits in (lambda: meshes.wait(total), lambda: meshes.move(array, target, name="more gradients")):
        try:
            waits()
        except TransferError as error:
            print("died:", error)


jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(ADDRESS, 2, NUMBER)
cross = CrossMeshTransfer(timeout_s=100, coordinator_address=ADDRESS)
moves(cross)
donation(cross)
sys.stdout.flush()
failures(cross)
sys.stdout.flush()
os._exit(0)  # an orderly end would wait for the other process
