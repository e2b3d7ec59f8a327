"""Runs a planned function: one `jax.jit` with the plan's shardings on its interface and in its interior."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding

from autoshard.compiler.candidates import Candidate
from autoshard.compiler.options import GPU_PLATFORMS
from autoshard.compiler.schedule import Schedule
from autoshard.errors import MeshError
from autoshard.execution.absent_hosts import told_of_hosts
from autoshard.execution.apply import Evaluator
from autoshard.execution.candidates import Choosing, Compile, CompiledCandidate, compile_candidates
from autoshard.execution.donated import given_again, refuse_deleted
from autoshard.execution.placement import refuse_host_memory, sharding_of
from autoshard.execution.taken_options import options_on
from autoshard.execution.trial import Trial, trial_of
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.layout import SpecEntries
from autoshard.trace.trace import Trace

_LOGGER = logging.getLogger(__name__)


def device_mesh(
    axes: Sequence[tuple[str, int]],
    devices: Sequence[Any] | None,
    order: Sequence[int] = (),
    torus: Sequence[int] = (),
) -> Mesh:
    """A mesh of `devices` (default: all live ones) with the plan's axes, major to minor, all of type Auto.

    Args:
      axes: (name, size) of each. devices: In the order of the cluster, the order of `jax.devices()`.
      order, torus: Which device is at which coordinate; see `LogicalMesh`.

    Raises:
      MeshError: If the number of devices is not the product of the axis sizes, or they are another torus.
    """
    chosen = list(jax.devices() if devices is None else devices)
    needed = int(np.prod([n for _, n in axes]))
    if len(chosen) != needed:
        raise MeshError(
            f"The plan is for {needed} devices ({', '.join(f'{a}={n}' for a, n in axes)}), but {len(chosen)} are "
            "given. "
            "Pass devices= with that many, or plan again for the devices at hand."
        )
    return mesh_in_order(axes, chosen, order, torus)


def mesh_in_order(
    axes: Sequence[tuple[str, int]], devices: Sequence[Any], order: Sequence[int], torus: Sequence[int]
) -> Mesh:
    """A mesh of exactly as many devices as its axes hold; arguments and errors are those of `device_mesh`."""
    numbered = by_coordinates(devices, torus) if torus else list(devices)
    placed = np.empty(len(numbered), dtype=object)
    placed[:] = [numbered[n] for n in order] if order else numbered
    return Mesh(placed.reshape([n for _, n in axes]), [a for a, _ in axes], axis_types=(AxisType.Auto,) * len(axes))


def by_coordinates(devices: Sequence[Any], torus: Sequence[int]) -> list[Any]:
    """The chips of a torus, numbered row-major by their coordinates; devices without coordinates stay as listed.

    Raises:
      MeshError: If the coordinates are not those of such a torus.
    """
    if not all(hasattr(d, "coords") for d in devices):
        return list(devices)
    slices = sorted({getattr(d, "slice_index", 0) or 0 for d in devices})
    key = lambda d: (slices.index(getattr(d, "slice_index", 0) or 0), *d.coords)
    spans = [max(along) - min(along) + 1 for along in zip(*map(key, devices), strict=True)]
    wanted = tuple(n for n in torus if n > 1)
    if tuple(n for n in spans if n > 1) != wanted:
        raise MeshError(
            f"The plan is for a torus of {'x'.join(map(str, torus))} chips, but the given devices span "
            f"{'x'.join(map(str, spans))} (slices, then coordinates). Describe the slice in the cluster file as it is "
            "(torus: shape), and plan again."
        )
    return sorted(devices, key=key)


@dataclasses.dataclass(frozen=True)
class Interface:
    """What execution must know of a plan.

    Attributes:
      axes: (name, size) of each mesh axis. shardings: What each equation enforces.
      argument_entries, output_entries: Layouts of the flat arguments and outputs.
      output_steps: The layouts that each output passes through at the end.
      donate_argnums: Positional arguments whose buffers are reused.
      schedule: What the compiler is asked for.
      choosing: By what the fastest way to schedule the program on GPUs is chosen.
      timed: What equations enforce instead where there is memory to spare.
      in_host: The flat arguments that lie in the memory of the host, by position. outputs_in_host: Outputs.
      trial: Whether the fastest way is found by timing all in the first steps of a run, else by replay.
    """

    axes: tuple[tuple[str, int], ...]
    shardings: tuple[tuple[int, EquationPlan], ...]
    argument_entries: tuple[SpecEntries, ...]
    output_entries: tuple[SpecEntries, ...]
    output_steps: tuple[tuple[SpecEntries, ...], ...]
    donate_argnums: tuple[int, ...]
    schedule: Schedule
    choosing: Choosing
    timed: tuple[tuple[int, EquationPlan], ...] = ()
    in_host: frozenset[int] = frozenset()
    outputs_in_host: frozenset[int] = frozenset()
    trial: bool = False

    def for_candidate(self, candidate: Candidate) -> "Interface":
        """The same layouts, in the orders of one way to schedule the program."""
        match candidate.ordered_as:
            case Candidate.UNORDERED:
                return self.unordered
            case Candidate.GATHERED_FREELY:
                freed = tuple((number, own.gathered_freely) for number, own in self.shardings)
                return dataclasses.replace(self, shardings=freed)
            case Candidate.BY_TIME:
                return dataclasses.replace(self, shardings=tuple({**dict(self.shardings), **dict(self.timed)}.items()))
        return self

    @property
    def unordered(self) -> "Interface":
        """The same layouts, but nothing waits for anything."""
        return dataclasses.replace(self, shardings=tuple((number, own.unordered) for number, own in self.shardings))


class PlannedFunction:
    """A function that runs as its plan says. Call it, or `.lower(*args).compile()` it.

    On GPUs the first call compiles it in the ways that the plan names (`candidates.py`), of which the first calls find
    the fastest that fits the memory (`trial.py`); `lower` compiles it in one way, as the plan's schedule says.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        interface: Interface,
        mesh: Mesh,
        check: Callable[[Sequence[Any]], Trace],
        shapes: Callable[[], tuple[Any, ...]],
    ):
        """
        Args:
          fn: The function. interface: What its plan says. mesh: Devices with the plan's axes.
          check: Traces the function with its arguments, and refuses one that was not planned.
          shapes: Gives the arguments that were planned, by shape.
        """
        self._fn, self._interface, self.mesh, self._check, self._shapes = fn, interface, mesh, check, shapes
        self._shardings = [
            sharding_of(mesh, e, n in interface.in_host) for n, e in enumerate(interface.argument_entries)
        ]
        self._jitted: dict[Any, Any] = {}
        self._compiled: dict[Any, Any] = {}  # of those that were compiled ahead, or are scheduled in the fastest way

    def _key(self, args: Sequence[Any]) -> Any:
        """By what programs are told apart, and last whether this one is part of another."""
        leaves, tree = jax.tree_util.tree_flatten(tuple(args))
        shapes = tuple((np.shape(x), str(getattr(x, "dtype", type(x)))) for x in leaves)
        return tree, shapes, any(isinstance(x, Tracer) for x in leaves)

    def _prepare(self, args: Sequence[Any]) -> Any:
        key = *_, is_nested = self._key(args)  # of a nested one the outer function is compiled
        if key not in self._jitted:
            self._jitted[key] = self._build(
                args, None if is_nested else options_on(self.mesh, self._interface.schedule)
            )
        return self._jitted[key]

    def _build(self, args: Sequence[Any], options: dict[str, bool | int | float] | None) -> Any:
        traced = self._check(args)
        ins = jax.tree_util.tree_unflatten(traced.in_tree, self._shardings)
        in_host, outputs_in_host = self._interface.in_host, self._interface.outputs_in_host
        if in_host or outputs_in_host or any(plan.copies_out for _, plan in self._interface.shardings):
            refuse_host_memory(self.mesh)
        outputs = enumerate(self._interface.output_entries)
        outs = jax.tree_util.tree_unflatten(
            traced.out_tree, [sharding_of(self.mesh, e, n in outputs_in_host) for n, e in outputs]
        )
        evaluator = Evaluator(self.mesh, dict(self._interface.shardings))

        def planned(*inner):
            flat = jax.tree_util.tree_leaves(inner)
            with _mesh_in_place_of_another(self.mesh):
                results = evaluator(traced.jaxpr, flat, self._interface.argument_entries, in_host)
                moved = [evaluator.move(r, s) for r, s in zip(results, self._interface.output_steps, strict=True)]
                for n in outputs_in_host:
                    moved[n] = jax.device_put(moved[n], jax.memory.Space.Host)
            return jax.tree_util.tree_unflatten(traced.out_tree, moved)

        planned.__name__ = getattr(self._fn, "__name__", "planned")
        return jax.jit(
            planned,
            in_shardings=ins,
            out_shardings=outs,
            donate_argnums=self._interface.donate_argnums,
            compiler_options=options,
        )

    def prepare(self, *args: Any) -> None:
        """Traces the function with arrays or shapes, and checks it; the first call does so if it was not done before.

        Raises:
          PlanMismatchError: It is not what was planned; names the first difference.
        """
        self._prepare(args)

    def compile(self, *args: Any, when_lowered: Callable[[], None] = lambda: None) -> None:
        """Compiles the function for arrays or shapes, in the way in which it will run; a call then only runs it.

        Args:
          *args: The arguments.
          when_lowered: Called when nothing but the compilation is left to do.

        Raises:
          PlanMismatchError: It is not what was planned; names the first difference.
        """
        key = *_, is_nested = self._key(args)
        if key in self._compiled:
            return
        if is_nested or not self._is_chosen:
            lowered = self.lower(*args)
            when_lowered()
            self._compiled[key] = lowered.compile()
        else:
            self._prepare(args)
            when_lowered()
            self._program(args)

    def in_shardings(self, args: Sequence[Any]) -> Any:
        """The NamedSharding of every argument leaf, as a tuple of pytrees like `args`."""
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tuple(args)), self._shardings)

    def __call__(self, *args: Any) -> Any:
        """Runs the planned function; arguments that lie otherwise are moved to their planned shardings first.

        Raises:
          PlanMismatchError: It is not what was planned; names the first difference.
          TraceError: An argument was given to an earlier call to reuse.
        """
        flat, tree = jax.tree_util.tree_flatten(tuple(args))
        refuse_deleted(self._fn, args, flat)
        program = self._program(args)
        placed = [place_argument(x, s) for x, s in zip(flat, self._shardings, strict=True)]
        for n in given_again(args, flat, self._interface.donate_argnums):
            placed[n] = jax.device_put(placed[n], self._shardings[n], may_alias=False)
        return program(*jax.tree_util.tree_unflatten(tree, placed))

    def _program(self, args: Sequence[Any]) -> Any:
        """What runs for `args`: compiled in the fastest way on GPUs, else by `jax.jit`."""
        jitted, key = self._prepare(args), self._key(args)
        if key in self._compiled:
            return self._compiled[key]
        *_, is_nested = key
        if is_nested or not self._is_chosen:
            return jitted
        choosing, candidates = self._interface.choosing, self.candidates(*args)
        if self._interface.trial:
            self._compiled[key] = trial_of(candidates, choosing.budget_bytes)
            return self._compiled[key]
        best = choosing.fastest([c.figures for c in candidates])
        _LOGGER.info("%s is scheduled for %s", getattr(self._fn, "__name__", "the planned function"), best)
        self._compiled[key] = next(c.compiled for c in candidates if c.figures is best)
        return self._compiled[key]

    @property
    def _is_chosen(self) -> bool:
        """Whether it is compiled in several ways, of which the fastest is chosen."""
        return self.mesh.devices.flat[0].platform in GPU_PLATFORMS and bool(self._interface.choosing.others)

    def candidates(self, *args: Any) -> tuple[CompiledCandidate, ...]:
        """The program for `args`, as of `lower`, compiled for GPUs in each way that the plan names; nothing runs."""
        platform = self.mesh.devices.flat[0].platform
        return compile_candidates(self.compile_as(args), platform, self._interface.choosing)

    @property
    def trials(self) -> tuple[Trial, ...]:
        """What was tried of each program that ran so far, and what it took."""
        return tuple(program for program in self._compiled.values() if isinstance(program, Trial))

    def of_candidate(self, candidate: Candidate) -> "PlannedFunction":
        """The function in the plan's layouts, in the orders of one way to schedule it."""
        if candidate.ordered_as.is_bounded:
            return self
        interface = self._interface.for_candidate(candidate)
        return PlannedFunction(self._fn, interface, self.mesh, self._check, self._shapes)

    def compile_as(self, args: Sequence[Any]) -> Compile:
        """Compiles the program for `args`, each of its orders traced once."""
        lowered: dict[Candidate | None, Any] = {}

        def compile_as(candidate: Candidate, options: dict[str, Any]) -> Any:
            own = None if candidate.ordered_as.is_bounded else candidate.ordered_as
            if own not in lowered:
                lowered[own] = self.of_candidate(candidate).lower(*args)
            return lowered[own].compile(compiler_options=options)

        return compile_as

    def lower(self, *args: Any) -> Any:
        """Lowers as `jax.jit(f).lower` does: for `args` (arrays or `jax.ShapeDtypeStruct`), or for the planned ones."""
        args = args or self._shapes()
        lowered = self._prepare(args).lower(*jax.tree.map(_by_shape, args))
        return told_of_hosts(lowered, self._shardings, self._interface.in_host, self._interface.outputs_in_host)


