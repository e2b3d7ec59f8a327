"""Equations that nest programs: each nested program is rewritten under the plan, and bound in the old one's place."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import Mesh

from autoshard.errors import MeshError
from autoshard.execution.late_stacks import scan_with_late_stacks
from autoshard.execution.placement import Placed, Placement, known_layouts
from autoshard.graph.equation_plan import EquationPlan
from autoshard.graph.layout import SpecEntries
from autoshard.trace.source import source_of
from autoshard.trace.walk import (
    EquationKind,
    called_operands,
    is_checkpoint,
    kind_of,
    nested_numbers,
    nested_programs,
    open_jaxpr,
    scan_counts,
    type_of,
)

Run = Callable[[jex.Jaxpr, Sequence[Placed], int], list[Placed]]
"""(program, its constants and inputs, the number of its first equation) -> its results, under the plan."""


@dataclasses.dataclass(frozen=True, slots=True)
class Nested:
    """Evaluates equations that nest programs."""

    placement: Placement
    run: Run

    def evaluate(
        self, equation: jex.JaxprEqn, operands: Sequence[Placed], plan: EquationPlan, number: int
    ) -> list[Placed]:
        """The results of equation `number`, which nests programs; a scan's and so on have no layouts yet."""
        kind = kind_of(equation)
        if kind is EquationKind.SCAN:
            operands = self._scanned_whole(equation, operands, plan)
        numbers, values = nested_numbers(equation, number), [o.value for o in operands]
        match kind:
            case EquationKind.CALL:
                return self._call(equation, operands, plan, number + 1)
            case EquationKind.SCAN:
                programs = self._scan(equation, operands, plan, number + 1)
                if plan.late_stacks:
                    results = scan_with_late_stacks(equation, programs["jaxpr"], values, plan.late_stacks)
                    return [Placed(r, None) for r in results]
            case EquationKind.WHILE:
                programs = self._while(equation, operands, plan, numbers)
            case _:
                results = dict(plan.results)  # all branches must end in one layout
                inputs = known_layouts(operands[1:])
                branches = zip(equation.params["branches"], numbers, strict=True)
                programs = {"branches": tuple(self._rewritten(b, n, inputs, results)[0] for b, n in branches)}
        results = equation.primitive.bind(*values, **{**equation.params, **programs})
        return [Placed(r, None) for r in results]

    def _call(
        self, equation: jex.JaxprEqn, operands: Sequence[Placed], plan: EquationPlan, number: int
    ) -> list[Placed]:
        """A call: inlined, but of a checkpointed function, which changes what the compiler may do.

        What enters that one is constrained again inside: the compiler would else give it the layout of any of its uses.
        """
        (nested,) = nested_programs(equation)
        if not is_checkpoint(equation):
            consts = nested.consts if isinstance(nested, jex.ClosedJaxpr) else ()
            inputs = [*(Placed(c, None) for c in consts), *called_operands(equation, operands)]
            return self.run(open_jaxpr(nested), inputs, number)
        closed, ends = self._rewritten(nested, number, known_layouts(operands))
        inner = closed.jaxpr
        hoisted = inner.replace(constvars=[], invars=[*inner.constvars, *inner.invars], debug_info=inner.debug_info)
        values = [p.value for p in operands]
        params = {**equation.params, "jaxpr": hoisted}
        if plan.opened:
            held = params["prevent_cse"]
            every = held if isinstance(held, tuple) else (held,) * len(values)
            kept = tuple(is_held and slot not in plan.opened for slot, is_held in enumerate(every))
            params["prevent_cse"] = (bool(held),) * len(closed.consts) + kept
        results = equation.primitive.bind(*closed.consts, *values, **params)
        return list(map(self.placement.place, results, ends))

    def _scanned_whole(
        self, equation: jex.JaxprEqn, operands: Sequence[Placed], plan: EquationPlan
    ) -> Sequence[Placed]:
        """The operands of a scan. What it slices is gathered where slices lie as it does but for the sliced dimension:
        XLA may gather all of it in each iteration."""
        inside, found = dict(plan.body), list(operands)
        for slot in range(sum(scan_counts(equation)), len(operands)):
            lies = operands[slot].entries
            if lies and lies[0] and lies[1:] == inside.get(slot):
                found[slot] = self.placement.place(operands[slot].value, ((), *inside[slot]))
        return found

    def _scan(
        self, equation: jex.JaxprEqn, operands: Sequence[Placed], plan: EquationPlan, number: int
    ) -> dict[str, Any]:
        n_consts, n_carry = scan_counts(equation)
        body = {**known_layouts(operands[:n_consts]), **dict(plan.body)}
        results = {k: body[n_consts + k] for k in range(n_carry) if n_consts + k in body}
        kept = [slot for slot in plan.row_major if slot < n_consts and slot in body]
        stacks = plan.row_major_stacks
        return {"jaxpr": self._rewritten(equation.params["jaxpr"], number, body, results, kept, stacks)[0]}

    def _while(
        self, equation: jex.JaxprEqn, operands: Sequence[Placed], plan: EquationPlan, numbers: Sequence[int]
    ) -> dict[str, Any]:
        p = equation.params
        carried, tested, repeated = dict(plan.body), p["cond_nconsts"], p["body_nconsts"]
        inside = lambda consts: {**known_layouts(consts), **{len(consts) + k: e for k, e in carried.items()}}
        condition, _ = self._rewritten(p["cond_jaxpr"], numbers[0], inside(operands[:tested]))
        repeat = inside(operands[tested : tested + repeated])
        return {
            "cond_jaxpr": condition,
            "body_jaxpr": self._rewritten(p["body_jaxpr"], numbers[1], repeat, carried)[0],
        }

    def _rewritten(
        self,
        nested: jex.Jaxpr | jex.ClosedJaxpr,
        number: int,
        inputs: Mapping[int, SpecEntries],
        results: Mapping[int, SpecEntries] | None = None,
        row_major: Collection[int] = (),
        results_row_major: Collection[int] = (),
    ) -> tuple[jex.ClosedJaxpr, list[SpecEntries | None]]:
        """`nested` rewritten under the plan, with layouts for its inputs and results, and those that its results are
        known to have inside; the inputs `row_major`, and the results `results_row_major`, are kept so."""
        inner = open_jaxpr(nested)
        consts = nested.consts if isinstance(nested, jex.ClosedJaxpr) else ()
        ends: list[SpecEntries | None] = []

        def rewritten(*args):
            args = [self.placement.place(a, inputs.get(i)) for i, a in enumerate(args)]
            for i in row_major:
                args[i] = args[i]._replace(value=self.placement.row_major(args[i].value, inputs[i]))
            outs = self.run(inner, [*(Placed(c, None) for c in consts), *args], number)
            ends[:] = [o.entries for o in outs]
            for i in results_row_major:
                if (lies := outs[i].entries) is not None:
                    outs[i] = outs[i]._replace(value=self.placement.row_major(outs[i].value, lies))
            return [self.placement.constrain(o.value, (results or {}).get(i)) for i, o in enumerate(outs)]

        avals = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
            for a in map(type_of, inner.invars)
        ]
        return jax.make_jaxpr(rewritten)(*avals), ends


