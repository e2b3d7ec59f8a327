"""Files of plans in stages: versioned JSON, never pickle. What is read is checked before it is believed.

The plan of each distinct stage stands in it as in a file of its own. Schedules are not stored: kinds and sizes tell
them.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any, Literal

import jax
import pydantic

from autoshard.errors import FileFormatError, ScheduleError
from autoshard.files import read_json, write_text_atomically
from autoshard.garbage import collection_paused
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.pipelines.schedule.durations import PipelineDurations, StageDurations, StepDurations, TransferDurations
from autoshard.pipelines.schedule.orders import make_schedule
from autoshard.pipelines.schedule.simulate import step_time
from autoshard.pipelines.search.arrangement import Pipeline
from autoshard.plans.files import STAGED_FORMAT, checked_document, plan_document, plan_of_document
from autoshard.plans.program_plan import ProgramPlan

VERSION = 4
"""Changes whenever a file written before could be misread."""

_OWN_FORM = frozenset({"programs", "durations", "shapes"})


@dataclasses.dataclass(frozen=True, slots=True)
class _PipelineTimes:
    """`PipelineDurations` without its schedule."""

    stages: tuple[StageDurations, ...]
    transfers: tuple[TransferDurations, ...]
    weights_s: tuple[float, ...]
    gradients_s: tuple[float, ...]
    update_s: tuple[float, ...]


def _document_type() -> type[pydantic.BaseModel]:
    """The file's schema: the fields of `PipelinePlan`, with a document for each program."""
    fields: dict[str, Any] = {"format": (Literal[STAGED_FORMAT], ...), "version": (Literal[VERSION], ...)}
    fields |= {f.name: (f.type, ...) for f in dataclasses.fields(PipelinePlan) if f.name not in _OWN_FORM}
    return pydantic.create_model(
        "StagedPlanDocument",
        __config__=pydantic.ConfigDict(extra="forbid", ser_json_inf_nan="strings", allow_inf_nan=True),
        jax_version=(str, ...),
        programs=(list[dict[str, Any]], ...),
        durations=(tuple[_PipelineTimes, ...], ...),
        **fields,
    )


def write_staged_plan(plan: PipelinePlan, path: str | os.PathLike[str]) -> None:
    """Writes `plan` to `path`."""
    times = [
        _PipelineTimes(**{f.name: getattr(p, f.name) for f in dataclasses.fields(_PipelineTimes)})
        for p in plan.durations.pipelines
    ]
    document = _document_type().model_construct(
        format=STAGED_FORMAT,
        version=VERSION,
        jax_version=jax.__version__,
        programs=[json.loads(plan_document(program).model_dump_json()) for program in plan.programs],
        durations=tuple(times),
        **{f.name: getattr(plan, f.name) for f in dataclasses.fields(PipelinePlan) if f.name not in _OWN_FORM},
    )
    write_text_atomically(path, document.model_dump_json())


def read_staged_plan(path: str | os.PathLike[str]) -> PipelinePlan:
    """Reads a plan in stages from `path`.

    Raises:
      FileFormatError: If the file is not valid JSON, not a plan in stages, of another version, or contradicts itself.
    """
    return pipeline_plan_of_document(read_json(path), path)


@collection_paused()
def pipeline_plan_of_document(raw: Any, path: str | os.PathLike[str]) -> PipelinePlan:
    """The plan in stages of a document as JSON gives it; `path` tells where it stands, for errors.

    Raises:
      FileFormatError: It is not a plan in stages, of another version, or contradicts itself.
    """
    if not isinstance(raw, dict) or raw.get("format") != STAGED_FORMAT:
        is_plan = isinstance(raw, dict) and raw.get("format") == "autoshard-plan"
        what = "is a plan of one program" if is_plan else f'lacks `"format": "{STAGED_FORMAT}"`'
        raise FileFormatError(
            f"`{path}` is not a plan in stages: it {what}. Read plans of one program with `autoshard.Plan.load`; plan "
            "a TrainStep for devices of several kinds to get stages."
        )
    if raw.get("version") != VERSION:
        raise FileFormatError(
            f"`{path}` is a plan in stages of version {raw.get('version')!r}, but this autoshard reads version "
            f"{VERSION}. Plan again."
        )
    document: Any = checked_document(_document_type(), raw, path)
    programs = tuple(plan_of_document(p, f"{path}, program {n}") for n, p in enumerate(document.programs))
    _check(document, programs, path)
    try:
        pairs = zip(document.arrangement.pipelines, document.durations, strict=True)
        durations = StepDurations(tuple(_durations(pipeline, times) for pipeline, times in pairs))
        step_time(durations)  # checks them against the schedules
    except ScheduleError as error:
        raise FileFormatError(f"`{path}`: {error} Plan again.") from error
    own = {f.name: getattr(document, f.name) for f in dataclasses.fields(PipelinePlan) if f.name not in _OWN_FORM}
    return PipelinePlan(programs=programs, durations=durations, **own)


def _durations(pipeline: Pipeline, times: _PipelineTimes) -> PipelineDurations:
    num_submeshes, num_stages = len(pipeline.submeshes), len(pipeline.stages)
    for transfer in times.transfers:
        if not 0 <= transfer.source < transfer.target < num_stages:
            raise ScheduleError(
                f"A transfer goes from a stage to a later one of {num_stages}; received one from stage "
                f"{transfer.source} to {transfer.target}."
            )
    schedule = make_schedule(pipeline.schedule, num_submeshes, num_stages, pipeline.num_micro_batches)
    return PipelineDurations(schedule, **{f.name: getattr(times, f.name) for f in dataclasses.fields(times)})


