"""What a function that `jax.jit` or `nnx.jit` has wrapped already says of its arguments.

JAX keeps this in no public place, but in `_jit_info` of what `jax.jit` returns (0.10, 0.11). Where that is missing,
nothing is known, and whoever plans the function names its constants himself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.nnx.transforms.compilation as nnx_compilation


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
