"""Evaluates a traced function with the plan's shardings put on every tensor that the plan decides.

Shardings on inputs and outputs alone leave the interior to the compiler's propagation, which may choose otherwise. So
the jaxpr is evaluated equation by equation, with `with_sharding_constraint` on results as the plan defines them and on
operands as the plan reads them. Constraints that agree with their surroundings cost nothing.

A tensor that is gathered for use in two places far apart (a weight in the forward and in the backward pass) would be
gathered once and kept by the compiler's common-subexpression elimination, and a weight would be gathered as soon as the
step begins. Such a use is tied to the other operands by an optimization barrier, so that the copy is made when it is
read, as the plan's memory assumes. The zeros into which a gradient is scattered are tied likewise, to what is added:
they would else be made with all others of their type, when the first is needed.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.errors import MeshError
from autoshard.execution.by_shards import rule_by_shards, run_by_shards
from autoshard.execution.compiler import GPU_PLATFORMS, TPU_PLATFORMS
from autoshard.execution.products_first import CONVOLUTIONS
from autoshard.execution.row_by_row import (
    added_to_state,
    is_gathered_inside,
    is_of_state,
    may_be_turned,
    shards_row_by_row,
)
from autoshard.execution.stored import is_made_of_a_copy, read_by_products
from autoshard.execution.turned import turned_at_once
from autoshard.execution.waiting import tied_after, tied_to_partial_sum
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.layout import SpecEntries
from autoshard.trace.rules.leaf import leaf_of
from autoshard.trace.rules.table import table_rule
from autoshard.trace.source import source_of
from autoshard.trace.walk import (
    EquationKind,
    called_jaxpr,
    called_operands,
    equation_numbers,
    kind_of,
    open_jaxpr,
    scan_counts,
)


def partition_spec(entries: SpecEntries) -> PartitionSpec:
    """Axis names per dimension as a PartitionSpec, trailing whole dimensions dropped."""
    spec = [e[0] if len(e) == 1 else (e or None) for e in entries]
    while spec and spec[-1] is None:
        spec.pop()
    return PartitionSpec(*spec)


def scope_of(equation: int) -> str:
    """The name under which equation number `equation` appears in compiled programs and in profiles."""
    return f"eqn{equation}"


@dataclasses.dataclass(slots=True)
class _Counter:
    """Numbers equations depth first, as the trace does."""

    next: int = 0

    def take(self) -> int:
        self.next += 1
        return self.next - 1


class _Placed(NamedTuple):
    """A value and the layout that it is known to have; None where the plan has not said any.

    What enters a function that is compiled apart, such as a checkpointed one, is constrained again inside: there the
    compiler would else give it the layout of any of its uses. `filled`: the scalar that fills the value, where the
    program makes it of one. `is_state`: whether it is a donated argument, or made of some that have its shape alone.
    `is_scattered`, `is_convolved`: whether a scatter or a convolution made it. `copy`: The value as it was read in
    another layout, and that layout, where later readers are tied to the same as those of the value.
    """

    value: Any
    entries: SpecEntries | None
    filled: Any = None
    is_state: bool = False
    is_scattered: bool = False
    is_convolved: bool = False
    copy: tuple[Any, SpecEntries] | None = None


def _layouts(placed: Sequence[_Placed]) -> dict[int, SpecEntries]:
    """The layouts that are known, by position."""
    return {slot: p.entries for slot, p in enumerate(placed) if p.entries is not None}


def _is_moved(entries: SpecEntries | None, wanted: SpecEntries) -> bool:
    """Whether pieces are sent to other devices, and none is larger, on the way from one layout to another."""
    if entries is None or _is_slice(entries, wanted):
        return False
    return {a for axes in entries for a in axes} <= {a for axes in wanted for a in axes}


def _is_slice(entries: SpecEntries, wanted: SpecEntries) -> bool:
    """Whether what a device holds in the layout `wanted` is part of what it holds in the layout `entries`."""
    return all(of[: len(own)] == own for own, of in zip(entries, wanted, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates jaxprs under the shardings of a plan on one mesh.

    Attributes:
      mesh: The mesh of devices, with the plan's axis names and Auto axis types.
      shardings: What the plan demands of each equation, by equation number.
    """

    mesh: Mesh
    shardings: Mapping[int, EquationPlan]

    def __call__(
        self,
        closed: jex.ClosedJaxpr,
        args: Sequence[Any],
        layouts: Sequence[SpecEntries],
        donated: Collection[int] = frozenset(),
    ) -> list[Any]:
        """The outputs of `closed` on flat `args`, which have these `layouts`; those at positions `donated` are."""
        given = [_Placed(x, own, None, k in donated) for k, (x, own) in enumerate(zip(args, layouts, strict=True))]
        placed = [*(_Placed(x, None) for x in closed.consts), *given]
        return [p.value for p in self._run(closed.jaxpr, placed, _Counter())]

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
        env = {v: _Placed(*pair) for v, pair in known.items()}
        equations = [jaxpr.eqns[i] for i in chosen]
        tied = tied_after(equations, [numbers[i] for i in chosen], self.shardings, self.mesh.shape)
        stored = read_by_products(equations)
        turned = turned_at_once(equations, [numbers[i] for i in chosen], self.shardings, self._is_on(TPU_PLATFORMS))
        for position, i in enumerate(chosen):
            self._advance(jaxpr.eqns[i], _Counter(numbers[i]), env, tied.get(position, ()), stored, turned)
        return [v.val if isinstance(v, jex.Literal) else env[v].value for v in wanted]

    def move(self, value: Any, steps: Sequence[SpecEntries]) -> Any:
        """`value` taken through the layouts `steps`, one after another."""
        for entries in steps:
            value = self._constrain(value, entries)
        return value

    def place(self, value: Any, entries: SpecEntries | None) -> Any:
        """`value` in a layout; as it is, if that is None."""
        return self._constrain(value, entries)

    def _result(
        self, equation: jex.JaxprEqn, result: _Placed, entries: SpecEntries | None, wanted: EquationPlan
    ) -> _Placed:
        """A result in its layout; the sum of a scatter-add that is scattered is first made where it is."""
        if entries is None:
            return result
        scattered = [axis for axis, _ in wanted.scatters]
        if scattered and equation.primitive.name == "scatter-add":  # XLA would rather move what is added
            local = tuple(tuple(axis for axis in axes if axis not in scattered) for axes in entries)
            minor = tuple(
                (*own, *(a for a in axes if a in scattered)) for own, axes in zip(local, entries, strict=True)
            )
            return self._place(self.move(result.value, (local, minor)), entries)
        return self._place(result.value, entries)

    def _place(self, value: Any, entries: SpecEntries | None) -> _Placed:
        return _Placed(self._constrain(value, entries), entries)

    def _constrain(self, value: Any, entries: SpecEntries | None) -> Any:
        if entries is None or jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        return jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, partition_spec(entries)))

    def _run(self, jaxpr: jex.Jaxpr, inputs: Sequence[_Placed], counter: _Counter) -> list[_Placed]:
        env: dict[Any, _Placed] = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))
        last_use = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.invars if not isinstance(v, jex.Literal)}
        kept = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
        read = lambda v: _Placed(v.val, None) if isinstance(v, jex.Literal) else env[v]
        numbers = [counter.next + n for n in equation_numbers(jaxpr)]
        tied = tied_after(jaxpr.eqns, numbers, self.shardings, self.mesh.shape)
        stored = read_by_products(jaxpr.eqns)
        turned = turned_at_once(jaxpr.eqns, numbers, self.shardings, self._is_on(TPU_PLATFORMS))
        for i, equation in enumerate(jaxpr.eqns):
            self._advance(equation, counter, env, tied.get(i, ()), stored, turned)
            for v in equation.invars:
                if not isinstance(v, jex.Literal) and last_use.get(v) == i and v not in kept:
                    env.pop(v, None)
        return list(map(read, jaxpr.outvars))

    def _advance(
        self,
        equation: jex.JaxprEqn,
        counter: _Counter,
        env: dict[Any, _Placed],
        tied: Sequence[Any],
        stored: frozenset[Any],
        turned: frozenset[Any],
    ) -> None:
        """Evaluates one equation of a program and puts its results into `env`.

        The variables `tied` are from then on tied to its results, so that what reads them waits for these; not for the
        sum, where they are partial. Results in `stored` that are made of a gathered copy are not to be made of it
        again. Those in `turned` are left to what reads them.
        """
        read = lambda v: _Placed(v.val, None) if isinstance(v, jex.Literal) else env[v]
        number = counter.take()
        wanted = self.shardings.get(number, EquationPlan())
        with jax.named_scope(scope_of(number)):
            placed = list(map(read, equation.invars))
            for slot, steps in wanted.operands:
                copy = placed[slot].copy
                if copy is not None and copy[1] == steps[-1]:
                    placed[slot] = placed[slot]._replace(value=copy[0], entries=copy[1], copy=None)
            if wanted.delayed:
                self._slice_first(placed, wanted)
            for slot in wanted.delayed:
                self._tie(placed, slot)
                env[equation.invars[slot]] = placed[slot]  # so that what reads it next shares the new copy
            operands = self._read(placed, wanted)
            entries = dict(wanted.results)
            for slot, steps in wanted.operands:
                v = equation.invars[slot]
                if v in tied and _is_moved(env[v].entries, steps[-1]):
                    env[v] = env[v]._replace(copy=(operands[slot].value, steps[-1]))
            early = tied_to_partial_sum(equation, wanted, _layouts(placed), tied, self.mesh.shape)
            if early:
                results = self._before_its_sum(equation, operands, wanted, env, early)
                tied = [v for v in tied if v not in early]
            else:
                results = self._evaluate(equation, operands, wanted, counter)
            for slot, (v, r) in enumerate(zip(equation.outvars, results, strict=True)):
                if not isinstance(v, jex.DropVar):
                    env[v] = self._result(equation, r, None if v in turned else entries.get(slot), wanted)._replace(
                        is_state=r.is_state,
                        is_scattered=r.is_scattered,
                        is_convolved=equation.primitive.name in CONVOLUTIONS,
                    )
            if not stored.isdisjoint(equation.outvars) and is_made_of_a_copy(equation, _layouts(placed), wanted):
                for v in stored.intersection(equation.outvars):
                    env[v] = self._place(jax.lax.optimization_barrier(env[v].value), env[v].entries)
            for v in tied:
                bound = [v, *(r for r in equation.outvars if not isinstance(r, jex.DropVar))]
                copy, layout = env[v].copy or (None, None)
                values, copy = jax.lax.optimization_barrier(([env[b].value for b in bound], copy))
                env.update((b, self._place(x, env[b].entries)) for b, x in zip(bound, values, strict=True))
                if layout is not None:
                    env[v] = env[v]._replace(copy=(self._constrain(copy, layout), layout))

    def _is_on(self, platforms: Collection[str]) -> bool:
        return self.mesh.devices.flat[0].platform in platforms

    def _slice_first(self, placed: list[_Placed], wanted: EquationPlan) -> None:
        """Takes the slices that an equation reads: what is tied to its operands would else keep the whole ones."""
        for slot, steps in wanted.operands:
            own = placed[slot].entries
            if slot not in wanted.delayed and own is not None and _is_slice(own, steps[-1]):
                placed[slot] = self._place(placed[slot].value, steps[-1])

    def _before_its_sum(
        self,
        equation: jex.JaxprEqn,
        operands: Sequence[_Placed],
        wanted: EquationPlan,
        env: dict[Any, _Placed],
        tied: Sequence[Any],
    ) -> list[_Placed]:
        """The result of a product, whose part on each device the variables `tied` wait for, but not for the sum."""
        rule, values = table_rule(leaf_of(equation)), [o.value for o in operands]
        ready = [v for v in tied if env[v].entries is not None]
        moved = [v for v in ready if env[v].copy is not None]
        waiting = [*(env[v][:2] for v in ready), *(env[v].copy for v in moved)]
        specs = [(x, partition_spec(entries)) for x, entries in waiting]
        result, *bound = run_by_shards(equation, values, rule, wanted, self.mesh, specs)
        env.update((v, env[v]._replace(value=x)) for v, x in zip(ready, bound, strict=False))
        copies = zip(moved, bound[len(ready) :], strict=True)
        env.update((v, env[v]._replace(copy=(x, env[v].copy[1]))) for v, x in copies)
        return [_Placed(result, None)]

    def _tie(self, placed: list[_Placed], slot: int) -> None:
        """Ties an operand to the others, so that its copy cannot be made before they are there.

        What the program fills with a scalar is filled anew then. XLA ignores operands of a barrier that nothing reads
        behind it, so all are replaced.
        """
        own, entries, filled = placed[slot][:3]
        others = [s for s, p in enumerate(placed) if s != slot and isinstance(p.value, jax.Array)]
        if not others:
            return
        first = own if filled is None else jax.numpy.asarray(filled, own.dtype)
        tied, *rest = jax.lax.optimization_barrier((first, *[placed[s].value for s in others]))
        placed[slot] = self._place(tied if filled is None else jax.lax.broadcast(tied, own.shape), entries)
        for s, value in zip(others, rest, strict=True):
            placed[s] = self._place(value, placed[s].entries)

    def _read(self, placed: list[_Placed], wanted: EquationPlan) -> list[_Placed]:
        """Operands in the layouts in which the equation reads them."""
        operands = [p.value for p in placed]
        for slot, steps in wanted.operands:
            is_there = placed[slot].entries == steps[-1]
            operands[slot] = self.move(operands[slot], steps[-1:] if is_there else steps)
        gathered = [slot for slot, steps in wanted.operands if is_gathered_inside(placed[slot].entries, steps[-1])]
        if len(gathered) == 1 and placed[gathered[0]].is_convolved and self._is_on(GPU_PLATFORMS):
            (slot,) = gathered  # of two, XLA would gather the sum
            spec = partition_spec(dict(wanted.operands)[slot][-1])
            operands[slot] = jax.lax.optimization_barrier(shards_row_by_row(operands[slot], spec, self.mesh))
        read_as = {slot: steps[-1] for slot, steps in wanted.operands}
        return [
            _Placed(x, read_as.get(slot, p.entries), is_state=p.is_state, is_scattered=p.is_scattered)
            for slot, (x, p) in enumerate(zip(operands, placed, strict=True))
        ]

    def _evaluate(
        self, equation: jex.JaxprEqn, placed: list[_Placed], wanted: EquationPlan, counter: _Counter
    ) -> list[_Placed]:
        """The results of an equation, and their layouts where an inlined function tells them."""
        if kind_of(equation) is EquationKind.CALL:
            return self._call(equation, placed, counter)
        results = self._results(equation, placed, wanted, counter)
        is_filled = equation.primitive.name == "broadcast_in_dim" and isinstance(equation.invars[0], jex.Literal)
        of_state = is_of_state(equation, [p.is_state for p in placed])
        filled = equation.invars[0].val if is_filled else None
        is_scattered = equation.primitive.name.startswith("scatter")
        return [_Placed(r, None, filled, of_state, is_scattered) for r in results]

    def _results(
        self, equation: jex.JaxprEqn, placed: list[_Placed], wanted: EquationPlan, counter: _Counter
    ) -> list[Any]:
        operands = [p.value for p in placed]
        match kind_of(equation):
            case EquationKind.SCAN:
                return self._scan(equation, placed, wanted, counter)
            case EquationKind.WHILE:
                return self._while(equation, placed, wanted, counter)
            case EquationKind.COND:
                results = dict(wanted.results)  # all branches must end in one layout
                inputs = _layouts(placed[1:])
                branches = tuple(self._nested(b, counter, inputs, results) for b in equation.params["branches"])
                return equation.primitive.bind(*operands, **{**equation.params, "branches": branches})
            case EquationKind.OPAQUE if equation.primitive.name == "shard_map":
                return self._region(equation, operands)
            case _:
                if equation.primitive.name == "sharding_constraint":
                    return operands  # the plan's own constraint, on the result, takes its place
                if self._is_on(GPU_PLATFORMS):
                    layouts = _layouts(placed)
                    turned = added_to_state(equation, [p.is_state for p in placed], [p.is_scattered for p in placed])
                    if 0 in layouts and may_be_turned(equation, layouts[0], self.mesh.shape):
                        turned = (0,)
                    for slot in turned:
                        if slot in layouts:
                            spec = partition_spec(layouts[slot])
                            operands[slot] = shards_row_by_row(operands[slot], spec, self.mesh)
                if (rule := rule_by_shards(equation, wanted)) is not None:
                    return run_by_shards(equation, operands, rule, wanted, self.mesh)
                results = equation.primitive.bind(*operands, **equation.params)
                return list(results) if equation.primitive.multiple_results else [results]

    def _region(self, equation: jex.JaxprEqn, operands: list[Any]) -> list[Any]:
        """A manual region: as the user wrote it, on the plan's devices."""
        p = equation.params
        if dict(p["mesh"].shape) != dict(self.mesh.shape) or p["mesh"].axis_names != self.mesh.axis_names:
            raise MeshError(
                "A `shard_map` region runs on the plan's devices, so its mesh must have the plan's axes in the plan's "
                f"order: the region at {source_of(equation) or 'an unknown line'} has {dict(p['mesh'].shape)}, the "
                f"plan {dict(self.mesh.shape)}. Plan with mesh= the axes of the region."
            )
        body = jex.jaxpr_as_fun(jex.ClosedJaxpr(open_jaxpr(p["jaxpr"]), ()))
        region = jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=tuple(p["in_specs"]),
            out_specs=list(p["out_specs"]),
            axis_names=p["newly_manual_axes"]
            if "newly_manual_axes" in p
            else p["manual_axes"],  # the name before 0.10.2
            check_vma=p["check_vma"],
        )
        return region(*operands)

    def _call(self, equation: jex.JaxprEqn, operands: list[_Placed], counter: _Counter) -> list[_Placed]:
        name, nested = called_jaxpr(equation)
        if (
            "prevent_cse" not in equation.params
        ):  # only checkpoint changes what the compiler may do; the rest is inlined
            inner = open_jaxpr(nested)
            consts = nested.consts if isinstance(nested, jex.ClosedJaxpr) else ()
            inputs = [*(_Placed(c, None) for c in consts), *called_operands(equation, operands)]
            return self._run(inner, inputs, counter)
        ends: list[SpecEntries | None] = []
        closed = self._nested(nested, counter, _layouts(operands), ends=ends)
        inner = closed.jaxpr
        hoisted = inner.replace(constvars=[], invars=[*inner.constvars, *inner.invars], debug_info=inner.debug_info)
        values = [p.value for p in operands]
        results = equation.primitive.bind(*closed.consts, *values, **{**equation.params, name: hoisted})
        return list(map(self._place, results, ends))

    def _nested(
        self,
        nested: jex.Jaxpr | jex.ClosedJaxpr,
        counter: _Counter,
        body: Mapping[int, SpecEntries] | None = None,
        results: Mapping[int, SpecEntries] | None = None,
        ends: list[SpecEntries | None] | None = None,
    ) -> jex.ClosedJaxpr:
        """`nested` rewritten under the plan, optionally with layouts for its own inputs and results.

        Those that its results are known to have inside are written into `ends`.
        """
        inner = open_jaxpr(nested)
        consts = nested.consts if isinstance(nested, jex.ClosedJaxpr) else ()

        def rewritten(*args):
            args = [self._place(a, (body or {}).get(i)) for i, a in enumerate(args)]
            outs = self._run(inner, [*(_Placed(c, None) for c in consts), *args], counter)
            if ends is not None:
                ends[:] = [o.entries for o in outs]
            return [self._constrain(o.value, (results or {}).get(i)) for i, o in enumerate(outs)]

        avals = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False))
            for v in inner.invars
        ]
        return jax.make_jaxpr(rewritten)(*avals)

    def _scan(
        self, equation: jex.JaxprEqn, operands: list[_Placed], wanted: EquationPlan, counter: _Counter
    ) -> list[Any]:
        p = equation.params
        n_consts, n_carry = scan_counts(equation)
        body = {**_layouts(operands[:n_consts]), **dict(wanted.body)}
        results = {k: body[n_consts + k] for k in range(n_carry) if n_consts + k in body}
        nested = self._nested(p["jaxpr"], counter, body, results)
        return equation.primitive.bind(*(o.value for o in operands), **{**p, "jaxpr": nested})

    def _while(
        self, equation: jex.JaxprEqn, operands: list[_Placed], wanted: EquationPlan, counter: _Counter
    ) -> list[Any]:
        p = equation.params
        carried, tested, repeated = dict(wanted.body), p["cond_nconsts"], p["body_nconsts"]
        inside = lambda consts: {**_layouts(consts), **{len(consts) + k: e for k, e in carried.items()}}
        condition = self._nested(p["cond_jaxpr"], counter, inside(operands[:tested]))
        body = self._nested(p["body_jaxpr"], counter, inside(operands[tested : tested + repeated]), carried)
        values = [o.value for o in operands]
        return equation.primitive.bind(*values, **{**p, "cond_jaxpr": condition, "body_jaxpr": body})