def _check(plan: Any, programs: Sequence[ProgramPlan], path: str | os.PathLike[str]) -> None:
    """What a document says of one thing in two places must agree."""

    def hold(is_so: bool, fault: str) -> None:
        if not is_so:
            raise FileFormatError(f"`{path}`: {fault}. Plan again.")

    first = 0
    for part in plan.slices:
        hold(
            part.num_devices >= 1 and part.first_device == first,
            f"slice `{part.name}` must begin with device {first} and have one at least, but it begins with "
            f"{part.first_device} and has {part.num_devices}",
        )
        first += part.num_devices
    layers, pipelines = plan.layers, plan.arrangement.pipelines
    num_layers = layers.num_layers
    hold(len(layers.names) == num_layers, f"{num_layers} layers, but names of {len(layers.names)}")
    readers = [r for c in layers.activations for r in (c.source, *c.readers)]
    readers += [r for weight in layers.shared_weights for r in weight.readers]
    hold(all(0 <= r < num_layers for r in readers), f"a layer is named that is none of the {num_layers}")
    hold(
        len(plan.starts) == num_layers
        and list(plan.starts) == sorted(set(plan.starts))
        and all(0 <= n < plan.stop for n in plan.starts),
        f"{num_layers} layers must begin one after the other before equation {plan.stop}, but begin at {plan.starts}",
    )
    hold(
        plan.arrangement.batch_size == plan.batch_size,
        f"the parts of the batch add up to {plan.arrangement.batch_size} examples, but it has {plan.batch_size}",
    )
    counts = [len(p.stages) for p in pipelines]
    hold(
        len(plan.durations) == len(counts), f"{len(counts)} pipelines, but durations of {len(plan.durations)} pipelines"
    )
    hold([len(row) for row in plan.program_of] == counts, f"pipelines of {counts} stages, but other programs for them")
    submeshes = [len(p.submeshes) for p in pipelines]
    hold(
        [len(row) for row in plan.meshes] == submeshes, f"pipelines of {submeshes} submeshes, but other meshes for them"
    )
    taken: list[tuple[int, int, str]] = []
    for p, pipeline in enumerate(pipelines):
        where = f"pipeline {p}"
        bounds = [0, *(s.stop for s in pipeline.stages)]
        hold(
            [s.start for s in pipeline.stages] == bounds[:-1]
            and bounds[-1] == num_layers
            and all(a < b for a, b in zip(bounds, bounds[1:], strict=False)),
            f"the stages of {where} must cover the {num_layers} layers in order, each at least one of them",
        )
        hold(pipeline.micro_batch_size >= 1, f"micro-batches of {where} have {pipeline.micro_batch_size} examples")
        for submesh, mesh in zip(pipeline.submeshes, plan.meshes[p], strict=True):
            names, sizes = [a for a, _ in mesh.axes], [n for _, n in mesh.axes]
            hold(
                bool(names) and len(set(names)) == len(names) and min(sizes) >= 1,
                f"mesh `{mesh.name}` needs distinct axes with sizes of at least 1, but has {mesh.axes}",
            )
            hold(
                0 <= submesh.slice < len(plan.slices), f"{where} has a submesh on slice {submesh.slice}, which is none"
            )
            part = plan.slices[submesh.slice]
            inside = 0 <= submesh.first_device <= part.num_devices - mesh.num_devices
            hold(
                inside and mesh.first_device == part.first_device + submesh.first_device,
                f"mesh `{mesh.name}` of {where} must lie within slice `{part.name}`, which has {part.num_devices} "
                f"devices from {part.first_device} on, but it has {mesh.num_devices} from {mesh.first_device} on",
            )
            whole = range(part.first_device, part.first_device + part.num_devices)
            hold(
                len(set(mesh.devices)) == mesh.num_devices == len(mesh.devices)
                and all(n in whole for n in mesh.devices),
                f"mesh `{mesh.name}` of {where} must have {mesh.num_devices} devices of slice `{part.name}`, each "
                f"once, but has {mesh.devices!s:.60}",
            )
            taken.append((mesh.first_device, mesh.first_device + mesh.num_devices, mesh.name))
        for s, number in enumerate(plan.program_of[p]):
            hold(0 <= number < len(programs), f"stage {s} of {where} has program {number}, which is none")
            mesh, program = plan.meshes[p][s % len(pipeline.submeshes)], programs[number]
            hold(
                program.axes == mesh.axes,
                f"stage {s} of {where} runs on {mesh.axes}, but its program is for {program.axes}",
            )
    taken.sort()
    for (_, stop, one), (start, _, other) in zip(taken, taken[1:], strict=False):
        hold(stop <= start, f"device {start} belongs to `{one}` and to `{other}`")
    used_devices = [n for row in plan.meshes for mesh in row for n in mesh.devices]
    hold(len(set(used_devices)) == len(used_devices), "a device belongs to two meshes")
    used = {number for row in plan.program_of for number in row}
    hold(len(used) == len(programs), f"{len(programs)} programs, of which {len(used)} are run")
    hold(
        len(plan.owners) == len(plan.parameters),
        f"{len(plan.parameters)} parameters, but owners of {len(plan.owners)}",
    )
    for name, owner in zip(plan.parameters, plan.owners, strict=True):
        known = 0 <= owner.pipeline < len(pipelines) and 0 <= owner.stage < counts[owner.pipeline]
        hold(known, f"parameter `{name}` lives on {owner}, which is none")
