"""What the processes of a run tell each other about checkpoints, on the main thread, all together."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from autoshard.errors import TrainingError, TransferError
from autoshard.transfer.peers import all_gather_bytes, all_gather_text, broadcast_bytes

_LEAST_BYTES = 1024
"""Nearly all that is said fits."""


def from_all(data: Any) -> list[Any]:
    """What every process gives, in their order. Plain data; all processes must call this together."""
    if jax.process_count() == 1:
        return [data]
    return [json.loads(text) for text in all_gather_bytes(_text(data))]


def from_first(decide: Callable[[], Any]) -> Any:
    """What `decide` gives in the first process, in all of them; the others do not call it. Plain data.

    Raises:
        TrainingError: in the others, if it fails in the first process, which raises what it raised.
    """
    if jax.process_count() == 1:
        return decide()
    all_gather_text("")  # Gloo connects within 30 s, or fails; processes that have met wait for as long as it takes
    told, failure = {}, None
    if jax.process_index() == 0:
        try:
            told = {"decided": decide()}
        except Exception as error:
            told, failure = {"failed": f"{type(error).__name__}: {error}"}, error
    told = json.loads(broadcast_bytes(_text(told)))
    if failure is not None:
        raise failure
    if "failed" in told:
        raise TrainingError(f"The first process of the run cannot go on, nor can the others: {told['failed']}")
    return told["decided"]


def met(name: str, timeout_s: float) -> None:
    """Waits until all processes have come here, without any device.

    Whoever sent to another process must wait so before it runs a collective on all its devices: on CPUs that takes all
    of JAX's threads, of which the sending needs one, while the other process waits for what is sent.

    Args:
        name: of the meeting, the same in all processes.

    Raises:
        TransferError: another process did not come in time.
    """
    try:
        ocp.multihost.get_barrier_sync_fn()(key=f"autoshard: {name}", timeout_ms=int(timeout_s * 1e3))
    except jax.errors.JaxRuntimeError as error:
        raise TransferError(
            f"All processes must have {name} before they go on; within {timeout_s:g} s some have not: {error}. Start "
            "all of them again from the last checkpoint."
        ) from error


def all_together(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """The items of all processes as one list."""
    return [item for one in lists for item in one]


def _text(data: Any) -> bytes:
    """JSON of one of few lengths, since every length of what is sent is a program that must be compiled."""
    text = json.dumps(data).encode()
    return text.ljust(max(_LEAST_BYTES, 1 << (len(text) - 1).bit_length()))
