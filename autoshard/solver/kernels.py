"""How the solver's loops are compiled: by numba, to machine code that is kept on disk.

Compiling takes seconds, so what a kernel leaves out counts: see `graph_type.py` for its arguments.
"""

from typing import Any

import numba

FAST = frozenset({"nnan", "nsz", "reassoc", "contract"})
"""Lets minima and sums be vectorised. Infinities stay legal; NaN never arises (only finite numbers are subtracted)."""


def kernel(fastmath: frozenset[str] = frozenset()) -> Any:
    """A decorator for functions that Python calls; `fastmath` names LLVM's flags."""
    return numba.njit(cache=True, nogil=True, fastmath=set(fastmath))


def inner(fastmath: frozenset[str] = frozenset()) -> Any:
    """A decorator for functions that only kernels call; leaves out what other callers would need."""
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(fastmath=set(fastmath), **options)  # pyright: ignore[reportCallIssue, reportArgumentType]
