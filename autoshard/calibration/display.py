"""A calibration on the terminal: a bar while it runs, one message if it is stopped, a table at its end."""

import os

import rich.console
import rich.progress

from autoshard.calibration.partial import side_file
from autoshard.calibration.report import report
from autoshard.calibration.run import CalibrationProgress, calibrate

DISTURBED = 0.2
"""A spread of repeated timings above which the user is warned. On an idle machine it is a few per cent."""


def calibrate_visibly(
    out: str | os.PathLike[str],
    cluster: str | os.PathLike[str] | None,
    quick: bool,
    pairs: bool,
    console: rich.console.Console,
) -> str | None:
    """Calibrates, showing progress on `console`; see `calibrate` for the rest.

    Returns:
      The table of what was measured; None if Ctrl-C stopped it, after a message on `console` that tells how to go on.
    """
    progress = rich.progress.Progress(
        rich.progress.TextColumn("Calibrating"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
        rich.progress.TextColumn("{task.fields[probe]}"),
        console=console,
        transient=True,
    )
    task = progress.add_task("", total=None, probe="")

    def show(now: CalibrationProgress) -> None:
        progress.update(task, total=now.total, completed=now.done, probe=now.probe)

    try:
        with progress:
            made = calibrate(out, cluster=cluster, quick=quick, pairs=pairs, on_progress=show)
    except KeyboardInterrupt:
        console.print(
            f"Stopped. What was timed is in {side_file(out)}; the same command goes on from there.",
            markup=False,
            soft_wrap=True,
        )
        return None
    console.print(f"Wrote {out}.", markup=False, soft_wrap=True)
    rates = made.cluster.groups[0].device_type.measured
    if rates is not None and rates.calibration.spread > DISTURBED:
        console.print(
            f"Repeated timings differ by {rates.calibration.spread:.0%}: something else used the machine. Calibrate "
            "again when it is idle, or do not trust the figures.",
            markup=False,
            soft_wrap=True,
        )
    return report(made)
