"""Compiled kernels side by side, each in a thread: they run outside of Python's own lock."""

import concurrent.futures
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")
_Result = TypeVar("_Result")


def side_by_side(kernel: Callable[[_T], _Result], items: Sequence[_T]) -> list[_Result]:
    """What `kernel` makes of each item, in their order; worth it where most of its time goes into compiled code.

    Args:
      kernel: Changes nothing that another call of it reads.
      items: As many threads are used, but no more than there are processors.

    Raises:
      What the first call raises that raises anything.
    """
    if len(items) < 2:
        return [kernel(item) for item in items]
    with concurrent.futures.ThreadPoolExecutor(min(len(items), os.cpu_count() or 1), "side-by-side") as threads:
        return list(threads.map(kernel, items))
