"""A plan applied to its function: checked against it, run, and its arguments described, placed and made."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from autoshard.errors import PlanMismatchError
from autoshard.execution.jit import PlannedFunction
from autoshard.execution.placement import refuse_host_memory, sharding_of
from autoshard.plans.program_plan import PlannedTensor, ProgramPlan
from autoshard.trace.flatten import TraceOptions
from autoshard.trace.trace import Trace, argument_paths, trace
from autoshard.train_step import TrainStep

Leaf = tuple[str, tuple[int, ...], str]
"""Path, shape and dtype of a leaf."""


def planned_function(
    plan: ProgramPlan, fn: Callable[..., Any], mesh: Mesh, cost_profile: bool = True, trial: bool = False
) -> PlannedFunction:
    """`fn` as planned, on a mesh with the plan's axes; checked on first use, as by `check`.

    `cost_profile`: Whether a program for GPUs is scheduled in the fastest of several ways. `trial`: Whether the fastest
    is found by the first steps of a run, else by replay.
    """
    interface = dataclasses.replace(plan.interface, trial=trial)
    if not cost_profile:
        interface = dataclasses.replace(interface, choosing=dataclasses.replace(interface.choosing, others=()))
    return PlannedFunction(fn, interface, mesh, lambda args: check(plan, fn, args), lambda: argument_shapes(plan))


def check(plan: ProgramPlan, fn: Callable[..., Any], args: Sequence[Any]) -> Trace:
    """Traces `fn(*args)` and verifies that it is the planned program; what was planned is not traced again.

    Raises:
      PlanMismatchError: Naming the first difference.
    """
    fn = as_chosen(plan, fn)
    given = _as_planned(plan, args)
    kept = None if plan.kept_trace is None else plan.kept_trace.of(fn, given)
    if kept is not None:
        return kept
    planned = [(a.name, a.shape, a.dtype) for a in plan.arguments]
    received = leaves_of(fn, given)
    if [shape for _, shape, _ in received] != [shape for _, shape, _ in planned]:
        refuse_others(planned, received)  # before the function stumbles over them
    traced = trace(fn, given, plan.donate_argnums, TraceOptions())
    values = traced.graph.values
    refuse_others(planned, [(a.name, values[a.value].shape, values[a.value].dtype) for a in traced.graph.arguments])
    for k in range(max(len(plan.equations), len(traced.graph.equations))):
        ours, theirs = (x[k] if k < len(x) else "nothing" for x in (plan.equations, traced.graph.equations))
        if ours != theirs:
            line = next((o.source for o in traced.graph.operations if o.equation >= k), "")
            raise PlanMismatchError(
                f"The function is no longer the one that was planned: equation {k} of {len(plan.equations)} was "
                f"`{ours}` and is now `{theirs}`{f' ({line})' if line else ''}. Plan the new function, or go back to "
                "the old one (another JAX or Flax version can also trace differently)."
            )
    return traced


def leaves_of(fn: Callable[..., Any], args: Sequence[Any]) -> list[Leaf]:
    """The leaves of the arguments of `fn`, which are arrays or their shapes."""
    leaves = zip(argument_paths(fn, args), jax.tree_util.tree_leaves(tuple(args)), strict=True)
    return [(name, jnp.shape(x), str(getattr(x, "dtype", type(x).__name__))) for name, x in leaves]


def refuse_others(planned: Sequence[Leaf], received: Sequence[Leaf]) -> None:
    """Refuses leaves that are not those planned.

    Raises:
      PlanMismatchError: A leaf has another shape or dtype than is planned, or is not there; names the first.
    """
    for k in range(max(len(received), len(planned))):
        ours, theirs = (x[k] if k < len(x) else None for x in (planned, received))
        if ours is None or theirs is None or ours[1:] != theirs[1:]:
            raise PlanMismatchError(
                f"The plan was made for other arguments: leaf {k} is planned as {_leaf(ours)}, but the function is "
                f"called with {_leaf(theirs)}. Plan again for these arguments."
            )


def as_chosen(plan: ProgramPlan, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` in the form that a plan chose for it.

    Raises:
      PlanMismatchError: The plan chose some, which only a `TrainStep` can be given.
    """
    if plan.choice is None or plan.choice.variant.is_as_written:
        return fn
    if not isinstance(fn, TrainStep):
        raise PlanMismatchError(
            f"The plan chose what the layers of a TrainStep keep ({plan.choice}); received "
            f"{getattr(fn, '__name__', type(fn).__name__)}, which is none. Pass the TrainStep that was planned."
        )
    return plan.choice.variant.of(fn)


def argument_shapes(plan: ProgramPlan) -> tuple[Any, ...]:
    """The arguments that the plan was made for, by shape and type.

    Raises:
      PlanMismatchError: The plan was read from a file, which names the leaves of the arguments but no pytree types.
    """
    if plan.in_tree is None:
        raise PlanMismatchError(
            f"A plan read from a file knows the {len(plan.arguments)} leaves of its arguments, but not the pytree "
            "types that hold them. Pass the arguments, arrays or jax.ShapeDtypeStruct."
        )
    leaves = [jax.ShapeDtypeStruct(a.shape, _dtype(a.dtype), weak_type=a.is_weak) for a in plan.arguments]
    return jax.tree_util.tree_unflatten(plan.in_tree, leaves)


