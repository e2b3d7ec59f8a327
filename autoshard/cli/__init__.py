"""The `autoshard` command: plan and train a configuration, explain, compare and verify plans, solve a problem file."""

import os
import pathlib
import time

import typer

from autoshard.cli import (
    calibrate,
    check,
    clicks,
    compare,
    diff,
    explain,
    export,
    launch,
    plan,
    report,
    scale,
    share,
    solve,
    status,
    tables,
    train,
    verify,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Chooses how a JAX training step is split over a cluster, shows why, and runs it.",
    epilog=(
        "Start here, on any machine, with eight CPU devices:\n\n    autoshard train configs/quickstart.yaml --devices 8"
    ),
)
for command in (
    train,
    launch,
    status,
    scale,
    share,
    check,
    plan,
    tables,
    explain,
    report,
    compare,
    verify,
    diff,
    export,
    calibrate,
    clicks,
    solve,
):
    app.command(epilog=command.EPILOG)(getattr(command, command.__name__.rpartition(".")[2]))


def main() -> None:
    """Runs the command line; time limits count from the start of the process."""
    app(obj=time.perf_counter() - _process_age_s())


def _process_age_s() -> float:
    """Seconds since this process was started; 0 where the system does not tell."""
    try:
        stat = pathlib.Path("/proc/self/stat").read_text()
        ticks = int(stat.rpartition(")")[2].split()[19])  # field 22: start, in clock ticks since boot
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, AttributeError, IndexError):
        return 0.0
