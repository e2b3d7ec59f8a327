"""A planned step whose devices have shares of the work that can change from step to step, without recompiling.

While shares are even, the planned program itself runs, on state as the plan lays it out. While they are not, another
program runs, on state that is held by places. Both are compiled before the first step.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from autoshard.balance.options import Balance
from autoshard.balance.places import Placing, Room, even_placing, is_even, room_for
from autoshard.balance.regions import Made, evaluation, read_by_itself
from autoshard.balance.units import Refusal, UnitDimensions, unit_dimensions
from autoshard.balance.whole_searches import searching_whole
from autoshard.errors import ConfigError
from autoshard.execution.apply import Evaluator
from autoshard.execution.balanced import BalancedProgram
from autoshard.execution.candidates import CompiledCandidate
from autoshard.execution.jit import Interface, place_argument
from autoshard.execution.leaves import numbered_equations
from autoshard.execution.placement import partition_spec
from autoshard.execution.taken_options import options_on
from autoshard.execution.units import Held, by_places, held, held_shardings
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.graph import Graph
from autoshard.graph.pointwise import pointwise_operations
from autoshard.plans.apply import argument_shapes, check, planned_function
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.unit_state import UnitLeaves
from autoshard.trace.trace import Trace


def units_of(plan: ProgramPlan, graph: Graph) -> UnitDimensions:
    """What can move between the devices of a plan, and what cannot.

    Args:
      plan: The plan. graph: Its program.
    """
    interface = plan.interface
    shardings = _equations(interface, graph)
    pointwise = pointwise_operations(graph)
    return unit_dimensions(graph, shardings, interface.argument_entries, dict(interface.axes), pointwise)


def _equations(interface: Interface, graph: Graph) -> dict[int, EquationPlan]:
    """What a plan says of each equation, where devices have shares."""
    return searching_whole(graph, dict(interface.shardings), interface.argument_entries)


def rooms_for(
    dims: UnitDimensions, balance: Balance, platform: str, forward: Mapping[int, str] = types.MappingProxyType({})
) -> tuple[Room, ...]:
    """The places of each unit dimension.

    Args:
      dims: The dimensions. balance: What is asked for. platform: JAX's name of the kind of devices.
      forward: Dimensions of which no unit may be left out, because the forward pass makes something of each that is
        read by itself, and zeros would take its place; and the reason.
    """
    tile = balance.tile or (8 if platform == "cpu" else 128)
    absorbs = balance.absorbs if balance.moves else 1.0
    found = []
    for unit in dims.found:
        why = forward.get(unit.index, "")
        is_looped = balance.sizes == "loop" if balance.sizes else platform == "cpu"
        found.append(room_for(unit, absorbs, tile, balance.most_buckets, balance.most_left_out, why, is_looped))
    return tuple(found)


def platform_of(plan: ProgramPlan) -> str:
    """JAX's name of the kind of devices that a plan is for, as far as `rooms_for` asks: `cpu`, or another."""
    return "cpu" if plan.logical_mesh.device_type.name.startswith("CPU") else "gpu"


def _reason(made: Made) -> str:
    """Why units with such a result cannot stand for others."""
    operation = made.by.operation
    at = operation.source or "an unknown line"
    return f"`{operation.name}` at {at} makes something of each unit that is read by itself"


class _Ready:
    """A step that is traced, and what can move in it."""

    def __init__(self, plan: ProgramPlan, traced: Trace, mesh: Mesh, balance: Balance):
        interface = plan.interface.unordered
        dims = units_of(plan, traced.graph)
        if not dims.found:
            raise ConfigError(nothing_moves(dims.refused, dict(mesh.shape)))
        stages, numbered = evaluation(traced.graph, dims), numbered_equations(traced.jaxpr)
        by_itself = read_by_itself(stages)
        if balance.unbiased and by_itself:
            name = dims.found[by_itself[0].by.unit].name
            raise ConfigError(
                f"Balance(unbiased=True): what is left of `{name}` is to count for all of its units in sums over them, "
                f"but {_reason(by_itself[0])}. Leave `unbiased` out."
            )
        forward = {m.by.unit: _reason(m) for m in by_itself if m.by.operation.equation not in numbered.backward}
        rooms = rooms_for(dims, balance, mesh.devices.flat[0].platform, forward)
        self.traced, self.refused = traced, dims.refused
        self.program = BalancedProgram(
            traced.graph,
            numbered,
            Evaluator(mesh, _equations(interface, traced.graph)),
            dims,
            rooms,
            stages,
            interface.argument_entries,
            interface.output_entries,
            interface.output_steps,
            balance.can_be_slowed,
            balance.unbiased,
        )
        avals: Sequence[Any] = traced.jaxpr.in_avals
        shapes = self.shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        self.leaves: dict[int, UnitLeaves] = {}
        own, start = self.program.unit_arguments(), 0
        for argument, child in enumerate(traced.in_tree.children()):
            here = {n - start: x for n, x in own.items() if start <= n < start + child.num_leaves}
            if here:
                entries = interface.argument_entries[start : start + child.num_leaves]
                self.leaves[argument] = UnitLeaves(
                    here, shapes[start : start + child.num_leaves], entries, mesh, argument in plan.donate_argnums
                )
            start += child.num_leaves


