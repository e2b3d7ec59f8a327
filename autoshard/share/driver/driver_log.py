"""What the driver did, `share_events.jsonl` in its folder: one JSON object on each line."""

import json
import pathlib
import time
from collections.abc import Iterator
from typing import Literal

import pydantic
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt

EVENTS = "share_events.jsonl"

Kind = Literal[
    "driver_started",
    "job_arrived",
    "nodes_changed",
    "decided",
    "job_started",
    "job_scaled",
    "job_stopping",
    "job_stopped",
    "job_died",
    "job_failed",
    "job_finished",
    "driver_ended",
]


class DriverEvent(BaseModel):
    """Something that the driver saw or did.

    Attributes:
        time: seconds since 1970.
        kind: what.
        job: of which job; empty where it is of none.
        workers: that the job is to have, or all nodes there are.
        step: the newest step that the job has saved.
        detail: in words.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    time: NonNegativeFloat
    kind: Kind
    job: str = ""
    workers: NonNegativeInt = 0
    step: NonNegativeInt = 0
    detail: str = ""

    def __str__(self) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(self.time))
        workers = f", {self.workers} worker{'s' * (self.workers != 1)}" if self.workers and self.job else ""
        step = f", step {self.step}" if self.step else ""
        subject = f"{self.job}: {self.kind.removeprefix('job_')}" if self.job else self.kind.replace("_", " ")
        return f"{clock}  {subject}{workers}{step}{': ' if self.detail else ''}{self.detail}"


class DriverLog:
    """Appends to the log of a driver."""

    def __init__(self, folder: pathlib.Path):
        """Opens the log in `folder`, which must be there."""
        self._path = folder / EVENTS

    def write(self, event: DriverEvent) -> None:
        """Adds one event."""
        with self._path.open("ab", buffering=0) as file:
            file.write(event.model_dump_json().encode() + b"\n")


def read_driver_events(folder: pathlib.Path) -> Iterator[DriverEvent]:
    """The events of a driver, oldest first; a line that was cut short is left out."""
    path = folder / EVENTS
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield DriverEvent.model_validate(json.loads(line))
        except (ValueError, pydantic.ValidationError):
            continue
