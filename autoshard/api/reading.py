"""A saved plan on devices, of either kind."""

import os

from autoshard.api.program import Plan
from autoshard.api.staged import StagedPlan
from autoshard.files import read_json
from autoshard.pipelines.plan.files import pipeline_plan_of_document
from autoshard.plans.files import STAGED_FORMAT, plan_of_document


def load(path: str | os.PathLike[str]) -> Plan | StagedPlan:
    """Reads a plan that `save` wrote, of one program or in stages.

    Raises:
      FileFormatError: The file is not valid JSON, not a plan, of another version, or contradicts itself.
    """
    return plan_of(read_json(path), path)


def plan_of(document: object, path: str | os.PathLike[str]) -> Plan | StagedPlan:
    """The plan of a document as JSON gives it; `path` tells where it stands, for errors.

    Raises:
      FileFormatError: As of `load`.
    """
    if isinstance(document, dict) and document.get("format") == STAGED_FORMAT:
        return StagedPlan.of(pipeline_plan_of_document(document, path))
    return Plan.of(plan_of_document(document, path))
