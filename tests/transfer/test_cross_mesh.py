"""Moves between meshes: the array stays what it is, and no more travels than must."""

import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import transfer
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from autoshard.transfer.cross_mesh import CrossMeshTransfer
from autoshard.transfer.routes import boxes_of, find_routes

AXES = ("x", "y")


def layout(devices, sizes, spec, **options):
    """A layout over the devices with these numbers."""
    chosen = np.array([jax.devices()[n] for n in devices]).reshape(sizes)
    return NamedSharding(Mesh(chosen, AXES[: len(sizes)]), P(*spec), **options)


def random_layout(rng, ndim):
    """A mesh of one to eight devices in any order, and a spec in which each axis splits one dimension or none."""
    sizes = rng.choice([(1,), (2,), (4,), (8,), (2, 2), (2, 4), (4, 2), (1, 3), (6,)])
    spec = [[] for _ in range(ndim)]
    for axis in rng.sample(AXES[: len(sizes)], len(sizes)):
        where = rng.randrange(ndim + 1)
        if where < ndim:
            spec[where].append(axis)
    return layout(rng.sample(range(8), math.prod(sizes)), sizes, [tuple(axes) or None for axes in spec])


def values(shape, dtype=jnp.int32):
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


def moved_elements(routes):
    """Elements that leave one device for another."""
    sent = [route for route in routes.distinct() if route.source != route.receiver]
    copied = [route for one in routes.targets for route in one.routes if route.receiver != one.device]
    return sum(route.box.size for route in (*sent, *copied))


@pytest.fixture(scope="module")
def meshes():
    return CrossMeshTransfer()


@pytest.mark.parametrize("seed", range(12))
def test_an_array_stays_what_it_is_and_only_what_is_missing_travels(meshes, seed):
    rng = random.Random(seed)
    shape = tuple(rng.choice([24, 48]) for _ in range(rng.randint(1, 3)))
    source, target = random_layout(rng, len(shape)), random_layout(rng, len(shape))
    array = jax.device_put(values(shape), source)
    moved = meshes.move(array, target)
    assert moved.sharding == target
    np.testing.assert_array_equal(moved, values(shape))
    routes = find_routes(shape, source, target)
    # By hand, element by element: a device needs what it wants and does not hold, once.
    missing = 0
    for device, index in target.devices_indices_map(shape).items():
        lacks = np.zeros(shape, bool)
        lacks[index] = True
        if device in source.device_set:
            lacks[source.devices_indices_map(shape)[device]] = False
        missing += lacks.sum()
    # What a device holds in part only is taken from it; other parts come along with nothing.
    assert moved_elements(routes) == missing
    assert not any(route.crosses for route in routes.distinct())


def test_routes_tile_what_each_device_wants():
    rng = random.Random(3)
    for _ in range(50):
        source, target = random_layout(rng, 2), random_layout(rng, 2)
        routes, held = find_routes((24, 48), source, target), boxes_of((24, 48), source)
        for one in routes.targets:
            assert sum(route.box.size for route in one.routes) == one.box.size
            for a, b in itertools.combinations(one.routes, 2):
                assert a.box.overlap(b.box) is None
            for route in one.routes:
                assert route.box.overlap(held[route.source]) == route.box == route.box.overlap(one.box)


def test_replicas_share_the_load():
    routes = find_routes((8, 8), layout(range(4), (4,), ()), layout(range(4, 8), (4,), ("x",)))
    assert {route.source for route in routes.distinct()} == set(jax.devices()[:4])
    assert moved_elements(routes) == 64


@pytest.mark.parametrize(
    "dtype", [jnp.bool_, jnp.uint8, jnp.int32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int4, jnp.complex64], ids=str
)
def test_types(meshes, dtype):
    source, target = layout(range(4), (4,), ("x",)), layout((6, 1), (2,), (None, "x"))
    array = jax.device_put(values((4, 4), dtype), source)
    moved = meshes.move(array, target)
    assert moved.dtype == array.dtype and moved.sharding == target
    np.testing.assert_array_equal(moved, np.asarray(array))


