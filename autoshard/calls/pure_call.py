"""A call as people write it, as one of a pure function of positional pytrees of arrays, which is what plans are for."""

import contextlib
import dataclasses
import enum
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from autoshard.calls.modules import has_module, inside, is_leaf, is_module, split
from autoshard.calls.wrapped import bound, declared, shifted, unwrapped
from autoshard.errors import ConfigError
from autoshard.suggestions import suggestion


@dataclasses.dataclass(frozen=True, slots=True)
class Statics:
    """The arguments that are constants of the program, as `jax.jit` takes them: by position and by name."""

    argnums: tuple[int, ...] = ()
    argnames: tuple[str, ...] = ()

    @staticmethod
    def of(
        fn: Callable[..., Any], argnums: int | Sequence[int] | None = None, argnames: str | Sequence[str] | None = None
    ) -> "Statics":
        """Those asked for; where nothing is, those of a function that is wrapped in `jax.jit` or `nnx.jit`.

        Numbers are those of all arguments; modules that are bound to `fn` are the first.
        """
        own = bound(fn)
        if argnums is None and argnames is None:
            said = declared(own.fn)
            return Statics(said.static_argnums, said.static_argnames)
        given = () if argnums is None else (argnums,) if isinstance(argnums, int) else tuple(argnums)
        numbers = shifted(given, len(own.args))
        names = () if argnames is None else (argnames,) if isinstance(argnames, str) else tuple(argnames)
        positional = _positional_names(own.fn)
        names += tuple(positional[n] for n in numbers if -len(positional) <= n < len(positional))
        numbers += tuple(positional.index(name) for name in names if name in positional)
        return Statics(tuple(dict.fromkeys(numbers)), tuple(dict.fromkeys(names)))


class _Kind(enum.Enum):
    ARRAY = enum.auto()
    MODULE = enum.auto()
    STATIC = enum.auto()


class _Same:
    """A constant that cannot be hashed, told from others by its identity."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf of an argument: an array, a module, or a constant."""

    kind: _Kind
    constant: Any = None
    constant_type: type | None = None  # 1 and True are equal, and may make different programs

    @property
    def value(self) -> Any:
        """The constant."""
        return self.constant.value if isinstance(self.constant, _Same) else self.constant


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """What a call consists of beside arrays.

    Attributes:
      names: Of all arguments: the positional ones, and then those passed by keyword, in the order of their names.
      num_positional: How many are positional.
      trees: The pytree of each, in which modules are leaves.
      leaves: The leaves of each.
      statics: The arguments that were said to be constants.
      graphdef: What the modules consist of; None without modules.
    """

    names: tuple[str, ...]
    num_positional: int
    trees: tuple[Any, ...]
    leaves: tuple[tuple[_Leaf, ...], ...]
    statics: "Statics"
    graphdef: Any = None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, slots=True)
class _Returned:
    """Stands in a result for what is no array: the module of this number, or a constant."""

    leaf: _Leaf
    number: int = -1

    def of(self, modules: Sequence[Any]) -> Any:
        """What it stands for."""
        return modules[self.number] if self.leaf.kind is _Kind.MODULE else self.leaf.value


