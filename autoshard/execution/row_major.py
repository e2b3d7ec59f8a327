"""Arrays that are stored row by row."""

from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, PartitionSpec


def row_major(x: Any) -> Any:
    """`x`, an array of one device, stored with its last dimension innermost."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def shards_row_major(x: Any, spec: PartitionSpec, mesh: Mesh) -> Any:
    """`x`, which `spec` spreads over the `mesh`, with each shard stored so."""
    return jax.shard_map(row_major, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)
