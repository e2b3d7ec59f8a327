"""Jobs files: YAML, version 1.

    format: autoshard-jobs
    version: 1
    jobs:
      - name: gpt                     # each its own; a folder can have it
        config: gpt_350m.yaml         # a training configuration; relative to this file
        overrides: [data.batch_size=64]
        steps: 20000                  # by default train.steps of the configuration
        arrival_s: 0                  # seconds from the start
        weight: 1                     # how much the job counts
        deadline_s: 86400             # seconds from the start; by default none
        least_devices: 1
        most_devices: 16              # by default all of the cluster
        elastic: true                 # its devices may change while it runs
        preemptible: true             # it may be stopped, and go on later
        request: 8                    # devices for policies that fix sizes; by default most_devices
        groups: [v100, p100]          # node groups that it may use; by default all
        cuts_nodes: false             # also equal parts of several nodes
        mixed: false                  # also whole groups together, in pipeline stages
        move_s: 60                    # time without steps where its devices change
        footprints: [v100:4, v100:8]  # what is tried, instead of the usual sizes
        interpolate: false            # plan only the least and the most on each kind of nodes; the rest lies between
        most_device_hours: 1          # jobs of a trace with at most so much device time are taken for this one

A job may have `rates` (steps in a second, such as measured ones) or `problems` (files of `autoshard plan
--problem-only`, whose solved cost is the time of a step) for each footprint; then nothing is planned for it. Without
`config` it must have `steps`, and can be decided about, but not run:

        rates: {v100:1: 2.1, v100:2: 4.0, p100:1: 1.3}
        problems: {v100:8: v100x8.npz}

A footprint is written GROUP:DEVICES within one node, GROUP:NODESxDEVICES over nodes, and joined by `+` over groups.
"""

import pathlib
from typing import Any

import pydantic

from autoshard.cluster.schema import Number, Schema, Text, Whole, broken_rule
from autoshard.errors import FileFormatError
from autoshard.files import read_yaml

FORMAT, VERSION = "autoshard-jobs", 1


class JobEntry(Schema):
    """A job of the file; the module tells what each key means."""

    name: Text
    config: Text | None = None
    overrides: list[Text] = []
    rates: dict[str, Number | Whole] | None = None
    problems: dict[str, Text] | None = None
    steps: Whole | None = None
    arrival_s: Number | Whole = 0
    weight: Number | Whole = 1
    deadline_s: Number | Whole | None = None
    least_devices: Whole = 1
    most_devices: Whole | None = None
    elastic: bool = True
    preemptible: bool = True
    request: Whole | None = None
    groups: list[Text] | None = None
    cuts_nodes: bool = False
    mixed: bool = False
    move_s: Number | Whole = 60
    footprints: list[Text] | None = None
    interpolate: bool = False
    most_device_hours: Number | Whole | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> "JobEntry":
        if self.config is None and self.rates is None and self.problems is None:
            raise broken_rule("must have config, or rates or problems, which tell how fast the job runs.")
        if self.config is None and self.steps is None:
            raise broken_rule("must have steps, since no configuration tells them.")
        if self.name in ("", ".", "..") or not all(c.isprintable() and c not in "/\\" for c in self.name):
            raise broken_rule(
                f"must have a name that a folder can have, printable and without slashes; received {self.name!r:.80}."
            )
        least, most = self.least_devices, self.most_devices
        if least < 1 or (most is not None and most < least):
            raise broken_rule(f"must have 1 <= least_devices <= most_devices; received {least} and {most}.")
        for name in ("move_s", "arrival_s"):
            if getattr(self, name) < 0:
                raise broken_rule(f"must have a {name} of 0 or more; received {getattr(self, name)}. Correct it.")
        for name in ("weight", "steps", "deadline_s", "request", "most_device_hours"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise broken_rule(f"must have {name} above 0; received {value}. Correct it, or leave {name} out.")
        if self.deadline_s is not None and self.deadline_s <= self.arrival_s:
            raise broken_rule(
                f"must have a deadline_s after its arrival_s, both from the start; received {self.deadline_s} and "
                f"{self.arrival_s}."
            )
        return self


class JobsFile(Schema):
    """A jobs file."""

    format: Text
    version: Whole
    jobs: list[JobEntry]

    @pydantic.model_validator(mode="after")
    def _check(self) -> "JobsFile":
        names = [job.name for job in self.jobs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if not names or twice:
            raise broken_rule(f"must have jobs of different names; received {', '.join(twice) or 'none'}.")
        return self


def read_jobs_file(path: pathlib.Path) -> JobsFile:
    """Reads a jobs file; paths in it become relative to the working directory.

    Raises:
        FileFormatError: it cannot be read, or does not follow the schema.
    """
    data: Any = read_yaml(path)
    if isinstance(data, dict) and (data.get("format"), data.get("version")) != (FORMAT, VERSION):
        raise FileFormatError(
            f"{path} must begin with `format: {FORMAT}` and `version: {VERSION}`; received {data.get('format')!r:.40} "
            f"and {data.get('version')!r:.40}. Add them, and a list `jobs`."
        )
    read = JobsFile.read(data, str(path))
    return read.model_copy(update={"jobs": [_anchored(job, path.parent) for job in read.jobs]})


def _anchored(job: JobEntry, folder: pathlib.Path) -> JobEntry:
    problems = None if job.problems is None else {at: str(folder / file) for at, file in job.problems.items()}
    return job.model_copy(
        update={"config": None if job.config is None else str(folder / job.config), "problems": problems}
    )