@dataclasses.dataclass(frozen=True)
class FunctionOfArrays:
    """A function as a pure one of positional pytrees of arrays; equal ones do the same.

    Attributes:
      fn: The function. form: How it is called.
    """

    fn: Callable[..., Any]
    form: _Form

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    @property
    def __signature__(self) -> inspect.Signature:
        kind = inspect.Parameter.POSITIONAL_ONLY
        return inspect.Signature([inspect.Parameter(name, kind) for name in self.form.names])

    def __call__(self, *arguments: Any) -> Any:
        """The result; with modules: it, what they consist of afterwards, and their states."""
        form, parts = self.form, [_leaves_of(argument) for argument in arguments]
        if form.graphdef is None:
            return _without_constants(self._called(parts, ()))[0]
        pairs = [pair for own, leaves in zip(parts, form.leaves, strict=True) for pair in zip(own, leaves, strict=True)]
        states = [part for part, leaf in pairs if leaf.kind is _Kind.MODULE]

        def body(modules: Sequence[Any]) -> tuple[Any, list[Any]]:
            return _without_constants(self._called(parts, modules))

        result, after, changed = inside(form.graphdef, states, body)
        return (result, after, *changed)

    def finished(self, outcome: Any, merge: Callable[[Any, Sequence[Any]], tuple[Any, ...]] | None = None) -> Any:
        """The user's result of what the function returned; modules are changed as it says."""
        returned: Sequence[Any] = ()
        if merge is not None:
            outcome, after, *changed = outcome
            returned = merge(after, changed)
        stands_in = lambda x: isinstance(x, _Returned)
        return jax.tree_util.tree_map(lambda x: x.of(returned) if stands_in(x) else x, outcome, is_leaf=stands_in)

    def _called(self, parts: Sequence[Sequence[Any]], modules: Sequence[Any]) -> Any:
        """Calls the function with the arguments put together again."""
        form, following, arguments = self.form, iter(modules), []
        for tree, leaves, own in zip(form.trees, form.leaves, parts, strict=True):
            whole = []
            for leaf, part in zip(leaves, own, strict=True):
                if leaf.kind is _Kind.MODULE:
                    whole.append(next(following))
                else:
                    whole.append(leaf.value if leaf.kind is _Kind.STATIC else part)
            arguments.append(tree.unflatten(whole))
        named = dict(zip(form.names[form.num_positional :], arguments[form.num_positional :], strict=True))
        return self.fn(*arguments[: form.num_positional], **named)


@dataclasses.dataclass(frozen=True, slots=True)
class PureCall:
    """A call of a pure function of positional pytrees of arrays.

    Attributes:
      fn: The function; the user's own where that is one already.
      args: Its arguments.
      finish: Makes the user's result of what it returns, and changes modules as the user's function does.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    finish: Callable[[Any], Any]


@contextlib.contextmanager
def pure_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    statics: Statics,
    options: Mapping[str, str] | None = None,
) -> Iterator[PureCall]:
    """A call as that of a pure function; what it returns is to be finished within the block.

    Flax NNX modules, also those that are bound to `fn` (`bound`), become states, and are changed in place by `finish`.
    Leaves that are no arrays, such as functions and strings, and the arguments named by `statics` are constants of the
    function. Keyword arguments follow the positional ones, in the order of their names. Python's numbers are constants
    beside such leaves, and arrays else.

    Args:
      fn, args, kwargs, statics: The call.
      options: What the caller takes by keyword for itself, and how it is written, to be suggested where the function
        has no such argument.

    Raises:
      ConfigError: The function has no argument of that name.
    """
    held = bound(fn)
    if not kwargs and not held.args and not held.kwargs and not statics.argnums and not has_constants_or_modules(args):
        yield PureCall(fn, tuple(args), lambda result: result)
        return
    constant = {n for n, value in enumerate(held.args) if not has_module(value)}
    constant_names = {*statics.argnames, *(name for name, value in held.kwargs.items() if not has_module(value))}
    fn, args, kwargs = unwrapped(held.fn), (*held.args, *args), {**held.kwargs, **kwargs}
    _check_names(fn, kwargs, options)
    keywords = sorted(kwargs)
    positional = _positional_names(fn)
    heads = [positional[n] if n < len(positional) else str(n) for n in range(len(args))]
    values = [*args, *(kwargs[name] for name in keywords)]
    constant |= {n % len(args) for n in statics.argnums if -len(args) <= n < len(args)}
    constant |= {len(args) + n for n, name in enumerate(keywords) if name in constant_names}
    flat, trees, leaves, modules = [], [], [], []
    for n, value in enumerate(values):
        own, tree = ([value], jax.tree_util.tree_structure(0)) if n in constant else _flattened(value)
        has_numbers = not any(map(_is_constant, own))  # else numbers are settings, as for `equinox.filter_jit`
        kinds = tuple(_leaf(x, n in constant or not has_numbers and _is_number(x)) for x in own)
        modules += [x for x, leaf in zip(own, kinds, strict=True) if leaf.kind is _Kind.MODULE]
        flat.append(own)
        trees.append(tree)
        leaves.append(kinds)
    form = _Form((*heads, *keywords), len(args), tuple(trees), tuple(leaves), statics)
    if not modules:
        of_arrays = FunctionOfArrays(fn, form)
        yield PureCall(of_arrays, _pure(form, flat, ()), of_arrays.finished)
        return
    with split(modules) as taken:
        of_arrays = FunctionOfArrays(fn, dataclasses.replace(form, graphdef=taken.graphdef))
        finish = lambda outcome: of_arrays.finished(outcome, taken.merge)
        yield PureCall(of_arrays, _pure(form, flat, taken.states), finish)


def planned_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] = types.MappingProxyType({}),
    statics: Statics | None = None,
) -> PureCall:
    """A call as that of a pure function, to be traced only: nothing is to be finished.

    Args:
      fn, args, kwargs: The call. statics: None for those that a wrapped function names itself.
    """
    with pure_call(fn, args, kwargs, Statics.of(fn) if statics is None else statics) as call:
        return call


def has_constants_or_modules(args: Any) -> bool:
    """Whether a pytree holds modules, or leaves that are no arrays."""
    return any(is_module(leaf) or _is_constant(leaf) for leaf in _leaves_of(args))


def _pure(form: _Form, flat: Sequence[Sequence[Any]], states: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with states in the place of modules, and None in the place of constants."""
    following, pure = iter(states), []
    for tree, leaves, own in zip(form.trees, form.leaves, flat, strict=True):
        parts = []
        for leaf, part in zip(leaves, own, strict=True):
            if leaf.kind is _Kind.MODULE:
                parts.append(next(following))
            else:
                parts.append(None if leaf.kind is _Kind.STATIC else part)
        pure.append(tree.unflatten(parts))
    return tuple(pure)