def manual_region(equation: jex.JaxprEqn, operands: Sequence[Any], mesh: Mesh) -> list[Any]:
    """The results of a `shard_map`: as the user wrote it, on the plan's devices.

    Raises:
      MeshError: It is written for another mesh than the plan's.
    """
    p = equation.params
    if dict(p["mesh"].shape) != dict(mesh.shape) or p["mesh"].axis_names != mesh.axis_names:
        raise MeshError(
            "A `shard_map` region runs on the plan's devices, so its mesh must have the plan's axes in the plan's "
            f"order: the region at {source_of(equation) or 'an unknown line'} has {dict(p['mesh'].shape)}, the "
            f"plan {dict(mesh.shape)}. Plan with mesh= the axes of the region."
        )
    body = jex.jaxpr_as_fun(jex.ClosedJaxpr(open_jaxpr(p["jaxpr"]), ()))
    # its types tell which devices it was traced for; those of the plan may be others, as where it is only compiled
    traced = p["mesh"].abstract_mesh.update(axis_types=mesh.axis_types)
    region = jax.shard_map(
        body,
        mesh=traced,
        in_specs=tuple(p["in_specs"]),
        out_specs=list(p["out_specs"]),
        axis_names=p["newly_manual_axes"] if "newly_manual_axes" in p else p["manual_axes"],  # the name before 0.10.2
        check_vma=p["check_vma"],
    )
    with jax.sharding.use_abstract_mesh(traced):
        return region(*operands)
