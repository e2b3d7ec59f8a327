"""Reader of `cluster_job_log` of Microsoft's Philly traces (github.com/msr-fiddle/philly-traces; Jeon et al., ATC'19).

A JSON list of jobs, each with `jobid`, `status` (Pass, Killed, Failed), `submitted_time`, and `attempts`: a list of
`start_time`, `end_time` and `detail`, the machines with their GPUs. Times are local, written `2017-10-07 01:11:39`.
"""

import datetime
import pathlib
from typing import Literal

import pydantic

from autoshard.errors import ShareError
from autoshard.share.traces.record import Ending, TraceJob, from_first


class _Machine(pydantic.BaseModel):
    ip: str
    gpus: list[str]


class _Attempt(pydantic.BaseModel):
    start_time: datetime.datetime | None = None
    end_time: datetime.datetime | None = None
    detail: list[_Machine] = []

    @property
    def seconds(self) -> float:
        if self.start_time is None or self.end_time is None:
            return 0.0
        return max((self.end_time - self.start_time).total_seconds(), 0.0)

    @property
    def num_gpus(self) -> int:
        return sum(len(machine.gpus) for machine in self.detail)


class _Job(pydantic.BaseModel):
    jobid: str
    status: Literal["Pass", "Killed", "Failed"]
    submitted_time: datetime.datetime
    attempts: list[_Attempt] = []


_JOBS = pydantic.TypeAdapter(list[_Job])
_ENDINGS = {"Pass": Ending.DONE, "Killed": Ending.KILLED, "Failed": Ending.FAILED}


def _reason(error: OSError | ValueError) -> str:
    """Why a log cannot be read, in a line."""
    if isinstance(error, pydantic.ValidationError):
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"])) or "the file"
        return f"{place}: {fault['msg'].removeprefix('Input ')}; received {fault['input']!r:.60}"
    return " ".join(str(error).split())


def read_philly(path: pathlib.Path) -> tuple[TraceJob, ...]:
    """The jobs that ran on GPUs for some time, by submission.

    Raises:
        ShareError: the file cannot be read, or is no such log.
    """
    try:
        text = path.read_text().replace('"None"', "null")  # times of attempts that never ended
        jobs = _JOBS.validate_json(text)
    except (OSError, ValueError) as error:
        reason = _reason(error)
        raise ShareError(
            f"{path}: this is no cluster_job_log of the Philly traces: {reason:.300}. Take the file from philly-traces."
        ) from error
    found = []
    for job in jobs:
        gpus = max((attempt.num_gpus for attempt in job.attempts), default=0)
        seconds = sum(attempt.seconds for attempt in job.attempts)
        if gpus and seconds:
            arrival_s = job.submitted_time.replace(tzinfo=datetime.UTC).timestamp()
            found.append(TraceJob(job.jobid, arrival_s, gpus, seconds, _ENDINGS[job.status]))
    return from_first(found)
