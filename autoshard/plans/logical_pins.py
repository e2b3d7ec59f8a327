"""A Flax model's own logical axes: their names, and pins from them with rules that are given separately."""

import collections
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from jax.sharding import PartitionSpec

from autoshard.errors import PinError
from autoshard.plans.logical import Names
from autoshard.trace.annotations import box_spec, is_box

Rules = Sequence[tuple[str, str | Sequence[str] | None]]
"""Flax's rules: pairs of a logical name and the mesh axes that split a dimension of that name."""


def pins_from_logical_rules(tree: Any, rules: Rules, prefix: str = "") -> dict[str, PartitionSpec]:
    """The layouts that Flax would give to annotated parameters, as pins for `autoshard.plan`.

    Linen's boxes (`nn.with_logical_partitioning`) are read as Linen reads them, with the rules in order of priority;
    NNX variables (`nnx.with_partitioning`, `out_sharding`) as NNX does, with one rule a name. `nn.with_partitioning`
    names mesh axes, which no rule changes.

    Args:
      tree: Parameters, or a whole training state, with Flax's boxes or variables; abstract ones will do.
      rules: The rules, as for `flax.linen.logical_axis_rules`.
      prefix: The path of `tree` among the arguments of the function to be planned, such as `state.params`.

    Returns:
      Path of each annotated array to its PartitionSpec. Paths are those of the tree without its boxes, for a function
      that takes plain arrays. One that takes the boxes themselves needs no pins: plan it under the rules, as in
      `with flax.linen.logical_axis_rules(rules): autoshard.plan(...)`.

    Raises:
      PinError: Nothing is annotated; NNX is given two rules that contradict each other for one name; or the rules split
        two dimensions of an array by the same mesh axis.
    """
    rules = tuple((name, axes if axes is None or isinstance(axes, str) else tuple(axes)) for name, axes in rules)
    pins: dict[str, PartitionSpec] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_box)[0]:
        if not is_box(leaf):
            continue
        full = ".".join(filter(None, (prefix, jax.tree_util.keystr(path, simple=True, separator="."))))
        if isinstance(leaf, nnx.Variable):
            _check_single(leaf, rules, full)
        with nn.logical_axis_rules(rules):
            spec = box_spec(leaf)
        if spec is not None:
            pins[full] = _checked(spec, full)
    if not pins:
        raise _nothing_named()
    return pins


def logical_names(tree: Any, prefix: str = "") -> dict[str, Names]:
    """The names that a Flax model has given to the dimensions of its parameters, for `autoshard.logical_axes`.

    As in Flax, dimensions behind the last name have none: a kernel of three dimensions may have two names.

    Args:
      tree: Parameters, or a whole training state, with Flax's boxes or variables; abstract ones will do.
      prefix: The path of `tree` among the arguments of the planned function, such as `state.params`.

    Returns:
      Path of each annotated array to a name for each dimension; of the tree without its boxes, and of the boxes.

    Raises:
      PinError: Nothing is annotated, or a dimension has several names, as those of mesh axes may be.
    """
    found: dict[str, Names] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_box)[0]:
        names = _names(leaf) if is_box(leaf) else None
        if not names:
            continue
        full = ".".join(filter(None, (prefix, jax.tree_util.keystr(path, simple=True, separator="."))))
        several = next((name for name in names if not isinstance(name, str | None)), None)
        if several is not None:
            raise PinError(
                f"A dimension has one logical name, but `{full}` gives {several} to one: such are the names of mesh "
                f"axes, which need no rules. Give it names by its path instead: names={{'{full}': ('embed', None)}}."
            )
        ((inner, array),) = jax.tree_util.tree_flatten_with_path(leaf)[0]
        row = (*names, *[None] * (len(array.shape) - len(names)))
        found[full] = found[f"{full}.{jax.tree_util.keystr(inner, simple=True, separator='.')}"] = row
    if not found:
        raise _nothing_named()
    return found


def _names(box: Any) -> Sequence[Any] | None:
    return box.names if isinstance(box, nn.Partitioned) else box.get_metadata().get("out_sharding")


def _nothing_named() -> PinError:
    return PinError(
        "Nothing in the tree carries names of axes. Pass it with Flax's boxes or variables: the result of "
        "`jax.eval_shape(model.init, ...)` before `nn.meta.unbox`, or `nnx.state(model)`."
    )


def _check_single(box: nnx.Variable, rules: Rules, path: str) -> None:
    """NNX would follow the last of several rules for a name without a word."""
    names = box.get_metadata().get("out_sharding") or ()
    counts = collections.Counter(name for name, _ in dict.fromkeys(rules) if name in names)
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise PinError(
            f"NNX has one rule for a name, the last, but `{twice}` of `{path}` has several: "
            f"{[axes for name, axes in rules if name == twice]}. Keep one of them."
        )


def _checked(spec: PartitionSpec, path: str) -> PartitionSpec:
    axes = [a for entry in spec if entry is not None for a in ((entry,) if isinstance(entry, str) else entry)]
    twice = next((a for a in axes if axes.count(a) > 1), None)
    if twice is not None:
        raise PinError(
            f"The rules make {spec} of `{path}`: a mesh axis may split at most one dimension, but `{twice}` splits two "
            "(Linen would skip the second, NNX fails when the array is made). Map one of the names elsewhere."
        )
    return spec
