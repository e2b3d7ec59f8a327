"""`autoshard diff`."""

import pathlib
from typing import Annotated

import rich.console
import typer

from autoshard.cli.common import Traceback, errors_shown

EPILOG = (
    "Examples:\n\n"
    "    autoshard diff before.json after.json\n\n"
    "    autoshard diff before.json after.json --json changes.json\n\n"
    "Every figure is B less A. Layers fold together: `*` stands for their numbers, {mu,nu} for paths that changed "
    "alike. What an argument's own collectives and memory cost stands beside it; every other collective stands "
    "under the operation and line that makes its tensor, such as the product that makes a gradient. The figures "
    "add up to the difference of the step times. Plans on different meshes or clusters are compared by what each "
    "device holds, not by the names of axes.\n\n"
    "Of two plans in stages it shows which pipelines, stages, meshes, shares and schedules differ, which parameters "
    "live elsewhere, and for each stage with the same layers what differs in its program."
)


def diff(
    a: Annotated[pathlib.Path, typer.Argument(metavar="A", help="A saved plan.")],
    b: Annotated[pathlib.Path, typer.Argument(metavar="B", help="Another.")],
    json_file: Annotated[pathlib.Path | None, typer.Option("--json", help="Write the difference to this file.")] = None,
    traceback: Traceback = False,
) -> None:
    """Show what differs between two saved plans, and what each difference costs."""
    with errors_shown(traceback):
        from autoshard.files import write_text_atomically
        from autoshard.offloading.reading import load
        from autoshard.printing import PAGE_WIDTH

        found = load(a).diff(load(b))
        typer.echo(found.text(max(PAGE_WIDTH, rich.console.Console().width)))
        if json_file is not None:
            write_text_atomically(json_file, found.json() + "\n")