def test_keys_scalars_and_nothing(meshes):
    source, target = layout(range(4), (4,), ("x",)), layout((5, 6), (2,), ("x",))
    keys = jax.device_put(jax.random.split(jax.random.key(7), 4), source)
    moved = meshes.move(keys, target)
    assert moved.dtype == keys.dtype and moved.sharding == target
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))
    scalar = meshes.move(jax.device_put(jnp.float32(3), layout(range(4), (4,), ())), layout((5, 6), (2,), ()))
    assert scalar == 3 and len(scalar.devices()) == 2
    for empty in (jnp.zeros((0, 4), jnp.int8), jax.random.split(jax.random.key(7), 0)):
        moved = meshes.move(jax.device_put(empty, source), target)
        assert moved.shape == empty.shape and moved.dtype == empty.dtype and moved.sharding == target


def test_nothing_goes_through_the_host(meshes):
    source, target = layout(range(4), (4,), ("x",)), layout((6, 1, 2), (3,), (None, "x"))
    array = jax.device_put(values((8, 12)), source)
    with jax.transfer_guard_host_to_device("disallow_explicit"), jax.transfer_guard_device_to_host("disallow_explicit"):
        moved = meshes.move(array, target)
        with pytest.raises(Exception, match="[Dd]isallowed"):
            jax.device_put(np.ones(4), jax.devices()[0])
    np.testing.assert_array_equal(moved, values((8, 12)))


def test_what_lies_right_stays(meshes):
    source = layout(range(4), (4,), ("x",))
    array = jax.device_put(values((8, 8)), source)
    assert meshes.move(array, source) is array
    same = meshes.move(array, layout(range(4), (2, 2), (("x", "y"),)))
    assert [shard.data.unsafe_buffer_pointer() for shard in same.addressable_shards] == [
        shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards
    ]
    alone = meshes.move(array, SingleDeviceSharding(jax.devices()[7]))
    np.testing.assert_array_equal(alone, values((8, 8)))


def test_what_is_not_shared_may_be_donated(meshes):
    array = jax.device_put(values((8, 8)), layout(range(4), (4,), ("x",)))
    for target in (array.sharding, layout((3, 1, 7), (3,), ())):
        moved = meshes.move(array, target, may_alias=False)
        jax.jit(lambda x: x + 1, donate_argnums=0)(jax.device_put(array, array.sharding, may_alias=True))
        assert array.is_deleted()
        np.testing.assert_array_equal(moved, values((8, 8)))
        array = jax.device_put(values((8, 8)), array.sharding)


def test_the_host_does_not_wait(meshes):
    source, target = layout(range(4), (4,), ("x",)), layout((6, 1, 2), (3,), (None, "x"))
    first = jax.devices()[0]
    server = transfer.start_transfer_server(first.client, "127.0.0.1:0", ["127.0.0.1:0"])
    wanted = jax.ShapeDtypeStruct((8, 12), jnp.int32, sharding=SingleDeviceSharding(first))
    late = server.connect(server.address()).pull(1, wanted)  # is there when something is offered under this number
    moved = meshes.move(meshes.move(late, source), target)
    assert not moved.is_ready()
    server.await_pull(1, jax.device_put(values((8, 12)), first))
    meshes.wait({"moved": moved, "other": 3})
    np.testing.assert_array_equal(moved, values((8, 12)))


def test_memory_kinds(meshes):
    source = layout(range(4), (4,), ("x",))
    target = layout((5, 6), (2,), ("x",), memory_kind="pinned_host")
    array = jax.device_put(values((8, 8)), source)
    moved = meshes.move(array, target)
    assert moved.sharding == target
    np.testing.assert_array_equal(meshes.move(moved, source), values((8, 8)))
