"""More micro-batches where fewer devices have too little memory: batch and learning rate stay as configured.

A step in micro-batches takes their mean gradient, and so is the same step for a loss that is a plain mean over
examples. It is not quite the same where examples of a batch see each other (batch norm, the balance loss of experts),
where they weigh differently (masked tokens), and where random numbers are drawn (dropout): as with
`optimizer.num_micro_batches`, each micro-batch then has its own.
"""

from collections.abc import Callable, Iterator

from autoshard_models.train_step import TrainFunctions

from autoshard.api import Plan, StagedPlan
from autoshard.errors import ConfigError, MemoryBudgetError
from autoshard.train.config import TrainConfig, config_of_text
from autoshard.train.registry import whole_functions
from autoshard.train_step import TrainStep

MakePlan = Callable[[TrainConfig, TrainFunctions], Plan | StagedPlan]


def plan_in_micro_batches(
    config: TrainConfig, functions: TrainFunctions, make: MakePlan, say: Callable[[str], None]
) -> Plan | StagedPlan:
    """The plan that `make` makes, with as many micro-batches as it takes to fit the memory, but no more.

    A plan in stages chooses its micro-batches by itself.

    Args:
        config, functions: the run.
        make: plans a step; its plan carries the configuration that it is given.
        say: told of every attempt after the first.

    Raises:
        MemoryBudgetError: not even micro-batches of one example fit; the message is that of the first attempt.
        AutoshardError: whatever else `make` raises.
    """
    try:
        return make(config, functions)
    except MemoryBudgetError as error:
        if isinstance(functions.step, TrainStep):
            raise
        for count in _larger_counts(config):
            say(f"No plan fits the memory: {str(error).partition(chr(10))[0]} Trying {count} micro-batches.")
            more = _with_count(config, count)
            try:
                return make(more, whole_functions(more))
            except (MemoryBudgetError, ConfigError):
                continue
        raise


def as_planned(config: TrainConfig, plan: Plan | StagedPlan) -> TrainConfig:
    """The configuration with the micro-batches that a plan was made for, if `plan_in_micro_batches` may have chosen so.

    Args:
        config: of the run.
        plan: of the run, or of an earlier one.
    """
    if plan.configuration is None:
        return config
    count = config_of_text(plan.configuration, "plan").optimizer.num_micro_batches
    return _with_count(config, count) if count in _larger_counts(config) else config


def _larger_counts(config: TrainConfig) -> Iterator[int]:
    """Twice as many micro-batches as configured, four times, and so on, as long as they divide the batch."""
    count, size = 2 * config.optimizer.num_micro_batches, config.data.batch_size
    while count <= size and size % count == 0:
        yield count
        count *= 2


def _with_count(config: TrainConfig, count: int) -> TrainConfig:
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"num_micro_batches": count})})
