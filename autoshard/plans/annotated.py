"""From the annotated blocks of a program to what is asked on which meshes."""

import itertools
import math
from collections.abc import Mapping, Sequence

from autoshard.annotations.block import Block
from autoshard.cluster import LogicalMesh
from autoshard.errors import AnnotationError, StageError
from autoshard.graph.graph import Graph
from autoshard.planner.asked import Asked, asked_of, check_binding, in_force, refusals
from autoshard.planner.program import Program
from autoshard.trace.blocks import asks_for_stages


class StagesAskedError(StageError):
    """A program whose annotations ask for stages is planned as one program."""


def refuse_stages(graph: Graph) -> None:
    """Refuses a program that asks for stages.

    Raises:
      StagesAskedError: It does.
    """
    for operation in graph.operations:
        if (block := asks_for_stages(operation.blocks)) is not None:
            raise StagesAskedError(
                f"Only an autoshard.TrainStep can be cut into stages, which {block.at_line} asks for. Write the step "
                "as autoshard.TrainStep(loss_fn, optimizer) with the annotation in loss_fn, or leave it out."
            )


def asked_on(
    program: Program, meshes: Sequence[LogicalMesh], given: Mapping[str, int] | None
) -> tuple[Asked | None, list[LogicalMesh]]:
    """What the blocks of a program ask for, and those of the meshes that can do it.

    Args:
      program: The program. meshes: Those that may be taken. given: The mesh that the caller demands, if any.

    Raises:
      AnnotationError: What is asked for contradicts itself, or no mesh can do it.
    """
    asked = asked_of(program)
    if asked is None:
        return None, list(meshes)
    check_binding([asked])
    for blocks in stacks(program.graph):
        check_degrees(blocks, meshes[0].num_devices)
    why = [next(refusals(program, mesh, asked), None) for mesh in meshes]
    fitting = [mesh for mesh, reason in zip(meshes, why, strict=True) if reason is None]
    if not fitting:
        nested = stacks(program.graph)
        for blocks in nested:
            if not any(has_degrees(mesh.shape, blocks) for mesh in meshes):
                raise AnnotationError(_no_axes(blocks, meshes, given))
        has_axes = [all(has_degrees(mesh.shape, blocks) for blocks in nested) for mesh in meshes]
        reason = why[has_axes.index(True) if any(has_axes) else 0]
        raise AnnotationError(
            f"Every product inside an annotation must obey it, but {reason}, which cannot be had on "
            f"{_shown(meshes)}. Each degree must divide its dimension, and dimensions of a product are split by "
            "different devices: choose other degrees, or put the block around less."
        )
    return asked, fitting


def stacks(graph: Graph) -> list[tuple[Block, ...]]:
    """The distinct nestings of blocks that ask something, each with the outermost first."""
    nested = filter(None, dict.fromkeys(in_force(o.blocks) for o in graph.operations))
    return list({tuple((str(b), b.line) for b in blocks): blocks for blocks in nested}.values())


def check_degrees(blocks: tuple[Block, ...], num_devices: int) -> None:
    needed = math.prod(b.degree for b in blocks if b.degree is not None)
    if num_devices % needed == 0:
        return
    lines = " inside ".join(b.at_line for b in reversed(blocks))
    apart = ""
    if len(blocks) > 1 and all(num_devices % (b.degree or 1) == 0 for b in blocks):
        apart = (
            ", or let the inner one take the place of the outer one on the same devices: "
            f"autoshard.split({blocks[-1].degree}, ..., colocate=True)"
        )
    together = "together" if len(blocks) > 1 else "alone"
    raise AnnotationError(
        f"The devices must be a multiple of what annotations ask for, degrees of nested blocks multiplied, but {lines} "
        f"{together} need{'s' if len(blocks) == 1 else ''} {needed} devices, and there are {num_devices}. Choose "
        f"degrees whose product divides {num_devices}{apart}."
    )


def has_degrees(sizes: Sequence[int], blocks: Sequence[Block]) -> bool:
    """Whether the axes of a mesh can be handed out to nested blocks such that each has its degree."""
    by_dims: dict[object, int] = {}
    num_devices, told = math.prod(sizes), math.prod(b.degree for b in blocks if b.degree is not None)
    for b in blocks:
        key = b.kind, b.dims
        by_dims[key] = by_dims.get(key, 1) * (num_devices // told if b.degree is None else b.degree)
    wanted = [d for d in by_dims.values() if d > 1]
    ways = itertools.product(range(len(wanted) + 1), repeat=len(sizes))
    parts = lambda way, k: math.prod(n for n, own in zip(sizes, way, strict=True) if own == k)
    return any(all(parts(way, k) == d for k, d in enumerate(wanted)) for way in ways)


def _no_axes(blocks: Sequence[Block], meshes: Sequence[LogicalMesh], given: Mapping[str, int] | None) -> str:
    lines = " inside ".join(b.at_line for b in reversed(blocks))
    degrees = [b.degree for b in blocks if b.degree is not None and b.degree > 1]
    rest = meshes[0].num_devices // math.prod(degrees)
    sizes = [*degrees, rest] if rest > 1 else degrees
    example = ", ".join(f'"axis{n}": {size}' for n, size in enumerate(sizes))
    way = f"mesh={{{example}}}"
    if given is not None:
        way = f"{way} instead, or none"
    elif len(sizes) == 3 and all(len(mesh.axes) < 3 for mesh in meshes):
        way = f"{way}, or PlanOptions(max_mesh_axes=3)"
    return (
        f"Each annotation is carried by mesh axes of its own, whose sizes multiply to its degree, but {_shown(meshes)} "
        f"{'has' if len(meshes) == 1 else 'have'} no such axes for {lines}. Pass {way}."
    )


def _shown(meshes: Sequence[LogicalMesh]) -> str:
    shown = ["x".join(map(str, mesh.shape)) for mesh in meshes]
    return f"the mesh {shown[0]}" if len(shown) == 1 else f"the meshes {', '.join(dict.fromkeys(shown))}"
