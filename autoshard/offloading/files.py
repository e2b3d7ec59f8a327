"""Files of plans with tables in host memory: versioned JSON, never pickle, checked before it is believed.

The plan of the step over rows stands in it as in a file of its own.
"""

import dataclasses
import json
import os
from typing import Any, Literal

import jax
import pydantic

from autoshard.errors import ConfigError, FileFormatError
from autoshard.files import write_text_atomically
from autoshard.garbage import collection_paused
from autoshard.offloading.placement import TablePlacement
from autoshard.plans.files import HOST_TABLES_FORMAT, checked_document, plan_document, plan_of_document
from autoshard.plans.program_plan import ProgramPlan

VERSION = 2
"""Changes whenever a file written before could be misread."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostedData:
    """What such a file holds; see `HostTablesPlan` for the fields."""

    placed: TablePlacement
    over_rows: ProgramPlan
    update: str
    lazy: bool
    on_devices_s: float | None


class _Document(pydantic.BaseModel):
    """The file's schema."""

    model_config = pydantic.ConfigDict(extra="forbid", ser_json_inf_nan="strings", allow_inf_nan=True)

    format: Literal[HOST_TABLES_FORMAT]  # pyright: ignore[reportInvalidTypeForm]: a constant
    version: Literal[VERSION]  # pyright: ignore[reportInvalidTypeForm]: a constant
    jax_version: str
    placed: TablePlacement
    over_rows: dict[str, Any]
    update: str
    lazy: bool
    on_devices_s: float | None


def write_hosted(data: HostedData, path: str | os.PathLike[str]) -> None:
    """Writes a plan to `path`."""
    document = _Document.model_construct(
        format=HOST_TABLES_FORMAT,
        version=VERSION,
        jax_version=jax.__version__,
        placed=data.placed,
        over_rows=json.loads(plan_document(data.over_rows).model_dump_json()),
        update=data.update,
        lazy=data.lazy,
        on_devices_s=data.on_devices_s,
    )
    write_text_atomically(path, document.model_dump_json())


@collection_paused()
def hosted_of_document(raw: Any, path: str | os.PathLike[str]) -> HostedData:
    """The plan of a document as JSON gives it.

    Args:
      raw: The document. path: Where it stands, for errors.

    Raises:
      FileFormatError: It is not a plan with tables in host memory, of another version, or contradicts itself.
    """
    if not isinstance(raw, dict) or raw.get("format") != HOST_TABLES_FORMAT:
        raise FileFormatError(
            f'`{path}` is not a plan with tables in host memory: it lacks `"format": "{HOST_TABLES_FORMAT}"`. '
            "`autoshard.load` reads any plan."
        )
    if raw.get("version") != VERSION:
        raise FileFormatError(
            f"`{path}` is a plan with tables in host memory of version {raw.get('version')!r}, but this autoshard "
            f"reads version {VERSION}. Plan again."
        )
    try:
        document: Any = checked_document(_Document, raw, path)
    except ConfigError as error:
        raise FileFormatError(f"`{path}` is not a valid plan: {error} Plan again.") from error
    placed: TablePlacement = document.placed
    if len(placed.best.choices) != len(placed.situation.tables) or not placed.host_tables:
        raise FileFormatError(f"`{path}`: each table has one place, and some are in host memory. Plan again.")
    over_rows = plan_of_document(document.over_rows, f"{path}, the step over rows")
    return HostedData(placed, over_rows, document.update, document.lazy, document.on_devices_s)
