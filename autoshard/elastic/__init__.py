"""Runs that survive the loss of workers: `run` supervises a training loop, to which each worker is a `Worker`."""

from autoshard.elastic.run import run
from autoshard.elastic.worker import Worker
from autoshard.launch.settings import Budgets
from autoshard.launch.supervisor import RunOutcome

__all__ = ["Budgets", "RunOutcome", "Worker", "run"]
