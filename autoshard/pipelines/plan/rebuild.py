"""The function of one program of a staged plan, made again from the training step: to compile it, or to look at it."""

from typing import Any

from autoshard.errors import PlanMismatchError
from autoshard.pipelines.cost.traced_model import trace_model
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.pipelines.split.joint_function import JointFunction, joint_arguments, joint_function
from autoshard.pipelines.split.layer_boundaries import LayerBoundaries
from autoshard.train_step import TrainStep


def program_function(
    plan: PipelinePlan, step: TrainStep, state: Any, batch: Any, number: int
) -> tuple[JointFunction, tuple[Any, ...]]:
    """The function that `plan.programs[number]` is a plan of, and the shapes that it takes.

    Args:
      plan: The plan. step: The training step that was planned. state, batch: Its arguments, by shape.
      number: Of the program.

    Raises:
      PlanMismatchError: The step has other layers than were planned. Whether the program itself is the planned one,
        `autoshard.plans.apply.check` tells.
    """
    one = next(s for s in plan.stage_ids if plan.program_of[s.pipeline][s.stage] == number)
    pipeline = plan.pipeline(one.pipeline)
    cuts = LayerBoundaries(plan.starts, plan.stop, plan.layers.names)
    model = trace_model(step, state, batch, pipeline.micro_batch_size, cuts)
    if model.stages.cuts.starts != plan.starts:
        raise PlanMismatchError(
            "The training step is no longer the one that was planned: its loss has other layers. Plan again."
        )
    part = pipeline.stages[one.stage]
    program = model.stages.program(part.start, part.stop)
    return joint_function(model.forward, program, part.rematerialise), joint_arguments(model.forward, program)
