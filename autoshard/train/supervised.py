"""The trainer as a worker of a supervised run."""

from typing import NoReturn

from autoshard.elastic.lifeline import Lifeline
from autoshard.elastic.session import WorkDone, serve
from autoshard.elastic.worker import Worker
from autoshard.train.config import TrainConfig
from autoshard.train.trainer import train


def serve_training(lifeline: Lifeline, config: TrainConfig) -> NoReturn:
    """Waits for an assignment, and carries out this worker's part of `config`; it ends the process.

    Args:
        lifeline: to the supervisor.
        config: the run; its assignment says where the results go and on which devices it runs.
    """

    def work(worker: Worker) -> WorkDone:
        assert worker.assignment is not None
        section = config.train.model_copy(update={"output_dir": worker.assignment.run_dir, "resume": True})
        result = train(config.model_copy(update={"train": section}), worker=worker)
        return WorkDone(result.step, result.loss, is_complete=not result.interrupted)

    serve(lifeline, work)
