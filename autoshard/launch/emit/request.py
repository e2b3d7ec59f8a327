"""What a job file is made from."""

import dataclasses
import re

from autoshard.errors import ConfigError

MAX_NAME = 40
"""Kubernetes makes host names of 63 characters at most from a job's name, a role, and two numbers."""

NOTICE_S = 120
"""Time that workers have to save and end before they are killed."""

FINAL_STATUS = 2
"""Exit status of `autoshard train` for an error that would come again, as of the configuration."""

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


@dataclasses.dataclass(frozen=True, slots=True)
class JobRequest:
    """A run as a job of a cluster, with one worker on each node.

    Attributes:
        name: of the job: lower-case letters, digits and hyphens.
        arguments: a worker's command line, as on its node, without the overrides that a job adds.
        output_dir: the run's output folder, as on the nodes, which share it.
        least_workers, most_workers: the run's size.
        gpus_per_worker: GPUs that a worker takes of its node; 0 for none.
        cpus_per_worker: CPUs that it takes; None for what the cluster gives.
        max_restarts: restarts after which a run that fails again has failed.
        config_text: the configuration as YAML; where the node has no file of it.
        image: container image with autoshard; for Kubernetes.
    """

    name: str
    arguments: tuple[str, ...]
    output_dir: str
    least_workers: int
    most_workers: int
    gpus_per_worker: int = 0
    cpus_per_worker: int | None = None
    max_restarts: int = 100
    config_text: str = ""
    image: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for what no job file can say."""
        if len(self.name) > MAX_NAME or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"A job's name has at most {MAX_NAME} lower-case letters, digits and hyphens, a letter first; received "
                f"{self.name!r:.80}. Use `job_name`."
            )
        if not 1 <= self.least_workers <= self.most_workers:
            raise ConfigError(
                f"A job has 1 <= MIN <= MAX workers; received {self.least_workers} to {self.most_workers}."
            )
        for text in (*self.arguments, self.output_dir, self.image or ""):
            if not text.isprintable():
                raise ConfigError(f"A job file holds printable text only; received {text!r:.100}. Use another name.")


def job_name(text: str) -> str:
    """The nearest name that a job may have; `autoshard` if nothing of `text` is left."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")[:MAX_NAME].strip("-")
    return name or "autoshard"
