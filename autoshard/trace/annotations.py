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
from autoshard.trace.walk import shape_of


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
    rank = len(shape_of(equation.outvars[0]))
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


def is_box(leaf: Any) -> bool:
    """Whether `leaf` is one of Flax's boxes or variables, which may name the axes of the array inside."""
    return isinstance(leaf, nn.Partitioned | nnx.Variable)


def box_spec(box: nn.Partitioned | nnx.Variable) -> PartitionSpec | None:
    """What Flax makes of a box under the logical axis rules in force; None if it is not annotated.

    Linen's rules are a list in order of priority, those of NNX a mapping. Without rules, Linen's logical names demand
    nothing, as in Flax itself (`nn.with_logical_constraint` does nothing then), and all others are those of mesh axes.
    """
    if isinstance(box, nn.LogicallyPartitioned):
        rules = box.rules or nn.get_logical_axis_rules()
        return nn.spmd.logical_to_mesh_axes(box.names, rules) if rules else None
    if isinstance(box, nn.Partitioned):
        return PartitionSpec(*box.names)
    if not box.get_metadata().get("out_sharding"):
        return None
    return nnx.get_partition_spec(box).get_value()


def partitioning_metadata(args: Sequence[Any]) -> dict[str, FixedLayout]:
    """The layouts that Flax boxes among `args` name, by the dotted path of the array inside the box.

    Logical names become mesh axes by the rules in force (`flax.linen.logical_axis_rules`, `nnx.logical_axis_rules`);
    the name of a mesh axis is read as it is, and the planner refuses it if the mesh has no such axis.
    """
    layouts: dict[str, FixedLayout] = {}
    for path, box in jax.tree_util.tree_flatten_with_path(tuple(args), is_leaf=is_box)[0]:
        if not is_box(box):
            continue
        spec = box_spec(box)
        inner = jax.tree_util.tree_flatten_with_path(box)[0]
        if not spec or len(inner) != 1:
            continue
        full = jax.tree_util.keystr((*path, *inner[0][0]), simple=True, separator=".")
        layouts[full] = fixed_of_spec(spec, len(inner[0][1].shape))
    return layouts
