"""The life of a worker's process: ready, assigned, joined, at work, and its end told in a way that can be acted on."""

import dataclasses
import gc
import os
import pathlib
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from autoshard.elastic.compile_cache import use_compile_cache
from autoshard.elastic.coordination import Coordination
from autoshard.elastic.joining import join
from autoshard.elastic.lifeline import Lifeline
from autoshard.elastic.output import print_without_fail
from autoshard.elastic.worker import DryRunOver, Worker
from autoshard.errors import AutoshardError, ConfigError, ElasticError, TrainingError, TransferError
from autoshard.interrupts import stop_on_signals
from autoshard.launch.messages import Drained, Failed, Finished

FAREWELL_S = 60.0
"""How long workers wait for each other at the end."""

_MOST_TRACEBACK = 8_000
"""Characters of a traceback that are told."""

_OF_PEERS = (
    "Gloo ",
    "Connection closed by peer",
    "Connection reset by peer",
    "UNAVAILABLE",
    "coordination service",
    "heartbeat timeout",
    "NCCL",
)
"""What JAX's errors say where a peer is gone, on CPUs and GPUs."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkDone:
    """What a worker has done.

    Attributes:
        step: steps taken, over all generations; the state after them is safe.
        loss: of the last step; None if there was none.
        is_complete: nothing is left to do; otherwise it ended early, as asked.
    """

    step: int
    loss: float | None
    is_complete: bool


def last_loss(returned: Any) -> float | None:
    """What `build` returned, as a number.

    Raises:
        ConfigError: it is none.
    """
    try:
        return None if returned is None else float(returned)
    except (TypeError, ValueError):
        raise ConfigError(
            f"build: returns the last loss as one number, or None; received {returned!r:.60}. The last state is saved: "
            "return a number, such as float(metrics['loss']), and start the run again."
        ) from None


def is_peer_loss(error: BaseException) -> bool:
    """Whether an error says only that another process of the run is gone."""
    if isinstance(error, TransferError):
        return True
    seen = error
    while seen is not None:
        if isinstance(seen, ElasticError) and isinstance(seen.__cause__, jax.errors.JaxRuntimeError):
            return True  # of a barrier to which others did not come
        of_jax = isinstance(seen, jax.errors.JaxRuntimeError | ValueError)  # the compiled part raises both
        if of_jax and any(text in str(seen) for text in _OF_PEERS):
            return True
        seen = seen.__cause__
    return False


def serve(lifeline: Lifeline, work: Callable[[Worker], WorkDone]) -> NoReturn:
    """Does `work` as a worker of the generation to which the supervisor assigns this process; it does not return.

    Args:
        lifeline: to the supervisor.
        work: does its part until it is complete or `Worker.should_stop` says so.
    """
    print_without_fail()
    gc.collect()
    gc.freeze()  # what is there now stays; the collector need not walk through it while the worker starts
    assignment = lifeline.await_assignment()
    status = 1
    try:
        with stop_on_signals((signal.SIGTERM,)) as stop:
            use_compile_cache(pathlib.Path(assignment.run_dir))
            join(assignment)
            coordination = Coordination.of_this_process()
            worker = Worker(assignment, lifeline, coordination, stop)
            done = work(worker)
            coordination.barrier("autoshard/end", FAREWELL_S)
            if done.is_complete:
                worker.tell(Finished(step=done.step, loss=done.loss))
            else:
                worker.tell(Drained(step=done.step, by_signal=worker.stopped_by_signal))
            lifeline.close()
            if assignment.num_workers > 1:
                jax.distributed.shutdown()
            status = 0
    except DryRunOver:
        status = 0
    except BaseException as error:
        _tell(lifeline, error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # what Python does at its end may wait for peers that are gone


def _tell(lifeline: Lifeline, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    is_loss = is_peer_loss(error)
    lifeline.tell(
        Failed(
            step=lifeline.step,
            error=type(error).__name__,
            message=str(error)[:_MOST_TRACEBACK],
            traceback=text[-_MOST_TRACEBACK:],
            is_peer_loss=is_loss,
            is_final=isinstance(error, AutoshardError) and not isinstance(error, TrainingError) and not is_loss,
        )
    )
    lifeline.close()