def _flattened(argument: Any) -> tuple[list[Any], Any]:
    return jax.tree_util.tree_flatten(argument, is_leaf=is_leaf)


def _leaves_of(argument: Any) -> list[Any]:
    return jax.tree_util.tree_leaves(argument, is_leaf=is_leaf)


def _leaf(x: Any, is_constant: bool) -> _Leaf:
    if not is_constant and is_module(x):
        return _Leaf(_Kind.MODULE)
    if not is_constant and x is not None and (isinstance(x, nnx.State) or _is_array(x)):
        return _Leaf(_Kind.ARRAY)
    try:
        hash(x)
    except TypeError:
        return _Leaf(_Kind.STATIC, _Same(x), type(x))
    return _Leaf(_Kind.STATIC, x, type(x))


def _without_constants(result: Any) -> tuple[Any, list[Any]]:
    """A result with something that JAX can return in the place of modules and constants; and the modules."""
    flat, tree = jax.tree_util.tree_flatten(result, is_leaf=is_leaf)
    parts, modules = [], []
    has_numbers = not any(map(_is_constant, flat))
    for x in flat:
        if is_module(x):
            parts.append(_Returned(_Leaf(_Kind.MODULE), len(modules)))
            modules.append(x)
        else:
            is_constant = _is_constant(x) or (not has_numbers and _is_number(x))
            parts.append(_Returned(_leaf(x, True)) if is_constant else x)
    return tree.unflatten(parts), modules


def _is_constant(x: Any) -> bool:
    """Whether a leaf can be nothing but a constant."""
    return x is not None and not isinstance(x, nnx.State) and not is_module(x) and not _is_array(x)


def _is_number(x: Any) -> bool:
    return isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic)


def _is_array(x: Any) -> bool:
    """Whether JAX takes it for an array: arrays, their shapes, and numbers."""
    if isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | bool | int | float | complex):
        return True
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _positional_names(fn: Callable[..., Any]) -> list[str]:
    return [p.name for p in _parameters(fn) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return []


def _check_names(fn: Callable[..., Any], kwargs: Mapping[str, Any], options: Mapping[str, str] | None) -> None:
    parameters = _parameters(fn)
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in kwargs:
        if name not in known:
            listed = ", ".join(f"`{n}`" for n in known) or "none by keyword"
            raise ConfigError(
                f"`{name}` is {'no option, and ' if options else ''}no argument of "
                f"`{getattr(fn, '__name__', 'the function')}`, which takes {listed}."
                f"{suggestion(name, {**(options or {}), **dict(zip(known, known, strict=True))}, quote='`')}"
            )
