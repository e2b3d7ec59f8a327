"""From a Python function to the unified graph: trace to a jaxpr, flatten it, and name its interface."""

import collections
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from autoshard.errors import TraceError
from autoshard.garbage import collection_paused
from autoshard.graph.graph import Argument, Graph, Output, ValueKind
from autoshard.trace.absent_cudnn import assume_cudnn
from autoshard.trace.accumulated_products import products_behind_loop
from autoshard.trace.annotations import argument_layout, partitioning_metadata
from autoshard.trace.calls_instead import with_calls
from autoshard.trace.explicit import is_explicit, typed, without_layouts
from autoshard.trace.flatten import Flattener, TraceOptions
from autoshard.trace.foreign import implementation
from autoshard.trace.inline import late_calls_inlined
from autoshard.trace.named_axes import with_axes_bound
from autoshard.trace.operand_order import operands_ordered
from autoshard.trace.outer_products import multiplication
from autoshard.trace.references import references_discharged, refuse_references
from autoshard.trace.vector_products import multiplication_and_sum


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
    """Shape and dtype of an array leaf; its sharding only in explicit mode, whose programs may go by it.

    Raises:
      TraceError: A dimension has no size.
    """
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        if None in leaf.shape:
            raise TraceError(
                f"Every dimension of an argument must have a size; received one of shape {leaf.shape}. Pass arrays or "
                "jax.ShapeDtypeStruct of the sizes that the function is called with."
            )
        weak = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak, sharding=typed(leaf))
    return leaf


def _refuse_changes_in_place(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, refusing to lose what it writes into its arguments (a dictionary, an NNX state) without returning it."""

    @functools.wraps(fn)  # for JAX's errors, which name the function and its arguments
    def watched(*args):
        leaves = jax.tree_util.tree_leaves_with_path
        own = jax.tree_util.tree_map(lambda x: x, args)  # what is merged of an NNX state keeps its variables
        result = fn(*own)
        before, after = (dict(leaves(x)) for x in (args, own))
        if len(before) == len(after) and all(after.get(path) is leaf for path, leaf in before.items()):
            return result
        returned = {id(leaf) for leaf in jax.tree_util.tree_leaves(result)}
        lost = [
            path_name(path)
            for path in {**before, **after}
            if path not in after or (after[path] is not before.get(path) and id(after[path]) not in returned)
        ]
        if lost:
            raise TraceError(
                f"A planned function must be pure, but `{getattr(fn, '__name__', 'the function')}` changes its "
                f"arguments in place, where the change would be lost: {', '.join(f'`{name}`' for name in lost[:3])}"
                f"{f' and {len(lost) - 3} more' if len(lost) > 3 else ''}. Return the new state; of a Flax NNX module "
                "that is rebuilt inside return its new `nnx.state`, or pass the module itself, which the planned "
                "function changes in place."
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


def argument_paths(fn: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """The path of each leaf of the arguments of `fn`: `state.params.up.kernel`."""
    heads = parameter_names(fn, len(args))
    leaves = jax.tree_util.tree_flatten_with_path(tuple(args))[0]
    return [".".join(filter(None, (heads[path[0].idx], path_name(path[1:])))) for path, _ in leaves]


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    donate_argnums: Sequence[int] = (),
    options: TraceOptions = TraceOptions(),  # noqa: B008 - frozen
) -> Trace:
    """Traces `fn(*args)`.

    Args:
      fn: Any traceable JAX function; of a `TracedOnce` the trace is kept.
      args: Pytrees of arrays or `jax.ShapeDtypeStruct`; nothing is allocated.
      donate_argnums: Positional arguments whose buffers may be reused.
      options: See `TraceOptions`.

    Returns:
      The trace and its graph. Errors of the user's own function are raised unchanged.
    """
    if not isinstance(fn, TracedOnce):
        return _trace(fn, args, donate_argnums, options)
    key = _kind(args), tuple(donate_argnums), options
    if key not in fn.traces:
        fn.traces[key] = _trace(fn, args, donate_argnums, options)
    return fn.traces[key]


class TracedOnce:
    """A function whose trace is made once for each kind of arguments, wherever one is asked for.

    Planning a step, checking a plan and running it each need a trace, which takes as long as the program is large.

    Attributes:
      traces: What was traced so far, by the kind of arguments, those donated, and options.
    """

    __name__: str

    def __init__(self, fn: Callable[..., Any]):
        functools.update_wrapper(self, fn)
        self._fn = fn
        self.traces: dict[Any, Trace] = {}

    def __call__(self, *args: Any) -> Any:
        return self._fn(*args)


class KeptTrace:
    """The trace of a function that was planned, for the very same function and arguments of the same kind.

    As with `jax.jit`, a function is told by its identity: what it closes over must not change.

    Attributes:
      fn: The function.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], traced: Trace):
        self.fn, self._kind, self._traced = fn, _bare_kind(args), traced

    def of(self, fn: Callable[..., Any], args: Sequence[Any]) -> Trace | None:
        """The trace of `fn(*args)`; None of another function, or of arguments of another kind."""
        return self._traced if fn == self.fn and _bare_kind(args) == self._kind else None


