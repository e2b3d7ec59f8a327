"""`autoshard status`."""

import contextlib
import pathlib
import time
from typing import Annotated

import rich.console
import rich.live
import typer

from autoshard.cli.common import Figures, Traceback, errors_shown

EPILOG = (
    "Examples:\n\n"
    "    autoshard status runs/quickstart\n\n"
    "    autoshard status runs/quickstart --once\n\n"
    "    autoshard status runs/quickstart --json status.json --picture run.png\n\n"
    "The state is read from the files of the run, so that it can be shown on every machine that sees the folder, while "
    "the run goes on and afterwards. Whether a process lives is known on its own host only. Ctrl-C ends the display; "
    "the run goes on. With --once, --json or --picture, and where the output is no terminal, the state is shown once."
)

_REFRESH_S = 0.5
"""Often enough to see a restart happen; reading takes a few milliseconds."""


def status(
    folder: Annotated[pathlib.Path, typer.Argument(metavar="DIR", help="The output folder of a run.")],
    once: Annotated[bool, typer.Option("--once", help="Show the state once, and end.")] = False,
    json_file: Figures = None,
    picture: Annotated[
        pathlib.Path | None,
        typer.Option(help="Draw the generations over time and the loss into this .png or .svg file; needs matplotlib."),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Show how a run of `autoshard launch` fares: generation, workers, step, speed, goodput, last events."""
    with errors_shown(traceback):
        from autoshard.files import write_text_atomically
        from autoshard.launch.picture import check_picture, write_picture
        from autoshard.launch.status import ENDED, StatusReader, status_json
        from autoshard.launch.status_display import display, fitted

        if picture is not None:
            check_picture(picture)
        reader, total_steps = StatusReader(folder), _total_steps(folder)
        console = rich.console.Console()
        shown = reader.read()
        if once or json_file or picture or not console.is_terminal or shown.state in ENDED:
            console.print(display(shown, folder, total_steps))
        else:
            with (
                contextlib.suppress(KeyboardInterrupt),
                rich.live.Live(console=console, auto_refresh=False, transient=True) as live,
            ):
                while shown.state not in ENDED:
                    live.update(fitted(console, shown, folder, total_steps), refresh=True)
                    time.sleep(_REFRESH_S)
                    shown = reader.read()
            console.print(display(shown, folder, total_steps))
        if json_file is not None:
            write_text_atomically(json_file, status_json(shown, total_steps))
        if picture is not None:
            write_picture(folder, picture)


def _total_steps(folder: pathlib.Path) -> int | None:
    """The number of the last step, of a run that a configuration describes."""
    from autoshard.errors import AutoshardError
    from autoshard.train.config import load_config

    if not (folder / "config.yaml").exists():
        return None
    try:
        return load_config(folder / "config.yaml").train.steps
    except AutoshardError:
        return None  # of another version; the state can be shown without it
