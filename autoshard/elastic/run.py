"""A supervised run of one's own training loop."""

import math
import numbers
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from autoshard.elastic.lifeline import Lifeline
from autoshard.elastic.session import WorkDone, last_loss, serve
from autoshard.elastic.worker import Cadence, Worker, run_identity
from autoshard.errors import ConfigError, ElasticError
from autoshard.launch.engines.local import LocalEngine
from autoshard.launch.launching import launch_run
from autoshard.launch.settings import REJOIN_AFTER_S, Budgets, LaunchSettings
from autoshard.launch.supervisor import Ending, RunOutcome


def run(
    build: Callable[[Worker], float | None],
    workers: int | tuple[int, int],
    *,
    output_dir: str | os.PathLike[str],
    devices_per_worker: int | None = None,
    checkpoint_every: int | None = None,
    memory_every: int | None = 1,
    keep_checkpoints: int = 2,
    budgets: Budgets | None = None,
    rejoin_after_s: float = REJOIN_AFTER_S,
    stall_limit_s: float | None = None,
) -> RunOutcome:
    """Runs a training loop on several workers that may be lost, and supervises them.

    The process that calls this becomes the supervisor; its workers are the same command run again, in which this
    function calls `build` and does not return. So what stands before the call runs in all of them, and must not use a
    device of JAX.

    `build` gets a `Worker`, and uses it so:

        def build(worker):
            plan = worker.plan(step, state_shapes, batch_shapes)   # for the devices that there are now
            run = plan.jit(step)
            state = worker.restore(plan.init(init, 0))             # the newest state that is safe
            while worker.step < 1000 and not worker.should_stop():
                state, metrics = run(state, batch(worker.step))
                worker.commit(worker.step + 1, state)
            return float(metrics["loss"])

    Args:
        build: does the training in each worker, and returns the last loss, or None.
        workers: their number, a lost one being replaced; or (least, most), to go on with what is left.
        output_dir: folder of events.jsonl, plans/, checkpoints/ and logs/; the same call continues a run there.
        devices_per_worker: CPU devices of each worker; None for the accelerators of its host.
        checkpoint_every: steps between two checkpoints on disk; None for the last one only.
        memory_every: steps between two copies in the memory of hosts; None for none.
        keep_checkpoints: the newest checkpoints that stay on disk.
        budgets: how many failures the run may have; None for the defaults.
        rejoin_after_s: how long the place of a lost worker is left alone, where the number may change.
        stall_limit_s: longest time without a heartbeat of a worker; None to learn it.

    Returns:
        How the run ended, if it is complete or was stopped by its user (in the supervisor only).

    Raises:
        ConfigError: an argument has another type or value than it takes.
        ElasticError: the run failed, or another supervisor has it.
    """
    least, most = _range(workers)
    for name, value, may_be_none in (
        ("devices_per_worker", devices_per_worker, True),
        ("checkpoint_every", checkpoint_every, True),
        ("memory_every", memory_every, True),
        ("keep_checkpoints", keep_checkpoints, False),
    ):
        if not (_is_count(value) or value is None and may_be_none):
            rule = f"a whole number of at least 1{', or None' if may_be_none else ''}"
            raise ConfigError(f"{name}: {rule}; received {value!r:.60}. Give another, or leave it out.")
    for name, value, least_s in (("rejoin_after_s", rejoin_after_s, 0), ("stall_limit_s", stall_limit_s, 1)):
        if name == "stall_limit_s" and value is None:
            continue
        if not isinstance(value, int | float) or not math.isfinite(value) or value < least_s:
            raise ConfigError(f"{name}: seconds, at least {least_s}; received {value!r:.60}. Give more, or nothing.")
    lifeline = Lifeline.of_this_process()
    if lifeline is not None:
        _serve(lifeline, build, Cadence(checkpoint_every, memory_every, keep_checkpoints))
    run_dir = pathlib.Path(output_dir).absolute()
    run_dir.mkdir(parents=True, exist_ok=True)
    settings = LaunchSettings(
        run_dir=run_dir,
        least_workers=least,
        most_workers=most,
        devices_per_worker=devices_per_worker,
        arguments=(sys.executable, *sys.orig_argv[1:]),
        budgets=budgets or Budgets(),
        rejoin_after_s=rejoin_after_s,
        stall_limit_s=stall_limit_s,
    )
    outcome = launch_run(settings, lambda: LocalEngine(run_dir, most), lambda text: print(text, flush=True))
    if outcome.ending is Ending.FAILED:
        raise ElasticError(f"The run in {run_dir} failed after step {outcome.step}: {outcome.error}")
    return outcome


def _range(workers: Any) -> tuple[int, int]:
    """The least and the most workers.

    Raises:
        ConfigError: it is no number, and no pair of numbers.
        ElasticError: there would be no worker, or the least are more than the most.
    """
    pair = tuple(workers) if isinstance(workers, tuple | list) else (workers, workers)
    if len(pair) != 2 or not all(isinstance(n, numbers.Integral) and not isinstance(n, bool) for n in pair):
        raise ConfigError(f"workers: a whole number, or (least, most); received {workers!r:.60}. Try: workers=(2, 4).")
    least, most = int(pair[0]), int(pair[1])
    if not 1 <= least <= most:
        raise ElasticError(f"workers: at least 1, and the least not above the most; received {workers!r}.")
    return least, most


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def _serve(lifeline: Lifeline, build: Callable[[Worker], float | None], cadence: Cadence) -> None:
    def work(worker: Worker) -> WorkDone:
        run_dir = worker.run_dir
        with worker.checkpoints(run_dir / "checkpoints", cadence, lambda: run_identity(run_dir)):
            returned = build(worker)
            worker.save_last_commit()
            is_complete = not worker.should_stop()
            return WorkDone(worker.step, last_loss(returned) if is_complete else None, is_complete)

    serve(lifeline, work)
