"""`autoshard explain`."""

import pathlib
from typing import Annotated

import typer

from autoshard.cli.common import SavedPlan, Traceback, errors_shown

EPILOG = (
    "Examples:\n\n"
    "    autoshard explain runs/quickstart/plan.json\n\n"
    "    autoshard explain runs/quickstart/plan.json --full | less\n\n"
    "    autoshard explain staged.json --timeline step.html\n\n"
    "    autoshard explain staged.json --program 0\n\n"
    "A plan in stages, as it is made for clusters with several kinds of devices, is told as a whole: slices, "
    "pipelines, stages; with --full, what crosses between them and how stages are split. --program tells one of its "
    "stages as any plan is told. `autoshard report` makes a page to look at instead."
)


def explain(
    plan: SavedPlan,
    timeline: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="Draw the step of a plan in stages into this .html or .png file."),
    ] = None,
    program: Annotated[
        int | None, typer.Option(metavar="N", help="Explain only this program of a plan in stages.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Tell everything, not only what fits on a screen.")] = False,
    traceback: Traceback = False,
) -> None:
    """Explain a saved plan on one screen: what it decides, what it costs, and why."""
    with errors_shown(traceback):
        from autoshard.offloading.reading import load

        found = load(plan)
        drawn = None if timeline is None else found.draw_timeline(timeline)
        typer.echo(found.explain(program, full))
        if drawn is not None:
            typer.echo(drawn)
