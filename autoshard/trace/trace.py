"""From a Python function to the unified graph: trace to a jaxpr, flatten it, and name its interface."""

import collections
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from autoshard.errors import TraceError
from autoshard.graph.graph import Argument, Graph, Output, ValueKind
from autoshard.trace.annotations import argument_layout, partitioning_metadata
from autoshard.trace.flatten import Flattener, TraceOptions


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """A traced function: its jaxpr, the trees of its interface, and its graph.

    Attributes:
      jaxpr: The closed jaxpr of the whole function.
      in_tree, out_tree: Tree definitions of the positional arguments (a tuple) and of the result.
      graph: The unified graph.
    """

    jaxpr: jex.ClosedJaxpr
    in_tree: Any
    out_tree: Any
    graph: Graph


def path_name(path: Sequence[Any]) -> str:
    """A pytree key path as dotted text: `params.h_0.kernel`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".")


def _bare(leaf: Any) -> Any:
    """Shape and dtype of an array leaf without its sharding, which would otherwise become part of the traced types."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))
    return leaf


def _refuse_changes_in_place(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, refusing to lose what it writes into its arguments (an NNX module, a dictionary) without returning it."""

    def watched(*args):
        leaves = jax.tree_util.tree_leaves_with_path
        before = {path_name(path): leaf for path, leaf in leaves(args)}
        result = fn(*args)
        after = {path_name(path): leaf for path, leaf in leaves(args)}
        changed = [name for name in {**before, **after} if before.get(name) is not after.get(name)]
        if changed:
            raise TraceError(
                f"A planned function must be pure, but `{getattr(fn, '__name__', 'the function')}` changes its "
                "arguments in "
                f"place, where the change would be lost: {', '.join(f'`{name}`' for name in changed[:3])}"
                f"{f' and {len(changed) - 3} more' if len(changed) > 3 else ''}. Return the new state; for a Flax "
                "NNX module "
                "pass `nnx.state(module)`, rebuild it inside with `nnx.merge`, and return its new `nnx.state`."
            )
        return result

    return watched


def parameter_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Names of the first `count` positional parameters of `fn`; their numbers where the signature does not tell."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return [str(i) for i in range(count)]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [named[i] if i < len(named) else str(i) for i in range(count)]


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    donate_argnums: Sequence[int] = (),
    options: TraceOptions = TraceOptions(),  # noqa: B008 - frozen
) -> Trace:
    """Traces `fn(*args)`.

    Args:
      fn: Any traceable JAX function.
      args: Pytrees of arrays or `jax.ShapeDtypeStruct`; nothing is allocated.
      donate_argnums: Positional arguments whose buffers may be reused.
      options: See `TraceOptions`.

    Returns:
      The trace and its graph. Errors of the user's own function are raised unchanged.
    """
    watched = _refuse_changes_in_place(fn)
    closed, out_shapes = jax.make_jaxpr(watched, return_shape=True)(*jax.tree_util.tree_map(_bare, tuple(args)))
    in_leaves, in_tree = jax.tree_util.tree_flatten_with_path(tuple(args))
    heads = parameter_names(fn, len(args))
    named = lambda path: ".".join(filter(None, (heads[path[0].idx], path_name(path[1:]))))
    out_leaves, out_tree = jax.tree_util.tree_flatten_with_path(out_shapes)
    if len(in_leaves) != len(closed.jaxpr.invars):
        raise TraceError(
            f"The function has {len(in_leaves)} argument leaves but its jaxpr has {len(closed.jaxpr.invars)} inputs. "
            "Pass every argument as a pytree of arrays or jax.ShapeDtypeStruct; bind Python values with "
            "functools.partial."
        )
    flattener = Flattener(options)
    values = [
        flattener.new_value(v.aval, named(path), ValueKind.ARGUMENT)
        for v, (path, _) in zip(closed.jaxpr.invars, in_leaves, strict=True)
    ]
    constants = [flattener.new_value(v.aval, "constant", ValueKind.CONSTANT) for v in closed.jaxpr.constvars]
    results = flattener.run(closed.jaxpr, [*constants, *values], 1.0)
    annotated = partitioning_metadata(args)
    outside = [n for n in donate_argnums if not -len(args) <= n < len(args)]
    if outside:
        raise TraceError(
            f"donate_argnums must be positions of the {len(args)} positional arguments, but got {outside[0]}."
        )
    donated = {n % len(args) for n in donate_argnums}
    arguments = tuple(
        Argument(
            value,
            path[0].idx,
            named(path),
            path[0].idx in donated,
            annotated.get(path_name(path)) or argument_layout(leaf),
        )
        for value, (path, leaf) in zip(values, in_leaves, strict=True)
    )
    in_types = [(path, v.aval) for (path, _), v in zip(in_leaves, closed.jaxpr.invars, strict=True)]
    successors = _successors(in_types, out_leaves)
    outputs = tuple(
        Output(value, path_name(path), successor)
        for value, (path, _), successor in zip(results, out_leaves, successors, strict=True)
    )
    graph = flattener.finish(arguments, outputs)
    return Trace(closed, in_tree, out_tree, graph)


def _successors(in_leaves, out_leaves) -> list[int | None]:
    """For each output leaf, the argument leaf that it is the next version of.

    A positional argument has a successor where some subtree of the result has the same leaves: equal relative paths,
    shapes and dtypes. The result itself and each element of a result tuple are tried, in order.
    """

    def subtrees(leaves, depth):
        groups: dict[Any, list[tuple[int, tuple]]] = collections.defaultdict(list)
        for i, (path, leaf) in enumerate(leaves):
            if len(path) >= depth:
                groups[path[:depth]].append((i, (path_name(path[depth:]), tuple(leaf.shape), str(leaf.dtype))))
        return groups

    successor: list[int | None] = [None] * len(out_leaves)
    taken: set[int] = set()
    in_groups = subtrees(in_leaves, 1)
    for depth in (1, 0):
        for _, outs in subtrees(out_leaves, depth).items():
            if any(successor[i] is not None for i, _ in outs):
                continue
            for _, ins in in_groups.items():
                if any(i in taken for i, _ in ins) or [s for _, s in ins] != [s for _, s in outs]:
                    continue
                if all(len(s[1]) == 0 for _, s in ins):
                    continue  # scalars alone prove nothing
                for (i, _), (o, _) in zip(ins, outs, strict=True):
                    successor[o] = i
                    taken.add(i)
                break
    return successor
