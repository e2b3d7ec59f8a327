"""Reader of traces in CSV: SenseTime's Helios, and our own short form.

Helios (github.com/S-Lab-System-Group/HeliosData, CC-BY-4.0; Hu et al., SC 2021) has in `cluster_log.csv`

    job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue

with `duration` in seconds, `state` as Slurm calls it, and times as `2020-04-01 00:12:03`. Of ours, only

    name,arrival_s,num_devices,duration_s

are needed. Jobs without devices or duration are left out.
"""

import csv
import datetime
import pathlib
from collections.abc import Iterable

import pydantic

from autoshard.errors import ShareError
from autoshard.share.traces.record import Ending, TraceJob, from_first

COLUMNS = ("name", "arrival_s", "num_devices", "duration_s")


class _HeliosRow(pydantic.BaseModel):
    job_id: str
    gpu_num: int
    state: str
    submit_time: datetime.datetime
    duration: pydantic.FiniteFloat

    def job(self) -> TraceJob:
        arrival_s = self.submit_time.replace(tzinfo=datetime.UTC).timestamp()
        state = self.state.upper()
        if state.startswith("CANCEL"):
            ending = Ending.KILLED
        else:
            ending = Ending.DONE if state == "COMPLETED" else Ending.FAILED
        return TraceJob(self.job_id, arrival_s, self.gpu_num, self.duration, ending)


class _OwnRow(pydantic.BaseModel):
    name: str
    arrival_s: pydantic.FiniteFloat
    num_devices: int
    duration_s: pydantic.FiniteFloat

    def job(self) -> TraceJob:
        return TraceJob(self.name, self.arrival_s, self.num_devices, self.duration_s)


def read_table(path: pathlib.Path) -> tuple[TraceJob, ...]:
    """The jobs of a CSV file in either form, by arrival.

    Raises:
        ShareError: the file cannot be read, or has other columns.
    """
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            kind = next((k for k in (_HeliosRow, _OwnRow) if set(k.model_fields) <= set(reader.fieldnames or ())), None)
            if kind is None:
                raise ShareError(
                    f"{path}: a trace has the columns {', '.join(COLUMNS)}, or those of Helios; received "
                    f"{', '.join(reader.fieldnames or ()) or 'none'}. Name the columns in the first line."
                )
            jobs = []
            for row in reader:
                try:
                    jobs.append(kind.model_validate(row).job())
                except pydantic.ValidationError as error:
                    fault = error.errors()[0]
                    rule = fault["msg"].removeprefix("Input should ").partition(", ")[0]
                    raise ShareError(
                        f"{path}, line {reader.line_num}: {fault['loc'][0]} must {rule}; received "
                        f"{fault['input']!r:.60}. Correct the line."
                    ) from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ShareError(f"{path}: the trace cannot be read: {error}. Check the path.") from error
    return from_first(job for job in jobs if job.num_devices > 0 and job.duration_s > 0)


def write_table(path: pathlib.Path, jobs: Iterable[TraceJob]) -> None:
    """Writes jobs in our own form."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows((job.name, job.arrival_s, job.num_devices, job.duration_s) for job in jobs)
