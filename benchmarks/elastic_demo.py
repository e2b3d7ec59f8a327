"""A run of two to four workers loses one, loses another, and grows again: its loss beside that of an undisturbed run.

    python benchmarks/elastic_demo.py [--picture docs/images/elastic.png]

Each worker has two CPU devices, so that meshes of 8, 6, 4 and again 8 devices take turns, each with a plan of its own.
Two workers are killed; the run grows when `autoshard scale` asks for four. The largest relative difference of the loss
over all steps is printed, and results/elastic-demo.json has the meshes.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

from chaos import RESULTS, ROOT, Bench, await_event
from faults.lineage import compared_losses, lineage
from faults.supervised import SupervisedRun, signal_process

from autoshard.launch.events import Finished, GenerationStarted, Replanned, StepCommitted, WorkerLost
from autoshard.launch.picture import write_picture

STEPS, DISK_EVERY = 240, 20
FIRST_KILL, SECOND_KILL, GROWTH = 60, 120, 180
"""The steps after which something happens."""

OPTIONS = ("--devices-per-worker", "2", "--rejoin-after", "100000")


def await_step(run: SupervisedRun, step: int, workers: int) -> None:
    """Waits until a generation of so many workers has committed a step."""

    def is_there() -> bool:
        own = {e.generation for e in run.events if isinstance(e, GenerationStarted) and len(e.workers) == workers}
        return any(isinstance(e, StepCommitted) and e.generation in own and e.step >= step for e in run.events)

    if not await_event(run, is_there):
        raise SystemExit(f"Step {step} with {workers} workers did not come: see {run.run_dir}")


def finish(run: SupervisedRun) -> None:
    """Waits for the end of a run."""
    if not await_event(run, lambda: any(isinstance(event, Finished) for event in run.events)):
        raise SystemExit(f"The run did not finish: see {run.run_dir}")


def main() -> None:
    """Does it, and draws it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=pathlib.Path, default=ROOT / "docs" / "images" / "elastic.png")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    bench = Bench(pathlib.Path(tempfile.gettempdir()) / f"autoshard-elastic-demo-{os.getuid()}", STEPS)
    undisturbed = bench.run("undisturbed", ("--workers", "4", *OPTIONS), DISK_EVERY)
    run = bench.run("elastic", ("--workers", "2:4", *OPTIONS), DISK_EVERY)
    try:
        undisturbed.start()
        finish(undisturbed)
        run.start()
        for step, workers, rank in ((FIRST_KILL, 4, 3), (SECOND_KILL, 3, 1)):
            await_step(run, step, workers)
            signal_process(run.workers()[rank].pid, signal.SIGKILL)
        await_step(run, GROWTH, 2)
        scale = [sys.executable, "-m", "autoshard", "scale", str(run.run_dir), "--workers", "4"]
        subprocess.run(scale, check=True)
        finish(run)
    finally:
        undisturbed.end()
        run.end()
    found = compared_losses(run.run_dir, undisturbed.run_dir)
    followed = lineage(run.events, STEPS, DISK_EVERY, bench.memory_every)
    meshes = [f"generation {e.generation}: {e.mesh}" for e in run.events if isinstance(e, Replanned)]
    lost = [f"worker {e.rank} at step {e.step}: {e.cause}" for e in run.events if isinstance(e, WorkerLost)]
    figures = {"meshes": meshes, "lost": lost, **dataclasses.asdict(found), **dataclasses.asdict(followed)}
    text = json.dumps(figures, indent=1)
    (RESULTS / "elastic-demo.json").write_text(text + "\n")
    write_picture(run.run_dir, arguments.picture, "Two to four workers", undisturbed.run_dir)
    print(text)


if __name__ == "__main__":
    main()
