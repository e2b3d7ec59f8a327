"""Evaluates a traced function as a plan says.

Shardings on inputs and outputs alone leave the interior to the compiler's propagation, which may choose otherwise. So
the jaxpr is evaluated equation by equation, with `with_sharding_constraint` on results as the plan defines them and on
operands as the plan reads them. Constraints that agree with their surroundings cost nothing. Where the plan says that
something waits, is stored, or lies row by row, that is done; nothing is decided here.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import Mesh

from autoshard.execution.barriers import (
    Environment,
    delay,
    gather_behind,
    send_behind,
    share_copies,
    wait,
    wait_for_part,
)
from autoshard.execution.by_shards import rule_by_shards, run_by_shards
from autoshard.execution.nested import Nested, manual_region
from autoshard.execution.placement import Placed, Placement, known_layouts
from autoshard.execution.two_stage_sums import sum_in_stages
from autoshard.graph.equation_plan import EquationPlan, evaluation_order
from autoshard.graph.layout import SpecEntries
from autoshard.trace.walk import equation_numbers, is_to_or_from_host, nested_programs, variables


def scope_of(equation: int) -> str:
    """The name under which equation number `equation` appears in compiled programs and in profiles."""
    return f"eqn{equation}"


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates jaxprs under a plan on one mesh.

    Attributes:
      mesh: The mesh of devices, with the plan's axis names and Auto axis types.
      equations: What the plan says of each equation, by equation number.
    """

    mesh: Mesh
    equations: Mapping[int, EquationPlan]

    def __call__(
        self,
        closed: jex.ClosedJaxpr,
        args: Sequence[Any],
        layouts: Sequence[SpecEntries],
        in_host: Collection[int] = frozenset(),
    ) -> list[Any]:
        """The outputs of `closed` on flat `args`, which have these `layouts`; those `in_host`, by position, lie in the
        memory of the host."""
        given = (Placed(x, l, in_host=n in in_host) for n, (x, l) in enumerate(zip(args, layouts, strict=True)))
        placed = [*(Placed(x, None) for x in closed.consts), *given]
        return [p.value for p in self._run(closed.jaxpr, placed, 0)]

    def part(
        self,
        jaxpr: jex.Jaxpr,
        chosen: Sequence[int],
        known: Mapping[Any, tuple[Any, SpecEntries | None]],
        wanted: Sequence[Any],
    ) -> list[Any]:
        """The values of the variables `wanted`, by the equations `chosen` of a whole program alone.

        Args:
          jaxpr: The program. chosen: Positions of equations, ascending.
          known: (value, layout) of the variables that they begin with; the layout is None where it is not known.
          wanted: Variables among those that are known or made.
        """
        numbers = equation_numbers(jaxpr)
        env = {v: Placed(*pair) for v, pair in known.items()}
        evaluator = dataclasses.replace(self, equations={**self.equations, **self._handed_over(jaxpr, numbers, chosen)})
        evaluator._advance([jaxpr.eqns[i] for i in chosen], [numbers[i] for i in chosen], env, wanted)
        return [_read(env, v).value for v in wanted]

    def _handed_over(
        self, jaxpr: jex.Jaxpr, numbers: Sequence[int], chosen: Collection[int]
    ) -> dict[int, EquationPlan]:
        """What the plan says of the equations `chosen` for which operands wait that, in the whole program, wait for an
        equation between them: the last one before it that reads an operand in the same layout takes its place."""
        latest: dict[Any, tuple[int, int]] = {}  # a variable and its layout -> who read it so, in which slot
        found: dict[int, EquationPlan] = {}
        is_chosen = set(chosen).__contains__
        for i, number in enumerate(numbers):
            plan = self._plan_of(number)
            for slot, steps in plan.operands:
                key = jaxpr.eqns[i].invars[slot], steps[-1]
                if isinstance(key[0], jex.Literal):
                    continue
                if is_chosen(i):
                    latest[key] = number, slot
                elif slot in plan.waits and key in latest:
                    reader, read_slot = latest[key]
                    own = found.get(reader, self.equations[reader])
                    if read_slot not in (*own.waits, *own.waits_for_part):
                        found[reader] = dataclasses.replace(own, waits=(*own.waits, read_slot))
        return found

    def alone(self, equation: jex.JaxprEqn, number: int, operands: Sequence[Placed]) -> list[Placed]:
        """The results of equation `number` by itself, on operands that have been placed already."""
        env: Environment = {
            v: placed for v, placed in zip(equation.invars, operands, strict=True) if not isinstance(v, jex.Literal)
        }
        with jax.named_scope(scope_of(number)):
            self._evaluate(equation, number, env, (), (), ())
        return [Placed(None, None) if isinstance(v, jex.DropVar) else env[v] for v in equation.outvars]

    @property
    def _placement(self) -> Placement:
        return Placement(self.mesh)

    def move(self, value: Any, steps: Sequence[SpecEntries]) -> Any:
        """`value` taken through the layouts `steps`, one after another."""
        return self._placement.move(value, steps)

    def place(self, value: Any, entries: SpecEntries | None) -> Any:
        """`value` in a layout; as it is, if that is None."""
        return self._placement.constrain(value, entries)

    def _run(self, jaxpr: jex.Jaxpr, inputs: Sequence[Placed], first: int) -> list[Placed]:
        """The results of a program whose first equation has number `first`."""
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
        self._advance(jaxpr.eqns, [first + n for n in equation_numbers(jaxpr)], env, jaxpr.outvars)
        return [_read(env, v) for v in jaxpr.outvars]

    def _advance(
        self, equations: Sequence[jex.JaxprEqn], numbers: Sequence[int], env: Environment, kept: Sequence[Any]
    ) -> None:
        """Evaluates equations one after another and puts their results into `env`, which loses what nobody reads any
        more but the variables `kept`. Those that nobody needs are left out: the orders of a plan know nothing of them,
        and may have what they read made later."""
        needed = _needed(equations, kept)
        equations, numbers = [equations[k] for k in needed], [numbers[k] for k in needed]
        named = dict(zip(numbers, equations, strict=True))
        order = evaluation_order(numbers, self.equations)
        equations, numbers = [equations[k] for k in order], [numbers[k] for k in order]
        read = [[v for v in e.invars if not isinstance(v, jex.Literal)] for e in equations]
        for i, number in enumerate(numbers):  # what comes in turn is kept until then
            read[i] += [v for n, _ in self._plan_of(number).in_turn for v in _made(named.get(number - n))]
        last_use = {v: i for i, variables in enumerate(read) for v in variables}
        outputs = {v for v in kept if not isinstance(v, jex.Literal)}
        for i, (equation, number) in enumerate(zip(equations, numbers, strict=True)):
            later = {v for v in read[i] if last_use[v] > i}
            plan = self._plan_of(number)
            held = [named[number + n].invars[slot] for n, slot in plan.holds_back if number + n in named]
            held += [kept[k] for k in plan.holds_results]
            with jax.named_scope(scope_of(number)):
                for n, slot in plan.follows:
                    made = named[number - n].outvars if number - n in named else ()
                    wait(env, [equation.invars[slot]], [v for v in made if v in env], self._placement)
                for n, slot in plan.in_turn:
                    wait(env, [equation.invars[slot]], _made(named.get(number - n)), self._placement)
                self._copy_residuals(equation, number, plan, named, env)
                env.update((v, self._placement.fetched(env[v])) for v in variables(equation.invars))
                behind = [(own, named[number + n].invars[s]) for own, n, s in plan.gathers_next if number + n in named]
                self._evaluate(equation, number, env, later, held, behind)
            for v in read[i]:
                if v not in later and v not in outputs:
                    env.pop(v, None)

    def _copy_residuals(
        self,
        equation: jex.JaxprEqn,
        number: int,
        plan: EquationPlan,
        named: Mapping[int, jex.JaxprEqn],
        env: Environment,
    ) -> None:
        """Copies residuals to the memory of the host before an equation, and others back."""
        as_it_is = lambda placed: placed
        stored, fetched = self._placement.stored, self._placement.fetched
        for moves, before, behind in (
            (plan.copies_out, stored, as_it_is),
            (plan.copies_back, as_it_is, fetched),
            (plan.back_before, as_it_is, as_it_is),
        ):
            for move in moves:
                maker = named.get(number - move.made_before)
                v = None if maker is None else maker.outvars[move.result]
                if v in env:  # somebody reads it
                    env[v] = before(env[v])
                    wait(env, [equation.invars[move.operand]], [v], self._placement)
                    env[v] = behind(env[v])

    def _plan_of(self, number: int) -> EquationPlan:
        return self.equations.get(number, EquationPlan())

    def _evaluate(
        self,
        equation: jex.JaxprEqn,
        number: int,
        env: Environment,
        later: Collection[Any],
        held: Sequence[Any],
        behind: Sequence[tuple[int, Any]],
    ) -> None:
        """Evaluates one equation and puts its results into `env`; the variables `later` are read again, and what reads
        the variables `held` waits for it. Of `behind`, (operand slot, variable), what is gathered of the variable waits
        for the copy of the operand."""
        plan, placement = self._plan_of(number), self._placement
        made = [v for v in equation.outvars if not isinstance(v, jex.DropVar)]
        waiting, waiting_for_part = (
            [equation.invars[slot] for slot in slots if equation.invars[slot] in later]
            for slots in (plan.waits, plan.waits_for_part)
        )
        placed = [_read(env, v) for v in equation.invars]
        for slot, steps in plan.operands:
            copy = placed[slot].copy
            if copy is not None and copy[1] == steps[-1]:
                placed[slot] = placed[slot]._replace(value=copy[0], entries=copy[1], copy=None)
        delay(env, equation, placed, plan, placement)
        operands = placed
        if not plan.narrows_first:
            operands = self._read_operands(placed, plan)
            gather_behind(env, operands, behind, placement)
            share_copies(env, equation, operands, plan, [*waiting, *waiting_for_part])
        is_nest = bool(nested_programs(equation))
        if not is_nest and (waiting_for_part or held):
            tied = dict.fromkeys([*waiting_for_part, *held])
            results = wait_for_part(env, list(tied), equation, operands, plan, placement)
        elif is_nest:
            results = Nested(placement, self._run).evaluate(equation, operands, plan, number)
        elif plan.narrows_first:
            results = [self._narrowed(equation, operands[0], plan)]
            gather_behind(env, results, behind, placement)
        else:
            results = self._leaf(equation, operands, plan)
        layouts = {} if plan.is_transposed_at_once else dict(plan.results)
        for slot, (v, result) in enumerate(zip(equation.outvars, results, strict=True)):
            if not isinstance(v, jex.DropVar):
                env[v] = self._result(equation, result, layouts.get(slot), plan)
        stored = [equation.outvars[slot] for slot in plan.materialized]
        if stored:
            values = jax.lax.optimization_barrier([env[v].value for v in stored])
            env.update((v, placement.place(x, env[v].entries)) for v, x in zip(stored, values, strict=True))
        wait(env, [*waiting, *held] if is_nest else waiting, made, placement)

    def _read_operands(self, placed: Sequence[Placed], plan: EquationPlan) -> list[Placed]:
        """Operands in the layouts in which an equation reads them."""
        operands, placement = [Placed(p.value, p.entries) for p in placed], self._placement
        for is_first in (True, False):
            for slot, steps in plan.operands:
                if (slot in plan.gathered_first) == is_first:
                    is_there = placed[slot].entries == steps[-1]
                    value = placement.move(operands[slot].value, steps[-1:] if is_there else steps)
                    operands[slot] = Placed(value, steps[-1])
            if is_first and plan.gathered_first:
                send_behind(operands, plan, placement)
        for slot in plan.row_major_copies:
            value, entries = operands[slot][:2]
            if entries is not None and placed[slot].entries != entries:
                kept = jax.lax.optimization_barrier(placement.row_major(value, entries))
                operands[slot] = Placed(kept, entries)
        return operands

    def _narrowed(self, equation: jex.JaxprEqn, operand: Placed, plan: EquationPlan) -> Placed:
        """The result of a conversion that is made where its operand lies, and moved to where that would be read."""
        steps = dict(plan.operands)[0]
        (result,) = self._leaf(equation, [operand], plan)
        lies = self.place(result.value, operand.entries)
        is_there = operand.entries == steps[-1]
        return Placed(self.move(lies, steps[-1:] if is_there else steps), steps[-1])

    def _leaf(self, equation: jex.JaxprEqn, operands: Sequence[Placed], plan: EquationPlan) -> list[Placed]:
        """The results of an equation that nests no program that the plan knows of."""
        values, layouts = [o.value for o in operands], known_layouts(operands)
        if equation.primitive.name == "shard_map":
            return [Placed(r, None) for r in manual_region(equation, values, self.mesh)]
        if equation.primitive.name == "sharding_constraint":
            return [Placed(values[0], None)]  # the plan's own constraint, on the result, takes its place
        if is_to_or_from_host(equation):
            return [Placed(value, None) for value in values]  # the plan says what lies where
        for slot in plan.row_major:
            if slot in layouts:
                values[slot] = self._placement.row_major(values[slot], layouts[slot])
        if (rule := rule_by_shards(equation, plan)) is not None:
            results = run_by_shards(equation, values, rule, plan, self.mesh)
        elif plan.sums_first:
            results = [sum_in_stages(equation, values[0], plan.sums_first, layouts.get(0), self.place)]
        else:
            bound = equation.primitive.bind(*values, **equation.params)
            results = bound if equation.primitive.multiple_results else [bound]
        source = equation.invars[0] if equation.primitive.name == "broadcast_in_dim" else None
        filled = source.val if isinstance(source, jex.Literal) else None
        return [Placed(r, None, filled) for r in results]

    def _result(
        self, equation: jex.JaxprEqn, result: Placed, entries: SpecEntries | None, plan: EquationPlan
    ) -> Placed:
        """A result in its layout; the sum of a scatter-add that is scattered is first made where it is."""
        if entries is None:
            return result
        value, scattered = result.value, [axis for axis, _ in plan.scatters]
        by_shards = plan.exchange is not None or plan.exchanges_parts
        if scattered and equation.primitive.name == "scatter-add" and not by_shards:  # XLA would move what is added
            local = tuple(tuple(axis for axis in axes if axis not in scattered) for axes in entries)
            minor = tuple(
                (*own, *(a for a in axes if a in scattered)) for own, axes in zip(local, entries, strict=True)
            )
            value = self.move(value, (local, minor))
        return self._placement.place(value, entries)


def _needed(equations: Sequence[jex.JaxprEqn], kept: Sequence[Any]) -> list[int]:
    """The positions of the equations that have an effect, or on which one of those or the variables `kept` depend."""
    read, found = {v for v in kept if not isinstance(v, jex.Literal)}, []
    for k in range(len(equations) - 1, -1, -1):
        equation = equations[k]
        if equation.effects or not read.isdisjoint(v for v in equation.outvars if not isinstance(v, jex.DropVar)):
            found.append(k)
            read.update(v for v in equation.invars if not isinstance(v, jex.Literal))
    return found[::-1]


def _made(equation: jex.JaxprEqn | None) -> list[Any]:
    """The variables that an equation makes."""
    return [] if equation is None else [v for v in equation.outvars if not isinstance(v, jex.DropVar)]


def _read(env: Environment, v: Any) -> Placed:
    return Placed(v.val, None) if isinstance(v, jex.Literal) else env[v]