def _mesh_in_place_of_another(mesh: Mesh) -> contextlib.AbstractContextManager[object]:
    """Sets the plan's mesh where the user has set another one (`jax.set_mesh`), as in explicit mode."""
    around = jax.sharding.get_abstract_mesh()
    if around.empty or around == mesh.abstract_mesh or AxisType.Manual in around.axis_types:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def _by_shape(x: Any) -> Any:
    """An array of NumPy by its shape, since JAX lowers for no such array where its sharding has other processes."""
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) if isinstance(x, np.ndarray) else x


def place_argument(x: Any, sharding: NamedSharding) -> Any:
    """`x` as it is, if it lies as `sharding` says; otherwise moved there.

    What each of several processes holds for itself, such as a random key that it made, must be the same in all of them,
    as JAX checks.
    """
    if isinstance(x, Tracer):  # called inside another transformation, which has no arrays to move
        return x
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim) and not _is_typed(x):
        return x
    if isinstance(x, jax.Array) and x.is_fully_addressable and not sharding.is_fully_addressable:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # which JAX moves by their data only
            data = place_argument(jax.random.key_data(x), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jax.device_put(np.asarray(x), sharding)
    return jax.device_put(np.asarray(x) if _is_cut_on_cpu(x, sharding) else x, sharding)


def _is_cut_on_cpu(x: Any, sharding: NamedSharding) -> bool:
    """Whether it is on one CPU device, and devices of this process get parts of it. Plans do not divide random keys.

    NumPy cuts it where it lies. JAX would compile a program for it, one for each shape and layout.
    """
    if not isinstance(x, jax.Array) or len(x.sharding.device_set) != 1 or sharding.is_fully_replicated:
        return False
    (device,) = x.sharding.device_set
    return device.platform == "cpu" and sharding.is_fully_addressable


def _is_typed(x: jax.Array) -> bool:
    """Whether its type tells the layout, and so would the type of what the planned function makes of it."""
    return isinstance(x.sharding, NamedSharding) and AxisType.Explicit in x.sharding.mesh.axis_types
