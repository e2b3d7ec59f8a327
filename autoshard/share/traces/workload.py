"""From the jobs of a trace to jobs that can be shared out: each gets the rates of one of ours.

A trace tells how long a job ran on how many devices, and not what it was. So each of its jobs is taken to be one of the
models that are given, with as many steps as this model takes in that time on that many devices of the slowest kind that
holds it: small jobs small models, large jobs large ones, in the order of device time.
"""

import bisect
import dataclasses
from collections.abc import Sequence

from autoshard.errors import ShareError
from autoshard.share.situation import Job
from autoshard.share.traces.record import TraceJob


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """A model that jobs of a trace are taken for.

    Attributes:
        job: with rates; steps, arrival and request are those of the trace.
        most_device_hours: jobs of the trace with at most so much device time are taken for it.
    """

    job: Job
    most_device_hours: float


def workload(trace: Sequence[TraceJob], templates: Sequence[Template]) -> tuple[Job, ...]:
    """Jobs with the arrivals, sizes and durations of a trace.

    Args:
        trace: what somebody ran.
        templates: models, in the order of `most_device_hours`; larger jobs than the last one's are taken for it, too.

    Raises:
        ShareError: there is no template.
    """
    if not templates:
        raise ShareError("Jobs of a trace are taken for jobs of a jobs file; received none. Name at least one there.")
    limits = [template.most_device_hours for template in templates]
    jobs = []
    for one in trace:
        place = bisect.bisect_left(limits, one.num_devices * one.duration_s / 3600)
        template = templates[min(place, len(templates) - 1)].job
        asked = dataclasses.replace(template, request=one.num_devices)
        fitting = [r for r in template.rates.entries if r.footprint.num_devices == asked.requested]
        slowest = min(rate.steps_per_s for rate in fitting)
        deadline_s = None if template.deadline_s is None else one.arrival_s + template.deadline_s
        jobs.append(
            dataclasses.replace(
                asked,
                name=one.name,
                arrival_s=one.arrival_s,
                steps=slowest * one.duration_s * one.num_devices / asked.requested,
                deadline_s=deadline_s,
            )
        )
    return tuple(jobs)
