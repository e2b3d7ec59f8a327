"""A plan in stages as text in the forms that other programs read: stage by stage."""

from collections.abc import Mapping, Sequence

from autoshard.errors import ExportError
from autoshard.pipelines.plan.explain import program_text
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.plans.export import Form, exported, shardings_document, shardings_text
from autoshard.printing import counted

_MOST_MESHES = 8
"""Stages that an error names."""


def exported_stages(
    plan: PipelinePlan, form: Form, names: Mapping[str, Sequence[str | None]] | None = None, nearest: bool = False
) -> str:
    """The plan in `form`: shardings as one JSON document; Flax rules as one YAML document for each distinct stage.

    Args:
      plan, form: What to write, and how. names, nearest: See `logical_axes`; they are for every stage.

    Raises:
      ExportError: A stage cannot be said in that form, which the message names.
    """
    match form:
        case Form.SHARDINGS:
            return _shardings(plan)
        case Form.FLAX_RULES:
            return "".join(_rules(plan, number, names, nearest) for number in range(len(plan.programs)))
        case Form.MAXTEXT:
            meshes = [
                f"{one} on {plan.mesh_of(one).name} ({plan.plan_of(one).device}, "
                f"{', '.join(f'{a}={n}' for a, n in plan.mesh_of(one).axes)})"
                for one in plan.stage_ids
            ]
            left = [f"and {len(meshes) - _MOST_MESHES} more"] if len(meshes) > _MOST_MESHES else []
            stages = counted(len(meshes), "stage on a mesh of its own", "stages on meshes of their own")
            raise ExportError(
                "A MaxText file holds one mesh and one set of rules for the whole step, but this plan runs it in "
                f"{stages}: {'; '.join([*meshes[:_MOST_MESHES], *left])}. Write the shardings "
                "(--to shardings) or each stage's rules (--to flax-rules), or plan for one kind of device."
            )


def _rules(plan: PipelinePlan, number: int, names: Mapping[str, Sequence[str | None]] | None, nearest: bool) -> str:
    title = program_text(plan, number)
    try:
        text = exported(plan.programs[number], Form.FLAX_RULES, names, nearest)
    except ExportError as error:
        raise ExportError(f"{title}: {error}") from error
    return f"--- # {title}\n{text}"


def _shardings(plan: PipelinePlan) -> str:
    document = {
        "format": "autoshard-staged-shardings",
        "version": 1,
        "pipelines": [
            [
                {
                    "layers": [part.start, part.stop],
                    "first_device": mesh.first_device,
                    "devices": list(mesh.devices),
                    "mesh": [list(axis) for axis in mesh.axes],
                    "program": plan.program_of[p][s],
                }
                for s, (part, mesh) in enumerate(
                    (part, plan.meshes[p][s % len(plan.meshes[p])]) for s, part in enumerate(pipeline.stages)
                )
            ]
            for p, pipeline in enumerate(plan.arrangement.pipelines)
        ],
        "owners": {name: [one.pipeline, one.stage] for name, one in zip(plan.parameters, plan.owners, strict=True)},
        "programs": [shardings_document(program) for program in plan.programs],
    }
    return shardings_text(document)
