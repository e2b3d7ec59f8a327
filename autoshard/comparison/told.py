"""Progress of a comparison names the contender that is planned."""

import dataclasses

from autoshard.plans.options import PlanOptions, PlanProgress
from autoshard.strategies.make import Settings


def told(settings: Settings, name: str) -> Settings:
    """Settings of a contender.

    Args:
      settings: Of all contenders. name: The contender.
    """
    options = settings.get("options") or PlanOptions()
    tell = options.on_progress
    if tell is None:
        return settings

    def named(progress: PlanProgress) -> None:
        tell(dataclasses.replace(progress, stage=f"{name}, {progress.stage}"))

    return {**settings, "options": dataclasses.replace(options, on_progress=named)}
