"""What `autoshard explain` does: a saved plan of either kind as text, the timeline of one in stages as a picture."""

import os
import pathlib

from autoshard.errors import ConfigError
from autoshard.files import write_text_atomically
from autoshard.pipeline.plan.files import read_any_plan
from autoshard.pipeline.plan.staged_plan import StagedPlan
from autoshard.pipeline.schedule.picture import timeline_html, timeline_png
from autoshard.pipeline.schedule.table import timeline_text
from autoshard.plans.plan import Plan


def explain_file(
    path: str | os.PathLike[str], program: int | None = None, timeline: str | os.PathLike[str] | None = None
) -> str:
    """The text of a saved plan.

    Args:
      path: The plan.
      program: Number of a program of a plan in stages, to explain that alone.
      timeline: Where to draw the timeline of a plan in stages: an .html or .png file.

    Raises:
      FileFormatError: It is no plan.
      ConfigError: It has no such program or no timeline; or the name of the picture has another ending.
      MissingExtraError: A PNG needs matplotlib, which is not installed.
    """
    plan = read_any_plan(path)
    if isinstance(plan, Plan):
        asked = [name for name, value in (("--program", program), ("--timeline", timeline)) if value is not None]
        if asked:
            raise ConfigError(
                f"{' and '.join(asked)}: only plans in stages have several programs and a timeline; {path} is a plan "
                "of one program. Leave it out."
            )
        return plan.explain()
    text = plan.explain() if program is None else _program(plan, program, path).explain()
    if timeline is not None:
        text += "\n" + timeline_text(plan.timeline)
        _draw(plan, pathlib.Path(timeline))
    return text


def _program(plan: StagedPlan, number: int, path: str | os.PathLike[str]) -> Plan:
    if not 0 <= number < len(plan.programs):
        raise ConfigError(
            f"--program: {path} has the programs 0 to {len(plan.programs) - 1}; received {number}. Choose one of them."
        )
    return plan.programs[number]


def _draw(plan: StagedPlan, path: pathlib.Path) -> None:
    title = f"Step on cluster {plan.cluster}, as planned"
    if path.suffix.lower() == ".html":
        write_text_atomically(path, timeline_html(plan.timeline, title))
    elif path.suffix.lower() == ".png":
        timeline_png(plan.timeline, path, title)
    else:
        raise ConfigError(f"--timeline: the file must end in .html or .png; received {path}. Rename it.")
