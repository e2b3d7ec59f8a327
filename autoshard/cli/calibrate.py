"""`autoshard calibrate`."""

import pathlib
from typing import Annotated

import rich.console
import typer

from autoshard.cli.common import INTERRUPTED, Devices, Traceback, errors_shown, use_cpu_devices

EPILOG = (
    "Examples:\n\n"
    "    autoshard calibrate --devices 8 --out cluster.yaml\n\n"
    "    autoshard calibrate --quick --out cluster.yaml\n\n"
    "    autoshard plan configs/gpt_tiny.yaml --cluster cluster.yaml\n\n"
    "What is measured, with all devices busy at once: matrix products by type and size, memory, elementwise "
    "arithmetic, the launch of a kernel, and each kind of collective among 2, 4, ... devices by size. The machine "
    "should have nothing else to do. Plans for the file that is written use these figures.\n\n"
    "Timings are kept beside the file while they are made: after Ctrl-C (or a crash), the same command goes on "
    "from there. A file that is there already is replaced when all is done."
)


def calibrate(
    out: Annotated[pathlib.Path, typer.Option(help="The cluster file to write.")] = pathlib.Path("cluster.yaml"),
    cluster: Annotated[
        pathlib.Path | None,
        typer.Option(help="Describe the devices by this cluster file, where the catalogue does not know them."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repetitions: sooner, and less sure.")] = False,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Also measure every pair of devices, so that plans decide which is where.")
    ] = False,
    devices: Devices = None,
    traceback: Traceback = False,
) -> None:
    """Measure the live devices, and write a cluster file with what they really do.

    Takes minutes; how many depends on how busy the machine is, and it should not be.
    """
    with errors_shown(traceback):
        use_cpu_devices(devices)
        from autoshard.calibration.display import calibrate_visibly

        table = calibrate_visibly(out, cluster, quick, pairs, rich.console.Console(stderr=True))
        if table is None:
            raise typer.Exit(INTERRUPTED)
        typer.echo(table, nl=False)
