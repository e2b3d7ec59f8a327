"""A planned step whose devices have shares of the work that can change from step to step, without recompiling."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autoshard.balance.places import Placing, Room, even_placing, room_for
from autoshard.balance.regions import evaluation
from autoshard.balance.units import Refusal, unit_dimensions
from autoshard.compiler.options import compiler_options
from autoshard.errors import ConfigError
from autoshard.execution.apply import Evaluator
from autoshard.execution.balanced import BalancedProgram
from autoshard.execution.leaves import numbered_equations
from autoshard.execution.placement import partition_spec
from autoshard.execution.units import Held, by_places, held, held_shardings
from autoshard.graph.pointwise import pointwise_operations
from autoshard.plans.apply import argument_shapes, check
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.unit_state import UnitLeaves
from autoshard.trace.trace import Trace


@dataclasses.dataclass(frozen=True, slots=True)
class BalanceOptions:
    """What a balanced step is made for.

    Attributes:
      absorbs: The slowdown of one device that can be evened out by moving units. Each device has places for so many
        units more; they take memory.
      tile: Units that the hardware computes together, such as 128 hidden units on matrix units: fewer take as long.
      most_buckets: Roughly how many amounts of work a device can be given. Each is compiled.
      is_slowed: Whether devices can be slowed down, for tests and demonstrations.
    """

    absorbs: float = 4.0
    tile: int = 1
    most_buckets: int = 4
    is_slowed: bool = False


class _Ready:
    """A step that is traced, and what can move in it."""

    def __init__(self, plan: ProgramPlan, traced: Trace, mesh: Mesh, options: BalanceOptions):
        interface = plan.interface.unordered
        pointwise = [n for n, is_light in enumerate(pointwise_operations(traced.graph)) if is_light]
        dims = unit_dimensions(
            traced.graph, dict(interface.shardings), interface.argument_entries, dict(mesh.shape), pointwise
        )
        if not dims.found:
            raise ConfigError(_nothing_moves(dims.refused, dict(mesh.shape)))
        rooms = tuple(room_for(u, options.absorbs, options.tile, options.most_buckets) for u in dims.found)
        self.traced, self.refused = traced, dims.refused
        self.program = BalancedProgram(
            traced.graph,
            numbered_equations(traced.jaxpr),
            Evaluator(mesh, dict(interface.shardings)),
            dims,
            rooms,
            evaluation(traced.graph, dims),
            interface.argument_entries,
            interface.output_entries,
            interface.output_steps,
            options.is_slowed,
        )
        self.leaves: dict[int, UnitLeaves] = {}
        own, start = self.program.unit_arguments(), 0
        for argument, child in enumerate(traced.in_tree.children()):
            here = {n - start: x for n, x in own.items() if start <= n < start + child.num_leaves}
            if here:
                entries = interface.argument_entries[start : start + child.num_leaves]
                self.leaves[argument] = UnitLeaves(here, entries, mesh, argument in plan.donate_argnums)
            start += child.num_leaves


class BalancedFunction:
    """A planned function whose devices have shares. Call it as the function; what it returns of its state is by places.

    State by units, such as `plan.init` makes or a checkpoint holds, is taken too, and brought into places first.
    """

    def __init__(self, plan: ProgramPlan, fn: Callable[..., Any], mesh: Mesh, options: BalanceOptions):
        """
        Args:
          plan: The plan. fn: Its function of arrays. mesh: Devices with the plan's axes. options: What it is made for.
        """
        self.mesh, self.options, self._plan, self._fn = mesh, options, plan, fn
        self._ready: _Ready | None = None
        self._compiled: Any = None
        self.placings: tuple[Placing, ...] = ()
        self.repeats: tuple[int, ...] = ()
        self._held: list[Held] = []

    def prepare(self, *args: Any) -> None:
        """Traces the function with arguments by units, arrays or shapes, and finds what can move.

        Raises:
          PlanMismatchError: It is not what was planned.
          ConfigError: Nothing can move; says why.
        """
        if self._ready is None:
            args = args or argument_shapes(self._plan)
            self._ready = _Ready(self._plan, check(self._plan, self._fn, args), self.mesh, self.options)
            self.place([even_placing(room) for room in self.rooms])

    @property
    def _known(self) -> _Ready:
        if self._ready is None:
            raise ConfigError("What can move is known once the step is traced. Call it, or its `prepare`, first.")
        return self._ready

    @property
    def rooms(self) -> tuple[Room, ...]:
        """The places of each unit dimension."""
        return self._known.program.rooms

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """Parameters that stay as the plan has them, and why."""
        return self._known.refused

    def place(self, placings: Sequence[Placing], repeats: Sequence[int] | None = None) -> None:
        """From the next call on units are where `placings` say; the state is moved there first.

        Args:
          placings: Of each unit dimension. repeats: For each device of the axis, how often it computes everything once
            more than it must; None: as before.
        """
        if repeats is not None or not self.repeats:
            self.repeats = tuple(repeats or [0] * max(room.unit.ways for room in self.rooms))
        self.placings = tuple(placings)
        own = lambda room: self.repeats[: room.unit.ways]
        self._held = [held(p, r, self.mesh, own(r)) for p, r in zip(self.placings, self.rooms, strict=True)]

    def by_units(self, tree: Any, argument: int = 0) -> Any:
        """A positional argument as the function itself knows it: for evaluation and checkpoints."""
        leaves = self._known.leaves.get(argument)
        return tree if leaves is None else leaves.by_units(tree)

    def by_places(self, tree: Any, argument: int = 0) -> Any:
        """A positional argument in the places of now."""
        leaves = self._known.leaves.get(argument)
        return tree if leaves is None else leaves.placed(tree, self.placings)

    def in_shardings(self, args: Sequence[Any]) -> Any:
        """The NamedSharding of every argument leaf by units, as pytrees like `args`."""
        shardings = [NamedSharding(self.mesh, partition_spec(a.entries)) for a in self._plan.arguments]
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tuple(args)), shardings)

    def __call__(self, *args: Any) -> Any:
        """Takes a step."""
        if self._ready is None:
            self.prepare(*args)
        ready = self._known
        args = tuple(self.by_places(a, n) for n, a in enumerate(args))
        flat, tree = jax.tree_util.tree_flatten(args)
        placed = [jax.device_put(x, s) for x, s in zip(flat, self._shardings, strict=True)]
        self.compile()
        result = self._compiled(self._held, *jax.tree_util.tree_unflatten(tree, placed))
        self._note(ready, result)
        return result

    def _note(self, ready: _Ready, result: Any) -> None:
        """Remembers where the units of the new state are."""
        flat = jax.tree_util.tree_leaves(result)
        start = 0
        for argument, child in enumerate(ready.traced.in_tree.children()):
            if argument in ready.leaves:
                made = {o.successor_of: flat[n] for n, o in enumerate(ready.program.graph.outputs)}
                own = [made.get(start + n) for n in range(child.num_leaves)]
                ready.leaves[argument].note([x if x is not None else 0 for x in own], self.placings)
            start += child.num_leaves

    @property
    def _shardings(self) -> list[NamedSharding]:
        return [NamedSharding(self.mesh, partition_spec(e)) for e in self._known.program.arguments]

    def compile(self, *args: Any, when_lowered: Callable[[], None] = lambda: None) -> None:
        """Compiles the step, once for all shares."""
        self.prepare(*args)
        if self._compiled is None:
            lowered = self.lower()
            when_lowered()
            self._compiled = lowered.compile()

    def lower(self) -> Any:
        """Lowers the step for arguments by places."""
        ready = self._known
        program, traced, mesh = ready.program, ready.traced, self.mesh
        outs = [NamedSharding(mesh, partition_spec(e)) for e in program.outputs]

        def balanced(held: Sequence[Held], *inner: Any) -> Any:
            flat = jax.tree_util.tree_leaves(inner)
            return jax.tree_util.tree_unflatten(traced.out_tree, program(flat, held))

        balanced.__name__ = getattr(self._fn, "__name__", "balanced")
        jitted = jax.jit(
            balanced,
            in_shardings=(
                [held_shardings(r.unit.axis, mesh) for r in program.rooms],
                *jax.tree_util.tree_unflatten(traced.in_tree, self._shardings),
            ),
            out_shardings=jax.tree_util.tree_unflatten(traced.out_tree, outs),
            donate_argnums=tuple(n + 1 for n in self._plan.donate_argnums),
            compiler_options=compiler_options(mesh.devices.flat[0].platform, self._plan.schedule),
        )
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in traced.jaxpr.in_avals]  # pyright: ignore
        for n, (room, tensor) in program.unit_arguments().items():
            by = by_places(shapes[n].shape, tensor.dim, room)
            shapes[n] = jax.ShapeDtypeStruct(by, shapes[n].dtype, weak_type=shapes[n].weak_type)
        return jitted.lower(self._held, *jax.tree_util.tree_unflatten(traced.in_tree, shapes))


def _nothing_moves(refused: Sequence[Refusal], axes: dict[str, int]) -> str:
    """Why a plan has no unit dimension."""
    shape = ", ".join(f"{a}={n}" for a, n in axes.items())
    if not refused:
        return (
            "Shares can change only along a mesh axis that splits parameters and the products on them by hidden units, "
            f"heads or experts (a tensor axis), and the plan over {shape} has none. Ask for one with pins=, such as "
            "pins={'state.params.*.up.kernel': P(None, 'tensor')}, or leave `balance` out."
        )
    told = "; ".join(f"`{r.name}` over {r.axis}: {r.reason}" for r in refused[:3])
    return f"Nothing in the plan over {shape} can move between devices: {told}. Plan otherwise, or leave `balance` out."