class BalancedFunction:
    """A planned function of arrays whose devices have shares. Call it as the function.

    What it returns of its state is by places while shares are uneven. State by units, such as `plan.init` makes or a
    checkpoint holds, is taken always, and so is state that it returned under other shares; it is moved first.
    """

    def __init__(self, plan: ProgramPlan, fn: Callable[..., Any], mesh: Mesh, balance: Balance, cost_profile: bool):
        """
        Args:
          plan: The plan. fn: Its function of arrays. mesh: Devices with the plan's axes. balance: What is asked for.
          cost_profile: As for `planned_function`.
        """
        self.mesh, self.balance, self._plan, self._fn = mesh, balance, plan, fn
        self._planned = planned_function(plan, fn, mesh, cost_profile)
        self._ready: _Ready | None = None
        self._compiled: Any = None
        self._new_memory: Any = None
        self.placings: tuple[Placing, ...] = ()
        self.repeats: tuple[tuple[int, ...], ...] = ()
        self._held: list[Held] = []
        self._memory: dict[int, Any] = {}

    def prepare(self, *args: Any) -> None:
        """Traces the function with arguments by units, arrays or shapes, and finds what can move.

        Raises:
          PlanMismatchError: It is not what was planned.
          ConfigError: Nothing can move; says why.
        """
        if self._ready is None:
            args = args or argument_shapes(self._plan)
            self._ready = _Ready(self._plan, check(self._plan, self._fn, args), self.mesh, self.balance)
            self.place([even_placing(room) for room in self.rooms], [(0,) * room.unit.ways for room in self.rooms])

    @property
    def _known(self) -> _Ready:
        if self._ready is None:
            self.prepare()
        assert self._ready is not None
        return self._ready

    @property
    def rooms(self) -> tuple[Room, ...]:
        """The places of each unit dimension."""
        return self._known.program.rooms

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """Parameters that stay as the plan has them, and why."""
        return self._known.refused

    @property
    def runs_as_planned(self) -> bool:
        """Whether shares are even and no device is slowed down, so that the planned program itself runs."""
        return all(map(is_even, self.placings)) and not any(map(any, self.repeats))

    def place(self, placings: Sequence[Placing], repeats: Sequence[Sequence[int]] | None = None) -> None:
        """From the next call on units are where `placings` say; the state is moved there then.

        Args:
          placings: Of each unit dimension.
          repeats: For each unit dimension and device, how often it computes everything once more than it must; None:
            as before.
        """
        if repeats is not None:
            self.repeats = tuple(map(tuple, repeats))
        self.placings = tuple(placings)
        held_by = zip(self.placings, self.rooms, self.repeats, strict=True)
        self._held = [held(placing, room, self.mesh, own) for placing, room, own in held_by]

    def by_units(self, tree: Any, argument: int = 0) -> Any:
        """A positional argument as the function itself knows it: for evaluation and checkpoints."""
        leaves = self._known.leaves.get(argument)
        return tree if leaves is None else leaves.by_units(tree)

    def by_places(self, tree: Any, argument: int = 0) -> Any:
        """A positional argument in the places of now."""
        leaves = self._known.leaves.get(argument)
        return tree if leaves is None else leaves.placed(tree, self.placings)

    def in_shardings(self, args: Sequence[Any]) -> Any:
        """The NamedSharding of every argument leaf, as pytrees like `args`."""
        return self._planned.in_shardings(args)

    def __call__(self, *args: Any) -> Any:
        """Takes a step."""
        self.compile(*args)
        if self.runs_as_planned:
            self._memory = {}
            return self._planned(*(self.by_units(a, n) for n, a in enumerate(args)))
        ready = self._known
        flat, tree = jax.tree_util.tree_flatten(tuple(self.by_places(a, n) for n, a in enumerate(args)))
        placed = [place_argument(x, s) for x, s in zip(flat, self._shardings, strict=True)]
        memory, self._memory = self._memory or self._new_memory(), {}  # used up, also where the step fails
        inner = jax.tree_util.tree_unflatten(tree, placed)
        result, self._memory = self._compiled(self._held, memory, *inner)
        self._note(ready, result)
        return result

    def _note(self, ready: _Ready, result: Any) -> None:
        """Remembers where the units of the new state are."""
        flat = jax.tree_util.tree_leaves(result)
        made = {o.successor_of: flat[n] for n, o in enumerate(ready.program.graph.outputs)}
        start = 0
        for argument, child in enumerate(ready.traced.in_tree.children()):
            if argument in ready.leaves:
                ready.leaves[argument].note([made.get(start + n, 0) for n in range(child.num_leaves)], self.placings)
            start += child.num_leaves

    @property
    def _shardings(self) -> list[NamedSharding]:
        return [NamedSharding(self.mesh, partition_spec(e)) for e in self._known.program.arguments]

    def compile(self, *args: Any, when_lowered: Callable[[], None] = lambda: None) -> None:
        """Compiles the planned step and the one for all other shares, so that nothing is compiled later."""
        if self._compiled is None:
            self.prepare(*args)
            shapes = self._known.shapes
            lowered = self._lower(shapes)
            self._planned.compile(*jax.tree_util.tree_unflatten(self._known.traced.in_tree, shapes))
            when_lowered()
            self._compiled = lowered.compile()
            self._new_memory = self._memory_program().lower().compile()
            for leaves in self._known.leaves.values():
                leaves.compile()

    def lower(self, *args: Any) -> Any:
        """Lowers the planned step, as `PlannedFunction.lower` does."""
        return self._planned.lower(*args)

    def candidates(self, *args: Any) -> tuple[CompiledCandidate, ...]:
        """The planned step compiled for GPUs in each way that the plan names, as by `PlannedFunction.candidates`."""
        return self._planned.candidates(*args)

    def lower_balanced(self) -> Any:
        """Lowers the step for uneven shares."""
        return self._lower(self._known.shapes)

    def _lower(self, by_units: Sequence[Any]) -> Any:
        ready, mesh, shapes = self._known, self.mesh, list(by_units)
        program, traced = ready.program, ready.traced
        outs = [NamedSharding(mesh, partition_spec(e)) for e in program.outputs]

        def balanced(held: Sequence[Held], memory: dict[int, Any], *inner: Any) -> Any:
            result, memory = program(jax.tree_util.tree_leaves(inner), held, memory)
            return jax.tree_util.tree_unflatten(traced.out_tree, result), memory

        balanced.__name__ = getattr(self._fn, "__name__", "balanced")
        jitted = jax.jit(
            balanced,
            in_shardings=(
                [held_shardings(r.unit.axis, mesh) for r in program.rooms],
                self._memory_shardings,
                *jax.tree_util.tree_unflatten(traced.in_tree, self._shardings),
            ),
            out_shardings=(jax.tree_util.tree_unflatten(traced.out_tree, outs), self._memory_shardings),
            donate_argnums=(1, *(n + 2 for n in self._plan.donate_argnums)),
            compiler_options=options_on(mesh, self._plan.schedule),
        )
        for n, (room, tensor) in program.unit_arguments().items():
            by = by_places(shapes[n].shape, tensor.dim, room)
            shapes[n] = jax.ShapeDtypeStruct(by, shapes[n].dtype, weak_type=shapes[n].weak_type)
        memory = {key: jax.ShapeDtypeStruct(r.shape, r.dtype) for key, r in program.reused().items()}
        return jitted.lower(self._held, memory, *jax.tree_util.tree_unflatten(traced.in_tree, shapes))

    @property
    def _memory_shardings(self) -> dict[int, NamedSharding]:
        reused = self._known.program.reused()
        return {key: NamedSharding(self.mesh, partition_spec(r.entries)) for key, r in reused.items()}

    def _memory_program(self) -> Any:
        """Makes the memory that steps with uneven shares keep for one another."""
        reused = self._known.program.reused()
        zeros = lambda: {key: jnp.zeros(r.shape, r.dtype) for key, r in reused.items()}
        return jax.jit(zeros, out_shardings=self._memory_shardings)


def nothing_moves(refused: Sequence[Refusal], axes: dict[str, int]) -> str:
    """Why a plan has no unit dimension."""
    shape = ", ".join(f"{a}={n}" for a, n in axes.items())
    if not refused:
        return (
            "Shares can change only along a mesh axis that splits parameters and the products on them by hidden units, "
            f"heads or experts (a tensor axis), and the plan over {shape} has none. Ask for one with the annotation "
            "autoshard.split(n) around the model (plan.annotations: [{split: n}]), or leave `balance` (--slow) out."
        )
    told = "; ".join(f"`{r.name}` over {r.axis}: {r.reason}" for r in refused[:3])
    return f"Nothing in the plan over {shape} can move between devices: {told}. Plan otherwise, or leave `balance` out."
