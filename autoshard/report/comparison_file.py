"""Reads what `autoshard compare --json` writes, for plans of one program and in stages."""

import os
from typing import Literal

import pydantic
from pydantic import BaseModel, ConfigDict, NonNegativeFloat

from autoshard.errors import FileFormatError
from autoshard.files import read_json

PROGRAM_FORMAT, STAGED_FORMAT = "autoshard-comparison", "autoshard-staged-comparison"


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Traffic(_Part):
    """Collectives of one kind: their time in a step, and what a device sends."""

    time_s: NonNegativeFloat
    wire_bytes: NonNegativeFloat


class ComparedPlan(_Part):
    """One contender; figures are None where it has no plan."""

    name: str
    form: str = ""
    fits: bool
    reason: str = ""
    mesh: dict[str, int] = {}
    step_s: NonNegativeFloat | None = None
    relative_step: NonNegativeFloat | None = None
    compute_s: NonNegativeFloat | None = None
    exposed_s: NonNegativeFloat | None = None
    comm_bytes: NonNegativeFloat | None = None
    communication: dict[str, Traffic] = {}
    peak_bytes: NonNegativeFloat | None = None
    memory_bytes: dict[str, NonNegativeFloat] = {}


class ComparisonFile(_Part):
    """A comparison of plans of one program: autoshard's own first."""

    format: Literal["autoshard-comparison"]
    version: Literal[1]
    title: str
    cluster: str
    device: str
    num_devices: int
    limit_bytes: NonNegativeFloat | None
    contenders: tuple[ComparedPlan, ...]


class ComparedForm(_Part):
    """One form of a step in stages."""

    name: str
    step_s: NonNegativeFloat | None
    relative_step: NonNegativeFloat | None
    reason: str = ""


class StagedComparisonFile(_Part):
    """A comparison of forms of a step in stages: the plan's first."""

    format: Literal["autoshard-staged-comparison"]
    version: Literal[1]
    title: str
    cluster: str
    devices: str
    batch_size: int
    bound_s: NonNegativeFloat
    contenders: tuple[ComparedForm, ...]


def read_comparison(path: str | os.PathLike[str]) -> ComparisonFile | StagedComparisonFile:
    """Reads a comparison.

    Raises:
      FileFormatError: The file is not valid JSON, or not a comparison.
    """
    document = read_json(path)
    is_staged = isinstance(document, dict) and document.get("format") == STAGED_FORMAT
    schema = StagedComparisonFile if is_staged else ComparisonFile
    try:
        return schema.model_validate(document)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise FileFormatError(
            f"`{path}` is not the JSON of a comparison: at `{'.'.join(map(str, first['loc']))}`: {first['msg']}. "
            "Compare again, with --json."
        ) from error