def _dtype(name: str) -> Any:
    """The type that JAX writes as `name`; keys of random numbers, such as `key<fry>`, NumPy does not know."""
    if not name.startswith("key<"):
        return jnp.dtype(name)
    kinds = (jax.eval_shape(lambda k=k: jax.random.key(0, impl=k)).dtype for k in ("threefry2x32", "rbg", "unsafe_rbg"))
    found = next((kind for kind in kinds if str(kind) == name), None)
    if found is None:
        raise PlanMismatchError(
            f"The plan was made for keys of type {name}, which this JAX does not make by itself. Pass the arguments."
        )
    return found


def argument_shardings(plan: ProgramPlan, mesh: Mesh, like: Any = None, argument: int | None = None) -> Any:
    """NamedShardings of the arguments on `mesh`.

    Args:
      plan: The plan. mesh: Devices with its axes.
      like: A pytree with the leaves of what is asked for, whose structure the result has; None for the plan's own, or
        in a plan read from a file, which knows no pytree types, a mapping from path to sharding.
      argument: Which positional argument; None for the tuple of all.

    Raises:
      PlanMismatchError: `like` has other leaves than the plan.
    """
    tensors = plan.arguments if argument is None else _positional(plan, argument)
    shardings = [sharding_of(mesh, t.entries, t.in_host) for t in tensors]
    if like is not None:
        return jax.tree_util.tree_unflatten(_structure(like, tensors, "`like` must be"), shardings)
    if plan.in_tree is None:
        return {t.name: sharding for t, sharding in zip(tensors, shardings, strict=True)}
    tree = plan.in_tree if argument is None else plan.in_tree.children()[argument]
    return jax.tree_util.tree_unflatten(tree, shardings)


def create_argument(
    plan: ProgramPlan, mesh: Mesh, init_fn: Callable[..., Any], args: Sequence[Any], argument: int
) -> Any:
    """What `init_fn(*args)` returns, created as positional argument `argument`: sharded, never whole on one device.

    Raises:
      PlanMismatchError: It has other leaves than the plan's argument.
      MissingExtraError: The plan has some of it in the memory of the host, for which this JAX is too old.
    """
    tensors = _positional(plan, argument)
    if any(t.in_host for t in tensors):
        refuse_host_memory(mesh)
    what = f"`{getattr(init_fn, '__name__', 'init_fn')}` must return"
    tree = _structure(jax.eval_shape(init_fn, *args), tensors, what)
    shardings = [sharding_of(mesh, t.entries, t.in_host) for t in tensors]
    return jax.jit(init_fn, out_shardings=jax.tree_util.tree_unflatten(tree, shardings))(*args)


def _as_planned(plan: ProgramPlan, args: Sequence[Any]) -> tuple[Any, ...]:
    """`args`, those as shapes whose dtype gives way to others where the planned one did not, or the reverse."""
    leaves, tree = jax.tree_util.tree_flatten(tuple(args))
    if len(leaves) != len(plan.arguments):
        return tuple(args)
    for k, (leaf, planned) in enumerate(zip(leaves, plan.arguments, strict=True)):
        is_number = isinstance(leaf, int | float | complex) and not hasattr(leaf, "dtype")
        array: Any = jax.typeof(leaf) if is_number else leaf
        if getattr(array, "weak_type", False) == planned.is_weak:
            continue
        if (array.shape, str(array.dtype)) == (planned.shape, planned.dtype):
            leaves[k] = jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=planned.is_weak)
    return jax.tree_util.tree_unflatten(tree, leaves)


def _structure(like: Any, tensors: Sequence[PlannedTensor], what: str) -> Any:
    """The structure of `like`, whose leaves must be `tensors`; `what` opens the error if they are others."""
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
    return tree


def _positional(plan: ProgramPlan, argument: int) -> tuple[PlannedTensor, ...]:
    """The leaves of one positional argument."""
    if plan.in_tree is not None:
        counts = [child.num_leaves for child in plan.in_tree.children()]
        if not -len(counts) <= argument < len(counts):
            raise PlanMismatchError(
                f"The planned function has {len(counts)} arguments; argument={argument} is none of them."
            )
        start = sum(counts[: argument % len(counts)])
        return plan.arguments[start : start + counts[argument]]
    heads = list(dict.fromkeys(a.name.split(".")[0] for a in plan.arguments))
    return tuple(a for a in plan.arguments if a.name.split(".")[0] == heads[argument])


def _leaf(leaf: Leaf | None) -> str:
    return "nothing" if leaf is None else f"`{leaf[0]}` {leaf[2]}{list(leaf[1])}"