def _bare_kind(args: Sequence[Any]) -> Any:
    """What a jaxpr depends on in its arguments."""
    leaves, tree = jax.tree_util.tree_flatten(tuple(args))
    types = [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in map(jax.typeof, leaves)]
    return tree, tuple(types), jax.config.read("jax_enable_x64")


def _kind(args: Sequence[Any]) -> Any:
    """What a trace depends on in its arguments, and what its graph tells of them."""
    return _bare_kind(args), tuple(map(argument_layout, jax.tree_util.tree_leaves(tuple(args))))


@assume_cudnn()
@collection_paused()
def program_of(fn: Callable[..., Any], args: Sequence[Any]) -> jex.ClosedJaxpr:
    """The program of `fn(*args)` as it is written, of which `trace` rewrites what runs otherwise, by its sizes."""
    return _as_written(fn, args)[0]


def _as_written(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[jex.ClosedJaxpr, Any]:
    """The program, without references, and the types of its results as a pytree."""
    bare = jax.tree_util.tree_map(_bare, tuple(args))
    traced_with = lambda pure: jax.make_jaxpr(_refuse_changes_in_place(pure), return_shape=True)(*bare)
    closed, out_shapes = with_axes_bound(traced_with, fn)
    refuse_references(closed, argument_paths(fn, args))
    return references_discharged(closed), out_shapes


@assume_cudnn()
@collection_paused()
def _trace(fn: Callable[..., Any], args: Sequence[Any], donate_argnums: Sequence[int], options: TraceOptions) -> Trace:
    closed, out_shapes = _as_written(fn, args)
    rewrites = implementation, multiplication, multiplication_and_sum, products_behind_loop
    closed = late_calls_inlined(with_calls(closed, rewrites))
    if is_explicit(jax.sharding.get_abstract_mesh()):
        closed = without_layouts(closed)
    closed = operands_ordered(closed)
    in_leaves, in_tree = jax.tree_util.tree_flatten_with_path(tuple(args))
    out_leaves, out_tree = jax.tree_util.tree_flatten_with_path(out_shapes)
    if len(in_leaves) != len(closed.jaxpr.invars):
        raise TraceError(
            f"The function has {len(in_leaves)} argument leaves but its jaxpr has {len(closed.jaxpr.invars)} inputs. "
            "Pass every argument as a pytree of arrays or jax.ShapeDtypeStruct; bind Python values with "
            "functools.partial."
        )
    flattener = Flattener(options)
    inputs = _named([(path, v.aval) for v, (path, _) in zip(closed.jaxpr.invars, in_leaves, strict=True)])
    heads = parameter_names(fn, len(args))
    names = [".".join(filter(None, (heads[leaf.path[0].idx], leaf.name_below(1)))) for leaf in inputs]
    values = [
        flattener.new_value(v.aval, name, ValueKind.ARGUMENT)
        for v, name in zip(closed.jaxpr.invars, names, strict=True)
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
            name,
            path[0].idx in donated,
            (annotated.get(path_name(path)) if annotated else None) or argument_layout(leaf),
        )
        for value, name, (path, leaf) in zip(values, names, in_leaves, strict=True)
    )
    returned = _named(out_leaves)
    outputs = tuple(
        Output(value, leaf.name_below(0), successor)
        for value, leaf, successor in zip(results, returned, _successors(inputs, returned), strict=True)
    )
    graph = flattener.finish(arguments, outputs)
    return Trace(closed, in_tree, out_tree, graph)


@dataclasses.dataclass(frozen=True, slots=True)
class _NamedLeaf:
    """A leaf of the arguments or of the result: its path, the keys of the path as text, and its type."""

    path: tuple[Any, ...]
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any

    def name_below(self, depth: int) -> str:
        """The path from `depth` on, as `path_name` writes it."""
        return ".".join(self.keys[depth:])


def _named(leaves: Sequence[tuple[Sequence[Any], Any]]) -> list[_NamedLeaf]:
    """Names (path, leaf) pairs; what a path has in common with the one before it is named once."""
    named: list[_NamedLeaf] = []
    path: tuple[Any, ...] = ()
    keys: list[str] = []
    for following, leaf in leaves:
        same = 0
        for x, y in zip(path, following, strict=False):
            if x != y:
                break
            same += 1
        path = tuple(following)
        keys[same:] = [path_name((key,)) for key in path[same:]]
        named.append(_NamedLeaf(path, tuple(keys), tuple(leaf.shape), leaf.dtype))
    return named


def _successors(inputs: Sequence[_NamedLeaf], returned: Sequence[_NamedLeaf]) -> list[int | None]:
    """For each output leaf, the argument leaf that it is the next version of.

    A positional argument has a successor where some subtree of the result has the same leaves: equal relative paths,
    shapes and dtypes. The result itself and each element of a result tuple are tried, in order.
    """

    def subtrees(leaves, depth):
        groups: dict[Any, list[tuple[int, tuple]]] = collections.defaultdict(list)
        for i, leaf in enumerate(leaves):
            if len(leaf.path) >= depth:
                groups[leaf.path[:depth]].append((i, (leaf.name_below(depth), leaf.shape, leaf.dtype)))
        return groups

    successor: list[int | None] = [None] * len(returned)
    taken: set[int] = set()
    in_groups = subtrees(inputs, 1)
    for depth in (1, 0):
        for _, outs in subtrees(returned, depth).items():
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
