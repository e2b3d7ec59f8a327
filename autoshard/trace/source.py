"""The user's source line of an equation.

A jaxpr equation carries the Python traceback of its creation; the user's line is the innermost frame that lies in none
of the libraries between the user and JAX.
"""

import jax.extend.core as jex

_LIBRARIES = ("/jax/", "/jaxlib/", "/flax/", "/optax/", "/autoshard/trace/", "/numpy/", "/chex/", "<frozen", "<string")


def source_of(equation: jex.JaxprEqn) -> str:
    """`file.py:12 (function)` of the user's code, or an empty string where none is recorded."""
    traceback = getattr(equation.source_info, "traceback", None)
    if traceback is None:
        return ""
    for frame in traceback.frames:
        path = frame.file_name
        if not any(library in path for library in _LIBRARIES):
            function = frame.function_name.split(".<locals>")[-1].lstrip(".")
            return f"{'/'.join(path.split('/')[-2:])}:{frame.line_num} ({function})"
    return ""
