"""A training state created where a staged plan says."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.pipelines.run.device_meshes import DeviceMeshes
from autoshard.pipelines.run.update import StateLayout
from autoshard.transfer.cross_mesh import as_array


def create(layout: StateLayout, device_meshes: DeviceMeshes, init_fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """`init_fn(*args)`, each leaf made on the submesh where it lives; what every device keeps is made on each submesh.

    The compiler leaves out of each submesh's program what the others make.
    """
    copies: dict[int, list[Any]] = collections.defaultdict(list)
    made: dict[int, Any] = {}
    for submesh, mesh in enumerate(device_meshes.meshes):
        if not device_meshes.is_local(submesh):
            continue
        own = {n: l.sharding for n, l in enumerate(layout.leaves) if l.submesh == submesh}
        own |= {n: NamedSharding(mesh, PartitionSpec()) for n, l in enumerate(layout.leaves) if l.submesh is None}
        some = lambda *args, own=own: {n: x for n, x in enumerate(jax.tree.leaves(init_fn(*args))) if n in own}
        for n, leaf in jax.jit(some, out_shardings=own)(*args).items():
            if layout.leaves[n].submesh is None:
                copies[n].append(leaf)
            else:
                made[n] = leaf
    made |= {n: device_meshes.joined(those) for n, those in copies.items()}
    shapes = jax.tree.leaves(jax.eval_shape(init_fn, *args))
    for n, (x, located) in enumerate(zip(shapes, layout.leaves, strict=True)):
        if n not in made:  # another process has it
            made[n] = as_array(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=located.sharding))
    return jax.tree.unflatten(layout.tree, [made[n] for n in range(len(layout.leaves))])
