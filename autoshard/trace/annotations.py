"""Sharding annotations that the user's program already carries.

They are honoured: `jax.lax.with_sharding_constraint`, the shardings of `shard_map` regions, sharded abstract arguments
(`jax.ShapeDtypeStruct(..., sharding=...)`), and Flax's partitioning metadata (`nn.with_partitioning`, and the
`out_sharding` of an NNX variable).
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.extend.core as jex
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.graph.graph import FixedLayout


def fixed_of_spec(spec: PartitionSpec, rank: int) -> FixedLayout:
    """A PartitionSpec as a `FixedLayout`: unconstrained dimensions are None, missing trailing ones are whole."""
    entries = list(spec) + [None] * (rank - len(spec))
    return tuple(
        None if e is PartitionSpec.UNCONSTRAINED else () if e is None else (e,) if isinstance(e, str) else tuple(e)
        for e in entries
    )


def constraint_layout(equation: jex.JaxprEqn) -> FixedLayout | None:
    """The layout that a `sharding_constraint` equation demands; None if it names no mesh axes."""
    sharding = equation.params.get("sharding")
    if not isinstance(sharding, NamedSharding):
        return None
    rank = len(equation.outvars[0].aval.shape)
    layout = list(fixed_of_spec(sharding.spec, rank))
    for d in equation.params.get("unconstrained_dims") or ():
        layout[d] = None
    return tuple(layout)


def shard_map_layouts(equation: jex.JaxprEqn) -> tuple[tuple[FixedLayout, ...], tuple[FixedLayout, ...]]:
    """The layouts at the boundary of a `shard_map` region."""

    def read(specs, variables):
        return tuple(fixed_of_spec(s, len(v.aval.shape)) for s, v in zip(specs, variables, strict=True))

    p = equation.params
    return read(p["in_specs"], equation.invars), read(p["out_specs"], equation.outvars)


def argument_layout(leaf: Any) -> FixedLayout | None:
    """The layout that an abstract argument carries; None for concrete arrays and unannotated shapes.

    Concrete arrays are where they happen to be, which is no wish of the user; annotate with
    `jax.ShapeDtypeStruct(..., sharding=...)` or use `pins`.
    """
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return None
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not any(e is not None for e in sharding.spec):
        return None
    return fixed_of_spec(sharding.spec, len(leaf.shape))


def partitioning_metadata(args: Sequence[Any]) -> dict[str, FixedLayout]:
    """The layouts that Flax boxes among `args` name, by the dotted path of the array inside the box.

    A `LogicallyPartitioned` box names logical axes, which only rules can turn into mesh axes; its names are read as
    they are, and the planner refuses those that the mesh does not have.
    """
    is_box = lambda x: isinstance(x, nn.Partitioned | nnx.Variable)
    layouts: dict[str, FixedLayout] = {}
    for path, box in jax.tree_util.tree_flatten_with_path(tuple(args), is_leaf=is_box)[0]:
        if not is_box(box):
            continue
        names = box.names if isinstance(box, nn.Partitioned) else box.get_metadata().get("out_sharding")
        inner = jax.tree_util.tree_flatten_with_path(box)[0]
        if not names or len(inner) != 1:
            continue
        full = jax.tree_util.keystr((*path, *inner[0][0]), simple=True, separator=".")
        layouts[full] = fixed_of_spec(PartitionSpec(*names), len(inner[0][1].shape))
    return layouts
