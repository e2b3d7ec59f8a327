"""`autoshard verify`."""

import pathlib
from typing import Annotated

import rich.console
import typer

from autoshard.cli.common import Figures, SavedPlan, Traceback, errors_shown

EPILOG = (
    "Examples:\n\n"
    "    autoshard verify plan.json\n\n"
    "    autoshard verify plan.json --target h100 --target tpu-v5e --json verified.json\n\n"
    "    autoshard verify runs/quickstart/plan.json --target cpu --time-limit 300\n\n"
    "No device is needed: XLA's own compilers run without them. For GPUs, pip install 'autoshard\\[verify-gpu]'; for "
    "TPUs, pip install 'autoshard\\[verify-tpu]'; cpu always works. Of a plan in stages every program is verified, "
    "for its own kind of device or for --target; of one with tables in host memory, the step over the rows of a "
    "batch.\n\n"
    "The exit status is 0 if every target confirms the prediction: over each set of mesh axes, traffic within 5 % "
    "of all that is sent, and no more than 3 % more memory than predicted; 1 if one does not; 2 if one cannot be "
    "verified."
)


def verify(
    plan: SavedPlan,
    config: Annotated[
        pathlib.Path | None,
        typer.Option(help="The configuration that the plan was made from; by default the one that it carries."),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Compile for these devices: h100, a100-40, tpu-v5e, cpu, ...; repeatable."),
    ] = None,
    json_file: Figures = None,
    time_limit: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds that the verification for each target may take.")
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Compile a saved plan without its devices, and show what the compiler made of it beside what was predicted."""
    with errors_shown(traceback):
        from autoshard.train.verify import verify_visibly

        found = verify_visibly(plan, config, target or [], time_limit, json_file, rich.console.Console(stderr=True))
        if found.exit_status:
            raise typer.Exit(found.exit_status)
