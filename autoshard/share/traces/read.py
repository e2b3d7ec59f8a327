"""A trace, in whichever form."""

import collections
import pathlib

from autoshard.errors import ShareError
from autoshard.share.traces.philly import read_philly
from autoshard.share.traces.record import TraceJob
from autoshard.share.traces.table import read_table


def read_trace(path: pathlib.Path) -> tuple[TraceJob, ...]:
    """Jobs of a trace: JSON of Philly, CSV of Helios, or CSV of ours.

    Raises:
        ShareError: the file is none of these, no job in it ran, or two have the same name.
    """
    jobs = read_philly(path) if path.suffix == ".json" else read_table(path)
    if not jobs:
        raise ShareError(f"{path}: a trace has at least one job that ran on devices for some time; received none.")
    name, times = collections.Counter(job.name for job in jobs).most_common(1)[0]
    if times > 1:
        raise ShareError(
            f"{path}: jobs of a trace have different names; {name!r:.60} is there {times} times. Rename them."
        )
    return jobs
