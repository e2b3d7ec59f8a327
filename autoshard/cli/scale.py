"""`autoshard scale`."""

import pathlib
from typing import Annotated

import typer

from autoshard.cli.common import Traceback, errors_shown
from autoshard.errors import ElasticError

EPILOG = (
    "Example:\n\n    autoshard scale runs/quickstart --workers 3\n\n"
    "The run is saved first, so that no step is lost, and goes on with that many workers: at most its MAX, and below "
    "its MIN if you ask for so few."
)


def scale(
    run_dir: Annotated[pathlib.Path, typer.Argument(metavar="DIR", help="The output folder of a supervised run.")],
    workers: Annotated[int, typer.Option(min=1, help="Workers to go on with.")],
    traceback: Traceback = False,
) -> None:
    """Change the number of workers of a run that `autoshard launch` supervises."""
    with errors_shown(traceback):
        from autoshard.launch.events import SupervisorStarted, read_events
        from autoshard.launch.requests import ScaleRequest, write_scale_request
        from autoshard.launch.run_lock import holder_of

        started = [event for event in read_events(run_dir) if isinstance(event, SupervisorStarted)]
        holder = holder_of(run_dir)  # of a run without supervisor, the process that trains
        if holder is None or not started or started[-1].pid != holder:
            raise ElasticError(f"{run_dir}: nobody supervises a run here. Start it with `autoshard launch`.")
        if workers > started[-1].most_workers:
            raise ElasticError(
                f"--workers: at most {started[-1].most_workers}, with which the run was launched; received {workers}. "
                "Stop it, and launch it with a larger MAX."
            )
        write_scale_request(run_dir, ScaleRequest(workers=workers))
        asked = "1 worker" if workers == 1 else f"{workers} workers"
        typer.echo(f"Asked for {asked}; `autoshard status {run_dir}` shows when the run has so many.")
