"""Fewer devices: the step is run in more micro-batches where it does not fit, and stays the same step."""

import pathlib

import jax
import numpy as np
import pytest

from autoshard.api import Plan
from autoshard.errors import MemoryBudgetError
from autoshard.train.config import TrainConfig
from autoshard.train.feed import BatchReader
from autoshard.train.micro_batches import as_planned, plan_in_micro_batches
from autoshard.train.plan_reuse import why_unfit
from autoshard.train.planning import make_plan
from autoshard.train.registry import load_data, whole_functions

STEPS = 6

BUDGET_BYTES = 2_000_000
"""Of each of two devices: the whole batch needs 3.9 MB, two micro-batches 2.6 MB, and four 1.4 MB."""

CLUSTER = """\
format: autoshard-cluster
version: 1
name: cpux{0}
groups:
  - {{name: cpu, device_type: CPU-generic, num_nodes: 1, devices_per_node: {0}, intra_node: Shared-memory}}
"""


def config_of(folder: pathlib.Path, mesh: dict[str, int], batch_size: int = 64, **plan) -> TrainConfig:
    """A run on some of the eight CPU devices, told by a cluster file."""
    count = int(np.prod(list(mesh.values())))
    cluster = folder / f"{count}.yaml"
    cluster.write_text(CLUSTER.format(count))
    return TrainConfig.model_validate(
        {
            "model": {"overrides": {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "dropout_rate": 0.0}},
            "optimizer": {"learning_rate": 1e-3},
            "data": {"batch_size": batch_size, "sequence_length": 32},
            "train": {"steps": STEPS},
            "plan": {"mesh": mesh, "cluster": str(cluster), "time_limit_s": 5, **plan},
        }
    )


def fitted(config: TrainConfig) -> tuple[Plan, list[str]]:
    """The plan, and what was said on the way to it."""
    said: list[str] = []
    plan = plan_in_micro_batches(config, whole_functions(config), make_plan, said.append)
    assert isinstance(plan, Plan)
    return plan, said


def losses(config: TrainConfig, plan: Plan) -> list[float]:
    """Those of a run under `plan`."""
    functions, batches = whole_functions(as_planned(config, plan)), load_data(config).batches
    devices = jax.devices()[: plan.num_devices]
    step, state = plan.jit(functions.step, devices), plan.init(functions.init, 0, devices=devices)
    reader = BatchReader(batches, step.in_shardings((state, batches.shapes()))[1])
    found = []
    for number in range(STEPS):
        state, metrics = step(state, reader.batch(number))
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.slow
def test_a_step_that_does_not_fit_fewer_devices_is_run_in_parts_and_stays_the_same(tmp_path):
    many, few = (
        config_of(tmp_path, {"data": 4, "tensor": 2}),
        config_of(tmp_path, {"data": 2}, memory_budget_bytes=BUDGET_BYTES),
    )
    (whole, said_nothing), (parts, said) = fitted(many), fitted(few)
    assert said_nothing == [] and as_planned(many, whole) == many
    assert [text.split("Trying ")[1] for text in said] == ["2 micro-batches.", "4 micro-batches."]
    planned = as_planned(few, parts)
    assert planned.optimizer.num_micro_batches == 4 and planned.data == few.data
    assert parts.estimate.peak_bytes <= BUDGET_BYTES
    np.testing.assert_allclose(losses(few, parts), losses(many, whole), rtol=1e-5)


def test_a_plan_in_parts_is_used_again_for_the_configuration_that_it_was_made_from(tmp_path):
    """`why_unfit` compares with the configuration in as many micro-batches as the plan has; other changes count."""
    config = config_of(tmp_path, {"data": 8})
    in_parts = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"num_micro_batches": 2})})
    functions = whole_functions(in_parts)
    plan = make_plan(in_parts, functions)
    assert as_planned(config, plan) == in_parts
    assert why_unfit(plan, as_planned(config, plan), functions) is None
    other = config_of(tmp_path, {"data": 8}, batch_size=32)
    assert "another `data`" in (why_unfit(plan, as_planned(other, plan), functions) or "")
    odd = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"num_micro_batches": 4})})
    assert as_planned(odd, plan) == odd  # a plan in fewer parts than configured is no plan for it
    assert "another `optimizer`" in (why_unfit(plan, odd, whole_functions(odd)) or "")


def test_what_fits_in_no_parts_is_told_as_of_the_whole(tmp_path):
    config = config_of(tmp_path, {"data": 2}, batch_size=4, memory_budget_bytes=1000)
    said: list[str] = []
    with pytest.raises(MemoryBudgetError, match=r"memory_budget_bytes=\d+"):
        plan_in_micro_batches(config, whole_functions(config), make_plan, said.append)
    assert [text.split("Trying ")[1] for text in said] == ["2 micro-batches.", "4 micro-batches."]
