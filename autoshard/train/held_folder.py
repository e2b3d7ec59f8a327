"""The output folder of a run, in which nobody else trains meanwhile."""

import contextlib
import pathlib
from collections.abc import Iterator

from autoshard.checkpoints.agreement import from_first
from autoshard.elastic.worker import Worker
from autoshard.errors import ElasticError
from autoshard.folders import make_folder
from autoshard.launch.run_lock import run_lock
from autoshard.train.config import TrainConfig
from autoshard.train.registry import output_folder


@contextlib.contextmanager
def held_folder(config: TrainConfig, worker: Worker) -> Iterator[pathlib.Path]:
    """The output folder, which is made. Two runs in it would write each other's metrics, plan and checkpoints.

    The first process holds it while the block runs; of a supervised run, the supervisor does.

    Raises:
        ConfigError: it cannot be made.
        ElasticError: another run is going on in it.
    """
    folder = output_folder(config)
    with contextlib.ExitStack() as held:

        def take() -> str:
            try:
                if not worker.is_supervised:
                    held.enter_context(run_lock(folder, is_needed=False))
            except ElasticError as error:
                return str(error)
            return ""

        make_folder(folder, "train.output_dir")
        if problem := from_first(take):
            raise ElasticError(problem)
        yield folder
