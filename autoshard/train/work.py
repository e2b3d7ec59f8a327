"""How much a training step computes."""

from typing import Any

import jax
from autoshard_models.train_step import TrainFunctions

from autoshard.api import Plan, StagedPlan
from autoshard.trace.rules.products import PRODUCTS
from autoshard.trace.trace import trace
from autoshard.train.data import TrainData
from autoshard.train.metrics import StepWork

_PASSES = 3
"""A backward pass has two products, by the operand and by the weights, for each of the forward pass."""


def model_flops(functions: TrainFunctions, state: Any, batch: Any) -> float:
    """Floating-point operations of the matrix products of one training step, over all devices.

    Those of the forward pass, thrice. Not counted: other operations, the optimizer, and what is computed again in the
    backward pass to save memory. So it is counted in "PaLM" (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) and
    by MaxText, of which this differs where a model skips a part of a product, as for causal attention.

    Args:
        functions: of the run.
        state, batch: by shape.
    """
    graph = trace(functions.evaluate, (state, batch)).graph
    return _PASSES * sum(o.rule.flops * o.trips for o in graph.operations if o.name in PRODUCTS)


def step_work(functions: TrainFunctions, data: TrainData, plan: Plan | StagedPlan, batch_size: int) -> StepWork:
    """What one step of a run does."""
    state = jax.eval_shape(functions.init, 0)
    flops = model_flops(functions, state, data.batches.shapes())
    items = batch_size * data.items_per_example
    return StepWork(plan.num_devices, items, data.item, flops, plan.device_flops)
