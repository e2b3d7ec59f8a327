"""Progress of a comparison names the contender that is planned."""

import dataclasses

from autoshard.plans.options import PlanOptions, PlanProgress
from autoshard.strategies.make import Settings


def told(settings: Settings, options: PlanOptions, name: str) -> Settings:
    """Settings of a contender.

    Args:
      settings: Of all contenders. options: As for `plan`. name: The contender.
    """
    tell = options.on_progress
    if tell is None:
        return {**settings, "options": options}

    def named(progress: PlanProgress) -> None:
        tell(dataclasses.replace(progress, stage=f"{name}, {progress.stage}"))

    return {**settings, "options": dataclasses.replace(options, on_progress=named)}
