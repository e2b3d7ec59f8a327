"""Flax NNX modules among the arguments of a function, as states on the way in and changed in place on the way out.

As `nnx.jit` does it: all modules of a call are split together, so that what they share stays one array; the function
gets copies made of its own tracers, and whatever it changes in them - variables, attributes, what they consist of - is
written back to the modules that were passed. `nnx.update_context` tells which object outside is which inside.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from autoshard.errors import TraceError

_TAG = "autoshard.calls"


def is_module(x: Any) -> bool:
    """Whether `x` is an object of NNX with variables inside, or a variable itself."""
    return isinstance(x, nnx.Pytree | nnx.Variable)


def is_leaf(x: Any) -> bool:
    """Where to stop in a pytree: at modules, which change as a whole, states, and None."""
    return x is None or isinstance(x, nnx.State) or is_module(x)


def has_module(tree: Any) -> bool:
    """Whether a pytree holds modules."""
    return any(map(is_module, jax.tree_util.tree_leaves(tree, is_leaf=is_leaf)))


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """The modules of a call, taken apart.

    Attributes:
      graphdef: What they consist of, without arrays.
      states: The arrays of each; those that several share with the first of them.
      merge: Takes what `inside` returned: writes it back, and gives the modules that the function returned.
    """

    graphdef: Any
    states: tuple[Any, ...]
    merge: Callable[[Any, Sequence[Any]], tuple[Any, ...]]


@contextlib.contextmanager
def split(modules: Sequence[Any]) -> Iterator[Split]:
    """Takes modules apart for a call, which must end within the block."""
    with nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as context:
            graphdef, state = context.split(tuple(modules))

        def merge(after: Any, states: Sequence[Any]) -> tuple[Any, ...]:
            with nnx.merge_context(_TAG, inner=False) as context:
                return context.merge(after, _joined(states))[1]

        yield Split(graphdef, _of_each(state, len(modules)), merge)


def inside(
    graphdef: Any, states: Sequence[Any], body: Callable[[tuple[Any, ...]], tuple[Any, Sequence[Any]]]
) -> tuple[Any, Any, tuple[Any, ...]]:
    """Calls `body` with the modules, as part of a pure function.

    Args:
      graphdef, states: Of `Split`.
      body: Takes the modules; gives its result, and the modules that are part of that.

    Returns:
      The result; what the modules consist of afterwards, for `Split.merge`; and their states: one for each module that
      was passed, and one for all that were returned.
    """
    with nnx.update_context(_TAG):
        with nnx.merge_context(_TAG, inner=True) as context:
            own = jax.tree_util.tree_map(lambda x: x, tuple(states))  # merging keeps some of the variables it is given
            modules = context.merge(graphdef, _numbered(own))
        result, returned = body(modules)
        with nnx.split_context(_TAG) as context:
            after, state = context.split((modules, tuple(returned)))
    changed = state.get(0, nnx.State({}))
    return result, after, (*_of_each(changed, len(modules)), state.get(1, nnx.State({})))


def _of_each(state: Any, count: int) -> tuple[Any, ...]:
    return tuple(state.get(n, nnx.State({})) for n in range(count))


def _numbered(states: Sequence[Any]) -> Any:
    """One state of several, as `split` of a tuple makes it."""
    plain = {n: state.raw_mapping if isinstance(state, nnx.State) else state for n, state in enumerate(states)}
    return nnx.State({n: state for n, state in plain.items() if not isinstance(state, dict) or state})


def _joined(states: Sequence[Any]) -> Any:
    """The state of what `inside` split: of all passed modules, and of all returned ones."""
    *passed, returned = states
    return _numbered([_numbered(passed), returned])


def as_state_maker(init_fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """A function that makes what `init_fn(*args)` makes, with states in the place of modules, and the way back.

    The function itself, and nothing to do, where it makes no module.

    Raises:
      TraceError: It is no function.
    """
    if not callable(init_fn):
        raise TraceError(
            f"What makes a state sharded is a function that returns it; received {type(init_fn).__name__}. Pass the "
            "function, and its arguments behind it: plan.init(init, 0)."
        )
    leaves, tree = jax.tree_util.tree_flatten(nnx.eval_shape(init_fn, *args), is_leaf=is_leaf)
    places = [n for n, leaf in enumerate(leaves) if is_module(leaf)]
    if not places:
        return init_fn, lambda state: state
    graphdef = nnx.graphdef(tuple(leaves[n] for n in places))

    @functools.wraps(init_fn)
    def make(*inner: Any) -> Any:
        parts = jax.tree_util.tree_leaves(init_fn(*inner), is_leaf=is_leaf)
        states = nnx.state(tuple(parts[n] for n in places))
        return tree.unflatten(_replaced(parts, places, _of_each(states, len(places))))

    def finish(made: Any) -> Any:
        parts = jax.tree_util.tree_leaves(made, is_leaf=is_leaf)
        modules = nnx.merge(graphdef, _numbered([parts[n] for n in places]))
        return tree.unflatten(_replaced(parts, places, modules))

    return make, finish


def _replaced(parts: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The parts, with others in some places."""
    found = list(parts)
    for n, other in zip(places, others, strict=True):
        found[n] = other
    return found
