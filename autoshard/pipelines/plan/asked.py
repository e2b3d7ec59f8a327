"""What the step and its annotations fix of the search of stages, joined with what the caller fixes."""

import dataclasses
from collections.abc import Sequence

from autoshard.errors import AnnotationError, StageError
from autoshard.pipelines.plan.pipeline_plan import ObeyedStage, SliceSummary
from autoshard.pipelines.search.arrangement import Arrangement
from autoshard.pipelines.search.options import StageOptions
from autoshard.pipelines.split.annotated_stages import AskedPipeline
from autoshard.printing import counted


def with_parts(stages: StageOptions, parts: Sequence[int] | None) -> StageOptions:
    """The caller's options with the micro-batches that the step says itself, so that it stays the same step.

    Args:
      stages: What the caller fixes. parts: `TrainStep.parts`, which make up the batch.

    Raises:
      StageError: No pipelines can have them, or the caller's options allow others only.
    """
    if not parts:
        return stages
    given, own = stages.micro_batch_sizes, sorted(set(parts))
    if len(own) > 1:
        raise StageError(
            "A step is planned in stages with micro-batches of one size; received a TrainStep with parts of "
            f"{' and '.join(map(str, own))} examples. Make them equal, or leave `parts` out: the plan then chooses the "
            "micro-batches."
        )
    if given is not None and own[0] not in given:
        raise StageError(
            "A step that says its micro-batches keeps them in stages; received a TrainStep with parts of "
            f"{own[0]}, and StageOptions.micro_batch_sizes (plan.stages) of {' or '.join(map(str, given))} examples. "
            "Leave one of them out."
        )
    return dataclasses.replace(stages, micro_batch_sizes=tuple(own))


def with_asked(stages: StageOptions, asked: AskedPipeline | None) -> StageOptions:
    """The caller's options with what annotations ask for.

    Raises:
      AnnotationError: They ask for something else than the caller.
    """
    if asked is None:
        return stages
    told = {
        "num_stages": asked.num_stages,
        "num_micro_batches": asked.pipeline.num_micro_batches,
        "num_pipelines": asked.num_pipelines,
    }
    fixed = {name: number for name, number in told.items() if number is not None}
    for name, number in fixed.items():
        given = getattr(stages, name)
        if given not in (None, number):
            block = asked.outer[0] if name == "num_pipelines" else asked.pipeline
            raise AnnotationError(
                f"Annotations and options must agree, but {block.at_line} asks for {name}={number} and StageOptions "
                f"(plan.stages) for {given}. Leave one of them out."
            )
    return dataclasses.replace(stages, **fixed)


def obeyed_stages(
    asked: AskedPipeline | None, arrangement: Arrangement, slices: Sequence[SliceSummary]
) -> tuple[ObeyedStage, ...]:
    """What became of the blocks that ask for pipelines and stages, the outermost first."""
    if asked is None:
        return ()
    pipelines = arrangement.pipelines
    rows = [(block, counted(len(pipelines), "pipeline")) for block in asked.outer]
    most = max(p.num_micro_batches for p in pipelines)
    stages = counted(len(pipelines[0].stages), "stage")
    rows.append((asked.pipeline, f"{stages}, {counted(most, 'micro-batch', 'micro-batches')}"))
    for number, block in enumerate(asked.stages):
        held = {p.submeshes[number % len(p.submeshes)].slice for p in pipelines}
        rows.append((block, f"stage {number} on {', '.join(slices[n].device for n in sorted(held))}"))
    return tuple(ObeyedStage(str(block), block.line, got) for block, got in rows)
