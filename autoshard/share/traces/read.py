"""A trace, in whichever form."""

import pathlib

from autoshard.share.traces.philly import read_philly
from autoshard.share.traces.record import TraceJob
from autoshard.share.traces.table import read_table


def read_trace(path: pathlib.Path) -> tuple[TraceJob, ...]:
    """Jobs of a trace: JSON of Philly, CSV of Helios, or CSV of ours.

    Raises:
        ShareError: the file is none of these.
    """
    return read_philly(path) if path.suffix == ".json" else read_table(path)
