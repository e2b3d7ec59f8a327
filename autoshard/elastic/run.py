"""A supervised run of one's own training loop."""

import os
import pathlib
import sys
from collections.abc import Callable

from autoshard.elastic.lifeline import Lifeline
from autoshard.elastic.session import WorkDone, serve
from autoshard.elastic.worker import Cadence, Worker, run_identity
from autoshard.errors import ElasticError
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
        ElasticError: the run failed, or another supervisor has it.
    """
    lifeline = Lifeline.of_this_process()
    if lifeline is not None:
        _serve(lifeline, build, Cadence(checkpoint_every, memory_every, keep_checkpoints))
    least, most = (workers, workers) if isinstance(workers, int) else workers
    if not 1 <= least <= most:
        raise ElasticError(f"workers: at least 1, and the least not above the most; received {workers!r}.")
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


def _serve(lifeline: Lifeline, build: Callable[[Worker], float | None], cadence: Cadence) -> None:
    def work(worker: Worker) -> WorkDone:
        run_dir = worker.run_dir
        with worker.checkpoints(run_dir / "checkpoints", cadence, lambda: run_identity(run_dir)):
            loss = build(worker)
            worker.save_last_commit()
            return WorkDone(worker.step, loss, is_complete=not worker.should_stop())

    serve(lifeline, work)
