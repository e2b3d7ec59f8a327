"""Plan files: versioned JSON, never pickle. What is read is checked before it is believed."""

import dataclasses
import json
import math
import os
from typing import Any, Literal

import jax
import pydantic

from autoshard.errors import ClusterError, FileFormatError, MeshError
from autoshard.files import read_json, write_text_atomically
from autoshard.garbage import collection_paused
from autoshard.graph.layout import SpecEntries
from autoshard.plans.program_plan import PlannedTensor, ProgramPlan

VERSION = 22
"""Changes whenever a file written before could be misread."""

STAGED_FORMAT = "autoshard-staged-plan"
"""The format of files of plans in stages, which `autoshard.pipelines.plan.files` reads."""

HOST_TABLES_FORMAT = "autoshard-host-tables-plan"
"""That of plans with tables in host memory, which `autoshard.offloading.files` reads."""

_DERIVED = frozenset({"in_tree", "out_tree", "kept_trace", "equations"})


def _document_type() -> type[pydantic.BaseModel]:
    """The file's schema: the fields of `ProgramPlan`, the equations as a table of distinct texts and their order."""
    fields: dict[str, Any] = {"format": (Literal["autoshard-plan"], ...), "version": (Literal[VERSION], ...)}
    fields |= {f.name: (f.type, ...) for f in dataclasses.fields(ProgramPlan) if f.name not in _DERIVED}
    return pydantic.create_model(
        "PlanDocument",
        __config__=pydantic.ConfigDict(extra="forbid", ser_json_inf_nan="strings", allow_inf_nan=True),
        jax_version=(str, ...),
        equation_texts=(tuple[str, ...], ...),
        equation_order=(tuple[int, ...], ...),
        **fields,
    )


def write_plan(plan: ProgramPlan, path: str | os.PathLike[str]) -> None:
    """Writes `plan` to `path`."""
    write_text_atomically(path, plan_document(plan).model_dump_json())


def plan_document(plan: ProgramPlan) -> pydantic.BaseModel:
    """What a plan's file holds; a document of several plans can hold it too."""
    order = {text: i for i, text in enumerate(dict.fromkeys(plan.equations))}
    return _document_type().model_construct(
        format="autoshard-plan",
        version=VERSION,
        jax_version=jax.__version__,
        equation_texts=tuple(order),
        equation_order=tuple(order[text] for text in plan.equations),
        **{f.name: getattr(plan, f.name) for f in dataclasses.fields(ProgramPlan) if f.name not in _DERIVED},
    )


@collection_paused()
def read_plan(path: str | os.PathLike[str]) -> ProgramPlan:
    """Reads a plan from `path`.

    Raises:
      FileFormatError: If the file is not valid JSON, not a plan, of another version, or contradicts itself.
    """
    return plan_of_document(read_json(path), path)


def checked_document(schema: type[pydantic.BaseModel], raw: Any, path: str | os.PathLike[str]) -> pydantic.BaseModel:
    """What JSON gives as the schema of a plan's file has it; raises FileFormatError where it does not follow that."""
    try:
        document = schema.model_validate(raw)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise FileFormatError(f"`{path}` is not a valid plan: at `{where}`: {first['msg']}. Plan again.") from error
    except (ClusterError, MeshError) as error:
        raise FileFormatError(f"`{path}` is not a valid plan: {error} Plan again.") from error
    if json.loads(document.model_dump_json()) != raw:
        raise FileFormatError(f"`{path}` holds keys or values that no plan has. Plan again.")
    return document


def plan_of_document(raw: Any, path: str | os.PathLike[str]) -> ProgramPlan:
    """The plan of a document as JSON gives it.

    Args:
      raw: The document. path: Where it stands, for errors.

    Raises:
      FileFormatError: If it is not a plan, of another version, or contradicts itself.
    """
    if isinstance(raw, dict) and raw.get("format") == STAGED_FORMAT:
        raise FileFormatError(
            f"`{path}` is a plan in stages, and what was asked for takes a plan of one program only. `autoshard "
            "explain`, `verify` and `train` take plans in stages; in code, `autoshard.StagedPlan.load` reads them."
        )
    if isinstance(raw, dict) and raw.get("format") == HOST_TABLES_FORMAT:
        raise FileFormatError(
            f"`{path}` is a plan with tables in host memory, and what was asked for takes plans on devices only. "
            "`autoshard explain`, `report` and `verify` take it; in code, `autoshard.load` reads it."
        )
    if not isinstance(raw, dict) or raw.get("format") != "autoshard-plan":
        raise FileFormatError(
            f'`{path}` is not an autoshard plan: it lacks `"format": "autoshard-plan"`. Make one with `autoshard plan`.'
        )
    if raw.get("version") != VERSION:
        raise FileFormatError(
            f"`{path}` is a plan of version {raw.get('version')!r}, but this autoshard reads version {VERSION} only, "
            "in which a plan also says which products run in pieces. Plan again."
        )
    held = dict(checked_document(_document_type(), raw, path))
    texts, order = held["equation_texts"], held["equation_order"]
    if any(not 0 <= i < len(texts) for i in order):
        raise FileFormatError(f"`{path}` refers to an equation that it does not describe. Plan again.")
    plan = ProgramPlan(
        equations=tuple(texts[i] for i in order),
        **{f.name: held[f.name] for f in dataclasses.fields(ProgramPlan) if f.name not in _DERIVED},
    )
    _check(plan, path)
    return plan


