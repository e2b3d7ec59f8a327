"""Compiles a planned step ahead of time and sets what was predicted beside what the compiler made of it."""

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autoshard.compiler.candidates import Candidate
from autoshard.graph.layout import spec_shard_bytes
from autoshard.hlo.collectives import compiled_collectives
from autoshard.hlo.cycles import estimated_cycles
from autoshard.hlo.flops import product_flops
from autoshard.hlo.module import parse
from autoshard.plans.apply import argument_shapes, check
from autoshard.plans.program_plan import PlannedTensor, ProgramPlan
from autoshard.trace.explicit import typed
from autoshard.trace.rules.products import PRODUCTS
from autoshard.trace.trace import Trace
from autoshard.verify.compile import compile_step
from autoshard.verify.devices import devices_for, options_for
from autoshard.verify.figures import MemoryFigures
from autoshard.verify.rematerialised import rematerialisations
from autoshard.verify.schedule import choosing_for, schedule_figures
from autoshard.verify.strays import Origins, flows, strays
from autoshard.verify.targets import target_named, target_of
from autoshard.verify.verification import Verification


def verify(
    plan: ProgramPlan,
    fn: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    time_limit_s: float | None = None,
    on_stage: Callable[[str], None] | None = None,
    candidates: tuple[Candidate, ...] | None = None,
) -> Verification:
    """Compiles `fn(*args)` as planned for devices that need not be there, and compares. Nothing runs.

    Args:
      plan: The plan. fn: The function that was planned.
      *args: Its arguments, by shape; none for those that the plan was made for.
      target: Devices to compile for, such as `h100`, `tpu-v5e` or `cpu`; None for the plan's own.
      time_limit_s: Seconds that the compiler may take; None for no limit.
      on_stage: Called with what comes next.
      candidates: The ways to schedule the program, if it is for the plan's own GPUs and to hide collectives, of which
        the fastest that fits is taken; None for those that `plan.jit` tries.

    Raises:
      PlanMismatchError: `fn` is not what was planned.
      MissingExtraError: The compiler for these devices is not installed.
      VerificationError: It does not know the devices, does not compile the program, or takes too long.
    """
    say = on_stage or (lambda stage: None)
    args = jax.tree.map(by_shape, args) or argument_shapes(plan)
    chosen = target_of(plan) if target is None else target_named(target)
    devices_per_node = plan.devices_per_node if chosen.name == plan.device else None  # nodes of other devices differ
    devices = devices_for(chosen, plan.axes, devices_per_node, plan.logical_mesh.torus)
    started = time.perf_counter()
    say("tracing")
    traced = check(plan, fn, args)
    say("compiling")
    choosing = choosing_for(plan, chosen, candidates)
    compiled = compile_step(plan, fn, args, devices, options_for(chosen), time_limit_s, choosing)
    compile_s = time.perf_counter() - started
    say("reading the compiled program")
    module = parse(compiled.text)
    origins, order = Origins.of(traced), tuple(name for name, _ in plan.axes)
    collectives = compiled_collectives(module, plan.axes)
    memory, e = compiled.memory, plan.estimate
    return Verification(
        plan=plan.name,
        cluster=plan.cluster,
        target=chosen.name,
        axes=plan.axes,
        flows=flows(e.collectives, collectives, order),
        strays=strays(e.collectives, collectives, origins, order),
        rematerialised=rematerialisations(compiled.log, origins),
        predicted_memory=predicted_memory(plan, traced),
        compiled_memory=MemoryFigures(
            memory.argument_bytes,
            memory.output_bytes,
            memory.alias_bytes,
            memory.temporary_bytes,
            memory.peak_bytes,
            memory.host_bytes,
        ),
        reserved_bytes=memory.total_bytes,
        predicted_flops=sum(c.flops for c in e.compute if c.name in PRODUCTS),
        compiled_flops=product_flops(module),
        estimated_cycles=estimated_cycles(module),
        compile_s=compile_s,
        jax_version=jax.__version__,
        predicted_reserved_bytes=e.reserved_bytes,
        schedule=schedule_figures(plan, chosen, module, compiled, origins),
    )


def predicted_memory(plan: ProgramPlan, traced: Trace) -> MemoryFigures:
    """The plan's memory in the compiler's terms: what arguments and outputs take on a device, and the rest.

    The rest is what is reserved for everything else; of the peak, in a plan that does not tell what is reserved.

    An output takes the place of a donated argument of equal shape, type and layout, as `jax.jit` has it.
    """
    sizes = plan.mesh_axes
    values = traced.graph.values

    def on_device(tensor: PlannedTensor, value: int | None) -> float:
        return 0.0 if value is None else spec_shard_bytes(values[value].size_bytes, tensor.entries, sizes)

    all_arguments = [(t, on_device(t, a.value)) for t, a in zip(plan.arguments, traced.graph.arguments, strict=True)]
    host_bytes = sum(size_bytes for t, size_bytes in all_arguments if t.in_host)
    host_bytes += sum(c.held_bytes for c in plan.estimate.residual_copies)
    arguments = [0.0 if t.in_host else size_bytes for t, size_bytes in all_arguments]
    pairs = zip(plan.outputs, traced.graph.outputs, strict=True)
    outputs = [0.0 if t.in_host else on_device(t, o.value) for t, o in pairs]
    free = collections.Counter(_interface(plan.arguments[k]) for k in _donated(plan, traced))
    alias_bytes = 0.0
    for tensor, size_bytes in zip(plan.outputs, outputs, strict=True):
        if free[_interface(tensor)]:
            free[_interface(tensor)] -= 1
            alias_bytes += size_bytes
    peak_bytes = plan.estimate.peak_bytes
    rest_bytes = (plan.estimate.reserved_bytes or peak_bytes) - sum(arguments) - sum(outputs) + alias_bytes
    return MemoryFigures(sum(arguments), sum(outputs), alias_bytes, max(rest_bytes, 0.0), peak_bytes, host_bytes)


def _interface(tensor: PlannedTensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.entries, tensor.in_host


def _donated(plan: ProgramPlan, traced: Trace) -> Sequence[int]:
    """The leaves of donated arguments."""
    counts = [child.num_leaves for child in traced.in_tree.children()]
    starts = [sum(counts[:k]) for k in range(len(counts))]
    return [leaf for k in plan.donate_argnums for leaf in range(starts[k], starts[k] + counts[k])]


def by_shape(leaf: Any) -> Any:
    """An array without its data, which lie on other devices than those that are compiled for."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type, sharding=typed(leaf))
