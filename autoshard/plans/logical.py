"""A plan as Flax's logical axes: a name for every dimension of every argument, and rules from names to mesh axes.

Linen reads rules as a list in order of priority and skips a mesh axis that the tensor already uses
(`flax.linen.logical_to_mesh_axes`); NNX reads them as a mapping, in which the last entry of a name counts, and checks
nothing (`flax.nnx.get_partition_spec`). Rules that hold each name once, names that no tensor bears twice, and layouts
that use no mesh axis twice are read alike by both, and such are made here.
"""

import dataclasses
import json
import os
from typing import Any

import jax
import pydantic
from jax.sharding import PartitionSpec

from autoshard.errors import ExportError, FileFormatError
from autoshard.execution.placement import partition_spec
from autoshard.files import read_yaml
from autoshard.plans.text import layout_text, pattern
from autoshard.trace.annotations import is_box

Names = tuple[str | None, ...]
"""The logical name of each dimension of a tensor; None for a dimension that is never split."""

Axes = tuple[str, ...]
"""The mesh axes that split a dimension, major to minor."""


@dataclasses.dataclass(frozen=True, slots=True)
class Deviation:
    """Tensors that the rules lay out otherwise than the plan does, since another tensor bears the same name.

    Attributes:
      path: Their path, `*` for numbers. count: How many they are. names: The names of their dimensions.
      planned, ruled: Mesh axes on each dimension in the plan and by the rules.
    """

    path: str
    count: int
    names: Names
    planned: tuple[Axes, ...]
    ruled: tuple[Axes, ...]

    def __str__(self) -> str:
        names = ", ".join(name or "-" for name in self.names)
        return (
            f"`{self.path}` ({self.count}, named {names}) is planned as {layout_text(self.planned)}, by the rules "
            f"{layout_text(self.ruled)}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class LogicalAxes:
    """Logical names and rules.

    Attributes:
      mesh: (name, size) of the mesh axes, major to minor.
      axes: For each logical name, once, the mesh axes that split a dimension of that name.
      names: For each path of an argument, or path with `*` for its numbers, the names of its dimensions.
      deviations: Tensors that the rules lay out otherwise than the plan; empty unless the nearest rules were asked for.
    """

    mesh: tuple[tuple[str, int], ...]
    axes: tuple[tuple[str, Axes], ...]
    names: tuple[tuple[str, Names], ...]
    deviations: tuple[Deviation, ...] = ()

    @property
    def rules(self) -> tuple[tuple[str, str | Axes | None], ...]:
        """The rules in Flax's form, for Linen and NNX alike."""
        return tuple((name, a[0] if len(a) == 1 else a or None) for name, a in self.axes)

    @property
    def pins(self) -> dict[str, PartitionSpec]:
        """What the rules say of every argument, as pins: a plan made with them keeps to the names."""
        axes = dict(self.axes)
        layout = lambda names: tuple(() if name is None else axes[name] for name in names)
        return {path: partition_spec(layout(names)) for path, names in self.names}

    def names_of(self, path: str) -> Names:
        """The names of the dimensions of the argument at `path`; empty for a scalar.

        Raises:
          ExportError: The plan has no such argument.
        """
        table = dict(self.names)
        for key in (path, pattern(path)):
            if key in table:
                return table[key]
        raise ExportError(f"The plan has no argument `{path}`. Its arguments are: {', '.join(list(table)[:6])}, ...")

    def specs(self, tree: Any, prefix: str = "") -> Any:
        """PartitionSpecs of logical names for `tree`, as `flax.linen.logical_to_mesh_sharding` takes them.

        Args:
          tree: An argument of the planned function, or a part of it. Flax boxes and variables in it count as leaves.
          prefix: The path of `tree`, such as `state` or `state.params`.

        Raises:
          ExportError: The plan has no such argument.
        """
        known = {key for key, _ in self.names}

        def spec(path: Any, leaf: Any) -> PartitionSpec:
            shape = getattr(jax.tree_util.tree_leaves(leaf)[0], "shape", ()) if jax.tree_util.tree_leaves(leaf) else ()
            if not shape:
                return PartitionSpec()
            inner = jax.tree_util.tree_flatten_with_path(leaf)[0][0][0]
            texts = [jax.tree_util.keystr(p, simple=True, separator=".") for p in ((*path, *inner), path)]
            full = [".".join(filter(None, (prefix, text))) for text in texts]
            return PartitionSpec(*self.names_of(next((f for f in full if {f, pattern(f)} & known), full[-1])))

        return jax.tree_util.tree_map_with_path(spec, tree, is_leaf=is_box)

    def yaml(self) -> str:
        """The names and rules as a YAML file that `LogicalAxes.load` reads."""
        quoted = lambda value: json.dumps(value, ensure_ascii=False)
        lines = ["format: autoshard-logical-axes", "version: 1", f"mesh: {quoted([list(a) for a in self.mesh])}"]
        lines += ["logical_axis_rules:", *(f"  - {quoted([name, list(a)])}" for name, a in self.axes)]
        lines += ["logical_axes:", *(f"  {quoted(path)}: {quoted(list(names))}" for path, names in self.names)]
        return "\n".join(lines) + "\n"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "LogicalAxes":
        """Reads what `yaml` wrote.

        Raises:
          FileFormatError: The file is something else.
        """
        raw = read_yaml(path)
        try:
            document = _Document.model_validate(raw)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise FileFormatError(
                f"`{path}` does not hold logical axes: at `{where}`: {first['msg']}. Export the plan again."
            ) from error
        return cls(document.mesh, document.logical_axis_rules, tuple(document.logical_axes.items()))


class _Document(pydantic.BaseModel):
    """The schema of a file of logical axes."""

    model_config = pydantic.ConfigDict(extra="forbid")
    format: str = pydantic.Field(pattern="^autoshard-logical-axes$")
    version: int = pydantic.Field(ge=1, le=1)
    mesh: tuple[tuple[str, int], ...]
    logical_axis_rules: tuple[tuple[str, Axes], ...]
    logical_axes: dict[str, Names]
