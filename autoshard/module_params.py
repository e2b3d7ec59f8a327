"""The parameters of a Flax NNX module as a pytree of arrays, which knows how to put the module together again."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, slots=True)
class ModuleParams(Mapping[Any, Any]):
    """The parameters of a module, by name as in nested dicts; as a pytree, these and nothing else.

    Attributes:
      graphdef: What the module consists of, without arrays.
      arrays: Its parameters (`nnx.Param`).
    """

    graphdef: Any
    arrays: Mapping[Any, Any]

    @classmethod
    def of(cls, module: Any) -> tuple["ModuleParams", dict[Any, Any]]:
        """The parameters of a module, and the rest of its arrays: averages, random numbers and others.

        Sharding metadata of variables is left behind, with a warning.
        """
        graphdef, params, rest = nnx.split(module, nnx.Param, ...)
        annotated = [path for path, v in nnx.to_flat_state(params) if v.get_metadata().get("out_sharding")]
        if annotated:
            warnings.warn(
                f"`{'.'.join(map(str, annotated[0]))}` of {type(module).__name__} ({len(annotated)} in all) says how "
                "it is sharded, which does not bind in a TrainStep, where each stage has a mesh of its own. Leave it "
                "out; or, for one mesh, pin it: pins=autoshard.pins_from_logical_rules(nnx.state(module), rules, "
                "'state.params').",
                stacklevel=3,
            )
        return cls(graphdef, nnx.to_pure_dict(params)), nnx.to_pure_dict(rest)

    def module(self, mutable: Mapping[Any, Any]) -> Any:
        """The module of these parameters and the rest of its arrays."""
        return nnx.merge(self.graphdef, dict(self.arrays), dict(mutable))

    def __getitem__(self, name: Any) -> Any:
        return self.arrays[name]

    def __iter__(self):
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """For JAX: the entries by name."""
        names = tuple(sorted(self.arrays, key=str))
        return tuple((jax.tree_util.DictKey(name), self.arrays[name]) for name in names), (names, self.graphdef)

    def tree_flatten(self) -> tuple[Any, Any]:
        """For JAX: the entries."""
        entries, told = self.tree_flatten_with_keys()
        return tuple(entry for _, entry in entries), told

    @classmethod
    def tree_unflatten(cls, told: Any, entries: Any) -> "ModuleParams":
        """For JAX: the parameters whose entries are these."""
        names, graphdef = told
        return cls(graphdef, dict(zip(names, entries, strict=True)))
