"""`autoshard.load`: a saved plan of any kind."""

import os

from autoshard.api import Plan, StagedPlan
from autoshard.api.reading import plan_of
from autoshard.files import read_json
from autoshard.offloading.files import hosted_of_document
from autoshard.offloading.hosted_plan import HostTablesPlan
from autoshard.plans.files import HOST_TABLES_FORMAT

AnyPlan = Plan | StagedPlan | HostTablesPlan
"""A plan of any kind."""


def load(path: str | os.PathLike[str]) -> AnyPlan:
    """Reads a plan that `save` wrote: of one program, in stages, or with tables in host memory.

    Raises:
      FileFormatError: The file is not valid JSON, not a plan, of another version, or contradicts itself.
    """
    document = read_json(path)
    if isinstance(document, dict) and document.get("format") == HOST_TABLES_FORMAT:
        return HostTablesPlan.of(hosted_of_document(document, path))
    return plan_of(document, path)
