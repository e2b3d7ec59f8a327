"""The pipeline and stages that annotations ask for, read from the loss of a micro-batch."""

import dataclasses
import itertools
import math

import jax.extend.core as jex

from autoshard.annotations.block import Block, BlockKind
from autoshard.errors import AnnotationError
from autoshard.trace.blocks import Blocks
from autoshard.trace.source import source_of
from autoshard.trace.walk import is_checkpoint, nested_programs, open_jaxpr

_OF_PIPELINES = (BlockKind.PIPELINE, BlockKind.STAGE)


@dataclasses.dataclass(frozen=True, slots=True)
class AskedPipeline:
    """What annotations ask of the pipelines of a step.

    Attributes:
      pipeline: The block.
      outer: The blocks `replicate` around it: they ask for pipelines side by side.
      stages: The stages inside, in the order in which they run; empty where the planner cuts.
      spans: For each stage, the positions of its first and last main equation.
    """

    pipeline: Block
    outer: tuple[Block, ...]
    stages: tuple[Block, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def num_stages(self) -> int | None:
        """Stages of each pipeline; None for any number."""
        return len(self.stages) or self.pipeline.num_stages

    @property
    def num_pipelines(self) -> int | None:
        """Pipelines side by side; None for any number."""
        degrees = [b.degree for b in self.outer if b.degree is not None]
        return math.prod(degrees) if degrees else None


def asked_pipeline(jaxpr: jex.Jaxpr, main: tuple[int, ...]) -> AskedPipeline | None:
    """The pipeline that the annotations in a loss ask for; None if they ask for none.

    Args:
      jaxpr: The loss, calls inlined. main: Indices of its main equations.

    Raises:
      AnnotationError: Pipelines and stages are not nested as they can be, or stages are interleaved.
    """
    reader = Blocks()
    rows = [reader.of(e) for e in jaxpr.eqns]
    for equation, row in zip(jaxpr.eqns, rows, strict=True):
        _refuse_nested(equation, reader)
        _check_nesting(row)
    pipelines = list(dict.fromkeys(b for row in rows for b in row if b.kind is BlockKind.PIPELINE))
    if not pipelines:
        return None
    if len(pipelines) > 1:
        raise AnnotationError(
            f"A step has one pipeline, but {pipelines[0].at_line} and {pipelines[1].at_line} are two. Put the stages "
            "of both into one."
        )
    (pipeline,) = pipelines
    outer = next(row[: row.index(pipeline)] for row in rows if pipeline in row)
    _check_outer(pipeline, outer)
    positions: dict[Block, list[int]] = {}
    for position, i in enumerate(main):
        for block in rows[i]:
            if block.kind is BlockKind.STAGE:
                positions.setdefault(block, []).append(position)
    _check_stages(pipeline, rows, positions)
    stages = tuple(sorted(positions, key=lambda b: positions[b][0]))
    spans = tuple((positions[b][0], positions[b][-1]) for b in stages)
    for (one, (_, last)), (other, (first, _)) in itertools.pairwise(zip(stages, spans, strict=True)):
        if first < last:
            raise AnnotationError(
                f"Stages run one behind the other, but code of {one.at_line} comes after the beginning of "
                f"{other.at_line}. Close the first before the second begins."
            )
    return AskedPipeline(pipeline, outer, stages, spans)


def _refuse_nested(equation: jex.JaxprEqn, reader: Blocks) -> None:
    """Refuses pipelines and stages in loops, branches and checkpointed functions, which stay in one piece."""
    for nested in nested_programs(equation):
        for inner in open_jaxpr(nested).eqns:
            block = next((b for b in reader.of(inner) if b.kind in _OF_PIPELINES), None)
            if block is not None:
                name = "jax.checkpoint" if is_checkpoint(equation) else equation.primitive.name
                line = source_of(equation)
                raise AnnotationError(
                    f"A stage may hold loops, branches and checkpointed functions, but {block.at_line} stands inside "
                    f"the `{name}`{f' at {line}' if line else ''}, which cannot be cut. {_way_out(equation, block)}"
                )
            _refuse_nested(inner, reader)


def _way_out(equation: jex.JaxprEqn, block: Block) -> str:
    """What to change where a block stands inside a loop, a branch or a checkpointed function."""
    if is_checkpoint(equation):
        return (
            f"Put the checkpoint into the {block.kind.value}: `with autoshard.{block}: x = jax.checkpoint(layer)(x)`; "
            "or leave it out, since the planner chooses which stages are computed again."
        )
    if equation.primitive.name == "scan":
        return (
            "Write the loop out there: `for layer in layers: x = body(x, layer)`, with parameters layer by layer; or "
            f"put `with autoshard.{block}:` around it; or leave the blocks out and let the planner cut: "
            "`autoshard.pipeline(num_stages=...)`."
        )
    return f"Put `with autoshard.{block}:` around it."


def _check_nesting(row: tuple[Block, ...]) -> None:
    stages = [n for n, b in enumerate(row) if b.kind is BlockKind.STAGE]
    pipelines = [n for n, b in enumerate(row) if b.kind is BlockKind.PIPELINE]
    if len(stages) > 1 or len(pipelines) > 1:
        one, other = [row[n] for n in (stages if len(stages) > 1 else pipelines)][:2]
        raise AnnotationError(
            f"A {one.kind.value} cannot hold another, but {other.at_line} stands inside {one.at_line}. Leave out one "
            "of them."
        )
    if stages and not (pipelines and pipelines[0] < stages[0]):
        raise AnnotationError(
            f"A stage stands inside a pipeline, but none is around {row[stages[0]].at_line}. Put "
            "`with autoshard.pipeline():` around the stages."
        )


def _check_outer(pipeline: Block, outer: tuple[Block, ...]) -> None:
    for block in outer:
        if block.kind is not BlockKind.REPLICATE:
            raise AnnotationError(
                f"Around a pipeline only `replicate` has a meaning, pipelines side by side, but {block.at_line} stands "
                f"around {pipeline.at_line}. Put it into the stages."
            )


def _check_stages(pipeline: Block, rows: list[tuple[Block, ...]], positions: dict[Block, list[int]]) -> None:
    asked = dict.fromkeys(b for row in rows for b in row if b.kind is BlockKind.STAGE)
    empty = next((b for b in asked if b not in positions), None)
    if empty is not None:
        raise AnnotationError(
            f"A stage has operations on the batch with weights, but {empty.at_line} has none. Leave it out."
        )
    if positions and pipeline.num_stages not in (None, len(positions)):
        first = min(positions, key=lambda b: positions[b][0])
        raise AnnotationError(
            f"The stages of a pipeline are its blocks, but {pipeline.at_line} asks for {pipeline.num_stages} and there "
            f"are {len(positions)}, the first of them {first.at_line}. Leave out num_stages, or the blocks."
        )
