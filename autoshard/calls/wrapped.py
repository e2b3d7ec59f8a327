"""What a function that others have wrapped already says of its arguments: `jax.jit`, `nnx.jit`, and those that bind.

JAX keeps what it was told in no public place, but in `_jit_info` of what `jax.jit` returns (0.10 to 0.12). Where that
is missing, nothing is known, and whoever plans the function names its constants himself. `nnx.cached_partial` keeps
what it binds in the closure of the function that it returns (Flax 0.12).
"""

import dataclasses
import functools
import inspect
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.nnx.transforms.compilation as nnx_compilation

from autoshard.calls.modules import has_module
from autoshard.errors import TraceError

_PMAP = ("jax", "_src", "pmap.py")


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """What is said of a function's arguments, as for `jax.jit`.

    Attributes:
      static_argnums, static_argnames: Those that are constants of the program.
      donate_argnums: Those whose buffers may be reused.
    """

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """A function, and what is bound to it: its first positional arguments, and some by keyword."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def bound(fn: Callable[..., Any]) -> Bound:
    """The function to which `functools.partial` or `nnx.cached_partial` has bound modules, and all that is bound to it.

    Modules change in place, so that they are arguments of a planned function, whoever passes them. A function without
    bound modules is given as it is: what is bound to it are constants.
    """
    if isinstance(fn, functools.partial):
        found = Bound(fn.func, fn.args, fn.keywords)
    elif getattr(getattr(fn, "__code__", None), "co_name", "") == "cache_args_wrapper":
        held = inspect.getclosurevars(fn).nonlocals
        found = Bound(held["f"], tuple(held["cached_args"]))  # with the variables of the modules that were bound
    else:
        return Bound(fn)
    if not has_module((found.args, found.kwargs)):
        return Bound(fn)
    inner = bound(found.fn)
    return Bound(inner.fn, (*inner.args, *found.args), {**inner.kwargs, **found.kwargs})


def donated_argnums(fn: Callable[..., Any], argnums: int | Sequence[int] | None) -> tuple[int, ...]:
    """The positional arguments that may be reused, those bound to `fn` counted: as asked for, else as it declares.

    Raises:
      TraceError: They are no positions.
    """
    own = bound(fn)
    if argnums is None:
        return declared(own.fn).donate_argnums
    asked = (argnums,) if isinstance(argnums, int) else argnums
    wrong = [n for n in asked if not isinstance(n, int)]
    if wrong:
        raise TraceError(
            f"donate_argnums must be positions of arguments, such as 0 for the first; received {wrong[0]!r:.60}."
        )
    return shifted(asked, len(own.args))


def is_mapped(fn: Callable[..., Any]) -> bool:
    """Whether `jax.pmap` made `fn`, which tells it by nothing but where its code is."""
    return pathlib.PurePath(getattr(getattr(fn, "__code__", None), "co_filename", "")).parts[-3:] == _PMAP


def shifted(argnums: Sequence[int], count: int) -> tuple[int, ...]:
    """Positions of arguments behind `count` others; those counted from the end stay."""
    return tuple(n + count if n >= 0 else n for n in argnums)


def declared(fn: Callable[..., Any]) -> Declared:
    """What was said where `fn` was wrapped; nothing of a function that is not."""
    info = getattr(getattr(fn, "jitted_fn", fn), "_jit_info", None)
    read = lambda name: tuple(getattr(info, name, None) or ())
    return Declared(read("static_argnums"), read("static_argnames"), read("donate_argnums"))


def unwrapped(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside `nnx.jit`, which a plan takes the place of; any other as it is."""
    while isinstance(fn, nnx_compilation.JitWrapped):
        fn = fn.fun
    return fn