def _check(plan: ProgramPlan, path: str | os.PathLike[str]) -> None:
    """A plan's layouts must be legal on its own mesh."""
    sizes = plan.mesh_axes
    if not sizes or len(sizes) != len(plan.axes) or any(n < 1 for n in sizes.values()):
        raise FileFormatError(
            f"`{path}`: mesh axes need distinct names and sizes of at least 1, but they are {plan.axes}. Plan again."
        )
    hardware = tuple((axis.name, axis.size) for axis in plan.logical_mesh.axes)
    if hardware != plan.axes or plan.logical_mesh.device_type.name != plan.device:
        raise FileFormatError(
            f"`{path}`: a plan's mesh is that of its hardware, but {plan.device} on {plan.axes} has the hardware "
            f"{plan.logical_mesh}. Plan again."
        )
    for tensor in (*plan.arguments, *plan.outputs):
        _check_entries(tensor, sizes, path)
    if len(plan.output_steps) != len(plan.outputs):
        raise FileFormatError(
            f"`{path}`: {len(plan.outputs)} outputs, but steps of {len(plan.output_steps)}. Plan again."
        )
    for tensor, steps in zip(plan.outputs, plan.output_steps, strict=True):
        for entries in steps:
            _check_entries(dataclasses.replace(tensor, entries=entries), sizes, path)
    known: set[SpecEntries] = set()
    for number, shardings in (*plan.shardings, *plan.timed):
        paths = [(slot, entries) for slot, steps in shardings.operands for entries in steps]
        for _, entries in (*paths, *shardings.results, *shardings.body):
            if entries not in known:
                _check_axes(entries, sizes, f"equation {number}", path)
                known.add(entries)
        if (exchange := shardings.exchange) is not None:
            _check_axes((exchange.axes,), sizes, f"the look-up of equation {number}", path)
            if exchange.slots < 1 or not exchange.axes:
                raise FileFormatError(
                    f"`{path}`: a look-up is exchanged over some axes in at least one slot, but that of equation "
                    f"{number} is over {exchange.axes} in {exchange.slots}. Plan again."
                )
        if (pieces := shardings.pieces) is not None:
            _check_axes(((pieces.axis,),), sizes, f"the product in pieces of equation {number}", path)
            if pieces.slot not in (None, 0, 1) or pieces.dim < 0:
                raise FileFormatError(
                    f"`{path}`: a product gathers its operand 0 or 1, or none, along a dimension, but that of equation "
                    f"{number} gathers operand {pieces.slot} along dimension {pieces.dim}. Plan again."
                )
        if not 0 <= number < len(plan.equations):
            raise FileFormatError(
                f"`{path}`: shardings for equation {number}, but there are {len(plan.equations)}. Plan again."
            )


def _check_axes(entries: Any, sizes: dict[str, int], what: str, path: str | os.PathLike[str]) -> None:
    used = [a for e in entries for a in e]
    if len(set(used)) != len(used) or any(a not in sizes for a in used):
        raise FileFormatError(
            f"`{path}`: {what} is sharded as {entries}; each entry must be an axis of {sizes}, used once. Plan again."
        )


def _check_entries(tensor: PlannedTensor, sizes: dict[str, int], path: str | os.PathLike[str]) -> None:
    _check_axes(tensor.entries, sizes, f"`{tensor.name}`", path)
    if len(tensor.entries) != len(tensor.shape):
        raise FileFormatError(
            f"`{path}`: `{tensor.name}` has shape {tensor.shape} but layout {tensor.entries}. Plan again."
        )
    for extent, axes in zip(tensor.shape, tensor.entries, strict=True):
        if extent % math.prod(sizes[a] for a in axes):
            raise FileFormatError(
                f"`{path}`: `{tensor.name}` with shape {tensor.shape} cannot be split as {tensor.entries} on "
                f"{sizes}. Plan again."
            )
