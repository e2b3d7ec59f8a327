"""The plan: what was decided for a program on a mesh, how good it is, and the ways to use it."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from autoshard.cluster.device import UNMEASURED
from autoshard.errors import PlanMismatchError
from autoshard.execution.apply import partition_spec
from autoshard.execution.jit import Interface, PlannedFunction, device_mesh
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.layout import SpecEntries
from autoshard.planner.estimate import Estimate
from autoshard.solver.problem import Certificate
from autoshard.trace.flatten import TraceOptions
from autoshard.trace.trace import Trace, trace


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedTensor:
    """An argument or output leaf: its path, shape, dtype and planned layout (mesh axes per dimension).

    `is_weak` tells of an argument whether its dtype gives way to that of others (JAX's weak types). Python numbers in
    a state are such, and cease to be when it is restored from a file; the program is always traced as it was planned.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    entries: SpecEntries
    is_weak: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class CloseChoice:
    """A decision that could have gone another way for little: with everything else held fixed, it costs `extra_s`
    more.
    """

    name: str
    chosen: str
    alternative: str
    extra_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class MeshCandidate:
    """One logical mesh that was considered: its axes, the best step time found on it, and the proven bound.

    `step_s` is None where the bound alone ruled the mesh out, or where nothing fits the memory.
    """

    axes: tuple[tuple[str, int], ...]
    step_s: float | None
    bound_s: float
    verdict: str


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A sharding plan of one function on one logical mesh.

    Attributes:
      name: What produced it (`autoshard`, or a baseline's name).
      cluster: Name of the cluster. device: Name of its device type.
      axes: (name, size) of the mesh axes, major to minor. mesh_text: The mesh with its links, for people.
      arguments, outputs: The planned leaves, flattened.
      output_steps: For each output, the layouts that it passes through at the end; empty if it is made in its own.
      shardings: What each equation enforces, by equation number.
      equations: Signature of every traced equation: identifies the function.
      donate_argnums: Positional arguments whose buffers are reused.
      budget_bytes: The memory limit that was obeyed, per device; None for none.
      estimate: Predicted time, traffic and memory. certificate: How near the optimum the plan is proven to be.
      close_choices: Decisions that were nearly ties. candidates: The logical meshes considered.
      warnings: What was kept whole for want of knowledge, and the like.
      devices_per_node: How many of the devices the fastest links join; None where that is not known.
      figures: Where the figures of the hardware come from.
      configuration: The training configuration that the plan was made from, as JSON; None for a function of one's own.
      in_tree, out_tree: Pytree definitions; None in a plan read from a file, until it is applied to a function.
    """

    name: str
    cluster: str
    device: str
    axes: tuple[tuple[str, int], ...]
    mesh_text: str
    arguments: tuple[PlannedTensor, ...]
    outputs: tuple[PlannedTensor, ...]
    output_steps: tuple[tuple[SpecEntries, ...], ...]
    shardings: tuple[tuple[int, EquationPlan], ...]
    equations: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    budget_bytes: float | None
    estimate: Estimate
    certificate: Certificate
    close_choices: tuple[CloseChoice, ...] = ()
    candidates: tuple[MeshCandidate, ...] = ()
    warnings: tuple[str, ...] = ()
    devices_per_node: int | None = None
    configuration: str | None = None
    figures: str = UNMEASURED
    in_tree: Any = dataclasses.field(default=None, compare=False, repr=False)
    out_tree: Any = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Axis name to size, major to minor."""
        return dict(self.axes)

    @property
    def num_devices(self) -> int:
        """Devices that the plan needs."""
        return math.prod(n for _, n in self.axes)

    @property
    def in_specs(self) -> Any:
        """PartitionSpecs of the positional arguments: a tuple of pytrees like the arguments.

        In a plan read from a file, which does not know the pytree types, a mapping from path to PartitionSpec.
        """
        return _unflatten(self.in_tree, self.arguments)

    @property
    def out_specs(self) -> Any:
        """PartitionSpecs of the result: a pytree like it; see `in_specs` for a plan read from a file."""
        return _unflatten(self.out_tree, self.outputs)

    @property
    def interface(self) -> Interface:
        """What execution must know of the plan."""
        return Interface(
            self.axes,
            self.shardings,
            tuple(a.entries for a in self.arguments),
            tuple(o.entries for o in self.outputs),
            self.output_steps,
            self.donate_argnums,
        )

    def mesh(self, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
        """The device mesh of the plan over `devices` (default: all live devices)."""
        return device_mesh(self.axes, devices)

    def jit(self, fn: Callable[..., Any], devices: Sequence[Any] | None = None) -> PlannedFunction:
        """Makes `fn` run as planned.

        Args:
          fn: The function that was planned.
          devices: The devices to run on, in mesh order (major to minor); default all live devices. Devices of
            `jax.experimental.topologies` serve for ahead-of-time compilation.

        Returns:
          A callable that also has `.lower(*args).compile()`.

        Raises:
          MeshError: The number of devices is not the plan's.
          PlanMismatchError: On first use, if `fn` is no longer the planned function; names the first difference.
        """
        return PlannedFunction(fn, self.interface, self.mesh(devices), lambda args: self.check(fn, args))

    def check(self, fn: Callable[..., Any], args: Sequence[Any]) -> Trace:
        """Traces `fn(*args)` and verifies that it is the planned program.

        Raises:
          PlanMismatchError: Naming the first difference.
        """
        traced = trace(fn, self._as_planned(args), self.donate_argnums, TraceOptions())
        values = traced.graph.values
        found = [(a.name, values[a.value].shape, values[a.value].dtype) for a in traced.graph.arguments]
        planned = [(a.name, a.shape, a.dtype) for a in self.arguments]
        for k in range(max(len(found), len(planned))):
            ours, theirs = (x[k] if k < len(x) else None for x in (planned, found))
            if ours is None or theirs is None or ours[1:] != theirs[1:]:
                raise PlanMismatchError(
                    f"The plan was made for other arguments: leaf {k} is planned as {_leaf(ours)}, but the "
                    "function is called "
                    f"with {_leaf(theirs)}. Plan again for these arguments."
                )
        for k in range(max(len(self.equations), len(traced.graph.equations))):
            ours, theirs = (x[k] if k < len(x) else "nothing" for x in (self.equations, traced.graph.equations))
            if ours != theirs:
                line = next((o.source for o in traced.graph.operations if o.equation >= k), "")
                raise PlanMismatchError(
                    f"The function is no longer the one that was planned: equation {k} of {len(self.equations)} "
                    f"was `{ours}` and "
                    f"is now `{theirs}`{f' ({line})' if line else ''}. Plan the new function, or go back to the "
                    "old one "
                    "(another JAX or Flax version can also trace differently)."
                )
        return traced

    def _as_planned(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """`args`, those as shapes whose dtype gives way to others where the planned one did not, or the reverse."""
        leaves, tree = jax.tree_util.tree_flatten(tuple(args))
        if len(leaves) != len(self.arguments):
            return tuple(args)
        for k, (leaf, planned) in enumerate(zip(leaves, self.arguments, strict=True)):
            is_number = isinstance(leaf, int | float | complex) and not hasattr(leaf, "dtype")
            array = jax.typeof(leaf) if is_number else leaf
            if getattr(array, "weak_type", False) == planned.is_weak:
                continue
            if (array.shape, str(array.dtype)) == (planned.shape, planned.dtype):
                leaves[k] = jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=planned.is_weak)
        return jax.tree_util.tree_unflatten(tree, leaves)

    def init(
        self, init_fn: Callable[..., Any], *args: Any, argument: int = 0, devices: Sequence[Any] | None = None
    ) -> Any:
        """Creates an argument of the planned function already sharded, never whole on one device.

        Args:
          init_fn: Returns a pytree like the positional argument `argument`, e.g. the training state.
          *args: Arguments of `init_fn`, such as a seed.
          argument: Which positional argument of the planned function is made.
          devices: As for `jit`.

        Raises:
          PlanMismatchError: If the result has other leaves than the plan's argument.
        """
        shapes = jax.eval_shape(init_fn, *args)
        what = f"`{getattr(init_fn, '__name__', 'init_fn')}` must return"
        shardings = self._shardings_like(shapes, self._positional(argument), self.mesh(devices), what)
        return jax.jit(init_fn, out_shardings=shardings)(*args)

    def in_shardings(self, like: Any = None, argument: int | None = None, devices: Sequence[Any] | None = None) -> Any:
        """NamedShardings of the arguments, for `jax.device_put`, `jax.jit`, or restoring a checkpoint.

        Args:
          like: A pytree with the leaves of what is asked for, such as abstract arrays, whose structure the result has.
            Needed only for a plan read from a file, which does not know the pytree types and else gives a mapping from
            path to sharding.
          argument: Which positional argument; None for the tuple of all.
          devices: As for `jit`.

        Raises:
          PlanMismatchError: `like` has other leaves than the plan.
        """
        tensors = self.arguments if argument is None else self._positional(argument)
        mesh = self.mesh(devices)
        if like is not None:
            return self._shardings_like(like, tensors, mesh, "`like` must be")
        shardings = [NamedSharding(mesh, partition_spec(t.entries)) for t in tensors]
        if self.in_tree is None:
            return {t.name: sharding for t, sharding in zip(tensors, shardings, strict=True)}
        tree = self.in_tree if argument is None else self.in_tree.children()[argument]
        return jax.tree_util.tree_unflatten(tree, shardings)

    def _shardings_like(self, like: Any, tensors: Sequence[PlannedTensor], mesh: jax.sharding.Mesh, what: str) -> Any:
        """NamedShardings of `tensors` in the structure of `like`; `what` opens the error if its leaves are others."""
        leaves, tree = jax.tree_util.tree_flatten(like)
        found = [(tuple(l.shape), str(l.dtype)) for l in leaves]
        planned = [(t.shape, t.dtype) for t in tensors]
        if found != planned:
            k = next((k for k, pair in enumerate(zip(found, planned, strict=False)) if pair[0] != pair[1]), None)
            k = min(len(found), len(planned)) if k is None else k
            first = _leaf((tensors[k].name, tensors[k].shape, tensors[k].dtype)) if k < len(tensors) else "nothing"
            raise PlanMismatchError(
                f"{what} a pytree like the argument of the planned function, which has {len(planned)} leaves; it has "
                f"{len(found)}, and leaf {k} is the first that differs (planned: {first}). Plan again for these leaves."
            )
        shardings = [NamedSharding(mesh, partition_spec(t.entries)) for t in tensors]
        return jax.tree_util.tree_unflatten(tree, shardings)

    def _positional(self, argument: int) -> tuple[PlannedTensor, ...]:
        """The leaves of one positional argument."""
        if self.in_tree is not None:
            counts = [child.num_leaves for child in self.in_tree.children()]
            if not -len(counts) <= argument < len(counts):
                raise PlanMismatchError(
                    f"The planned function has {len(counts)} arguments; argument={argument} is none of them."
                )
            start = sum(counts[: argument % len(counts)])
            return self.arguments[start : start + counts[argument]]
        heads = list(dict.fromkeys(a.name.split(".")[0] for a in self.arguments))
        return tuple(a for a in self.arguments if a.name.split(".")[0] == heads[argument])

    def save(self, path: str | Path) -> None:
        """Writes the plan as versioned JSON; the file appears whole or not at all."""
        from autoshard.plans.files import write_plan  # the one upward step: reading makes Plans, so files imports this

        write_plan(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Reads a plan written by `save`.

        Raises:
          FileFormatError: If the file is not a plan of a known version.
        """
        from autoshard.plans.files import read_plan

        return read_plan(path)

    def verify(
        self, fn: Callable[..., Any], *args: Any, target: str | None = None, time_limit_s: float | None = None
    ) -> Any:
        """Compiles `fn(*args)` as planned, for devices that need not be there, and compares; see `verify/verify.py`.

        Returns:
          A `Verification`: predictions beside what the compiler made of the plan. Print it.
        """
        from autoshard.verify.verify import verify  # the one room above that is reached from here

        return verify(self, fn, *args, target=target, time_limit_s=time_limit_s)

    def explain(self) -> str:
        """The plan for people: mesh, parameters, communication, memory, near ties, proof. Also `print(plan)`."""
        from autoshard.plans.explain import explain

        return explain(self)

    def __str__(self) -> str:
        return self.explain()


def _leaf(leaf: tuple | None) -> str:
    return "nothing" if leaf is None else f"`{leaf[0]}` {leaf[2]}{list(leaf[1])}"


def _unflatten(tree: Any, tensors: Sequence[PlannedTensor]) -> Any:
    specs = [partition_spec(t.entries) for t in tensors]
    if tree is None:
        return {t.name: s for t, s in zip(tensors, specs, strict=True)}
    return jax.tree_util.tree_unflatten(tree, specs)
