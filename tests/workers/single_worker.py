"""The only worker of a generation of a supervised run, without its supervisor."""

import os

from autoshard.elastic.coordination import Coordination
from autoshard.elastic.worker import Worker
from autoshard.launch.messages import Assignment


def worker_of(run_dir: str | os.PathLike[str], memory_dir: str | os.PathLike[str], generation: int) -> Worker:
    """The worker, in this process; its states in memory are in `memory_dir`."""
    place = Assignment(
        run_id="0" * 32,
        run_dir=str(run_dir),
        generation=generation,
        rank=0,
        num_workers=1,
        coordinator="",
        slot=0,
        host="here",
        memory_dir=str(memory_dir),
        devices_per_worker=8,
        is_dry_run=False,
    )
    return Worker(place, None, Coordination.of_this_process())
