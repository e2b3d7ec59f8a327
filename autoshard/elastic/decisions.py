"""What the first process of a run decides for all."""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from autoshard.errors import AutoshardError, TrainingError


def is_first() -> bool:
    """Whether this process writes and prints for all."""
    return jax.process_index() == 0


def decided_by_the_first(decide: Callable[[], str]) -> str:
    """The text that `decide` gives in the first process, in all of them; the others do not call it.

    Raises:
        TrainingError: in the others, if it failed in the first.
    """
    if jax.process_count() == 1:
        return decide()
    text, failure = "", None
    if is_first():
        try:
            text = decide()
        except (AutoshardError, KeyboardInterrupt) as error:
            failure = error
    content = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(content.size)))
    if failure is not None:
        raise failure
    if not size:
        raise TrainingError("The first process of this run ended with an error. Its own output tells which.")
    padded = content if is_first() else np.zeros(size, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8).tobytes().decode()
