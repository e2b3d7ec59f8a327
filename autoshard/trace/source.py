"""The user's source line of an equation.

A jaxpr equation carries the Python traceback of its creation; the user's line is the innermost frame that lies in none
of the libraries between the user and JAX.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

_LIBRARIES = (
    "/jax/",
    "/jaxlib/",
    "/flax/",
    "/optax/",
    "/autoshard/trace/",
    "/autoshard/tables/",
    "/autoshard/train_step",
    "/autoshard/loss_function",
    "/autoshard/module_params",
    "/autoshard/pipelines/",
    "/numpy/",
    "/chex/",
    "<frozen",
    "<string",
)


class SourceLines:
    """The user's lines of many equations; each distinct traceback is searched once."""

    def __init__(self):
        self.known: dict[Any, str] = {}

    def of(self, equation: jex.JaxprEqn) -> str:
        """`file.py:12 (function)` of the user's code, or an empty string where none is recorded."""
        traceback = getattr(equation.source_info, "traceback", None)
        line = self.known.get(traceback)
        if line is None:
            line = self.known[traceback] = _line_of(traceback)
        return line


def source_of(equation: jex.JaxprEqn) -> str:
    """The user's line of one equation."""
    return SourceLines().of(equation)


def optimizer_line(equation: jex.JaxprEqn) -> str:
    """The line of one equation of an optimizer, which may be Optax's own."""
    return _line_of(getattr(equation.source_info, "traceback", None), [x for x in _LIBRARIES if x != "/optax/"])


def _line_of(traceback: Any, libraries: Sequence[str] = _LIBRARIES) -> str:
    for frame in traceback.frames if traceback is not None else ():
        path = frame.file_name
        if not any(library in path for library in libraries):
            function = frame.function_name.split(".<locals>")[-1].lstrip(".")
            return f"{'/'.join(path.split('/')[-2:])}:{frame.line_num} ({function})"
    return ""
