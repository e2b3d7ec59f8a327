"""Evaluation on held-out data: the forward pass alone, where the plan put the state, or on one mesh.

Metrics are means over the batches. What is no mean, such as the area under the ROC curve, is computed from what each
example was given, gathered over all batches.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.train.click_metrics import click_metrics
from autoshard.train.feed import BatchReader
from autoshard.train.metrics import EvalReport
from autoshard.train.one_mesh import OneMesh
from autoshard.train.run import Run

Evaluation = Callable[[Any], Callable[[int], Any]]
"""state -> (number of a batch -> metrics)"""


def evaluator(run: Run, num_batches: int, items: int) -> Callable[[int, Any], EvalReport]:
    """A function that evaluates a state and leaves it as it is.

    Every evaluation sees the same batches. The model is used as after training: no dropout, running averages.

    Args:
        run: on whose `eval_batches` to evaluate, from the first on.
        num_batches: how many.
        items: tokens, images, ... in a batch.

    Returns:
        (steps taken, state) -> the means over the batches; of clicks, also `auc` and `normalized_entropy`.
    """
    return evaluation_of(
        _in_place(run) if run.one_mesh is None else _on_one_mesh(run, run.one_mesh), num_batches, items
    )


def evaluation_of(take: Evaluation, num_batches: int, items: int) -> Callable[[int, Any], EvalReport]:
    """`evaluator` for any way of evaluating one batch."""

    def evaluate(step: int, state: Any) -> EvalReport:
        started_s, sums, examples = time.perf_counter(), {}, {}
        one = take(state)
        for number in range(num_batches):
            # Each waits for the one before; see `trainer.py`.
            metrics = jax.block_until_ready(one(number))
            for name, value in metrics.items():
                if np.ndim(value):
                    examples.setdefault(name, []).append(np.asarray(value))
                else:
                    sums[name] = sums.get(name, 0.0) + float(value)
        means = {name: value / num_batches for name, value in sums.items()}
        if examples:
            told = click_metrics(*(np.concatenate(examples[name]) for name in ("logits", "clicks")))
            means |= {"auc": told.auc, "normalized_entropy": told.normalized_entropy}
        return EvalReport(step, means, num_batches * items, time.perf_counter() - started_s)

    return evaluate


def _in_place(run: Run) -> Evaluation:
    """As the plan lays state and batch out; the compiler shards what lies between. Each process gets the metrics."""
    whole = NamedSharding(jax.tree.leaves(run.shardings)[0].mesh, PartitionSpec())
    compiled = jax.jit(run.functions.evaluate, in_shardings=run.shardings, out_shardings=whole)
    reader = BatchReader(run.data.eval_batches, run.shardings[1])
    return lambda state: lambda number: compiled(state, reader.batch(number))


def _on_one_mesh(run: Run, mesh: OneMesh) -> Evaluation:
    """Brings what the model is made of onto one mesh; the optimizer's state stays behind."""
    shapes = run.data.eval_batches.shapes()
    reader = BatchReader(run.data.eval_batches, mesh.shardings(shapes))
    compiled = jax.jit(run.functions.evaluate, out_shardings=mesh.whole)

    def take(state: Any) -> Callable[[int], Any]:
        held = mesh.bring(state.replace(opt_state=()))

        def one(number: int) -> Any:
            if mesh.is_local:
                metrics = compiled(held, reader.batch(number))
            else:
                metrics = mesh.absent(jax.eval_shape(run.functions.evaluate, held, shapes))
            return mesh.everywhere(metrics)

        return one

    return take
