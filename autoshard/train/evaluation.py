"""Evaluation on held-out data: the forward pass alone, where the plan put the state."""

import time
from collections.abc import Callable
from typing import Any

import jax
from autoshard_models.train_step import TrainFunctions

from autoshard.train.data import TrainData
from autoshard.train.feed import place
from autoshard.train.metrics import EvalReport


def evaluator(
    functions: TrainFunctions, data: TrainData, num_batches: int, items: int, shardings: tuple[Any, Any]
) -> Callable[[int, Any], EvalReport]:
    """A function that evaluates a state and leaves it as it is.

    Every evaluation sees the same batches. The model is used as after training: no dropout, running averages.

    Args:
        functions: of the run.
        data: whose `eval_batches` are used, from the first on.
        num_batches: how many.
        items: tokens, images, ... in a batch.
        shardings: of the state and of a batch, as in the plan; the compiler shards what lies between.

    Returns:
        (steps taken, state) -> the means over the batches.
    """
    compiled = jax.jit(functions.evaluate, in_shardings=shardings)

    def evaluate(step: int, state: Any) -> EvalReport:
        started_s, sums = time.perf_counter(), {}
        for number in range(num_batches):
            # Each waits for the one before; see `trainer.py`.
            metrics = jax.block_until_ready(compiled(state, place(data.eval_batches[number], shardings[1])))
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        means = {name: value / num_batches for name, value in sums.items()}
        return EvalReport(step, means, num_batches * items, time.perf_counter() - started_s)

    return evaluate
