"""The trainer as a worker of a supervised run."""

import contextlib
from typing import NoReturn

from autoshard.elastic.lifeline import Lifeline
from autoshard.elastic.session import WorkDone, serve
from autoshard.elastic.worker import Worker
from autoshard.errors import AutoshardError
from autoshard.train.ahead import Ahead, prepare_ahead
from autoshard.train.config import TrainConfig
from autoshard.train.registry import load_data, train_functions
from autoshard.train.trainer import carry_out


def serve_training(lifeline: Lifeline, config: TrainConfig) -> NoReturn:
    """Waits for an assignment, and carries out this worker's part of `config`; it ends the process.

    Args:
        lifeline: to the supervisor.
        config: the run; its assignment says where the results go and on which devices it runs.
    """

    ahead: Ahead | None = None
    with contextlib.suppress(AutoshardError):  # which arises again once there is an assignment, and is told then
        ahead = prepare_ahead(config)

    def work(worker: Worker) -> WorkDone:
        assert worker.assignment is not None
        section = config.train.model_copy(update={"output_dir": worker.assignment.run_dir, "resume": True})
        own = config.model_copy(update={"train": section})
        made = (train_functions(own), load_data(own)) if ahead is None else (ahead.functions(), ahead.data)
        result = carry_out(own, *made, worker=worker)
        return WorkDone(result.step, result.loss, is_complete=not result.interrupted)

    serve(lifeline, work)
