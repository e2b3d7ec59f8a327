"""What `autoshard launch --emit` prints."""

import json
import pathlib
import sys
from typing import Any

from autoshard.errors import ConfigError
from autoshard.files import yaml_text
from autoshard.launch.emit.emit import JobKind, emit
from autoshard.launch.emit.kubernetes import CONFIG_FILE
from autoshard.launch.emit.request import JobRequest, job_name
from autoshard.train.cluster_devices import check_devices

POD_OUTPUT_DIR = "/output"
"""The run's output folder in a pod, where the volume is."""


def job_file(
    kind: JobKind,
    config: pathlib.Path,
    overrides: list[str] | None,
    settings: Any,
    sizes: tuple[int, int],
    devices_per_worker: int | None,
    gpus_per_worker: int | None,
    max_restarts: int,
    image: str | None,
) -> str:
    """The job file of a run, with one worker on each node.

    Args:
        kind: for which cluster.
        config, overrides: the configuration as the user named it.
        settings: the same as read.
        sizes: the least and the most workers.
        devices_per_worker: CPU devices of each; each takes a CPU.
        gpus_per_worker: GPUs of each.
        max_restarts: restarts after failures, at most.
        image: the container image.

    Raises:
        ConfigError: it is not told what a worker takes, the run would keep nothing to continue from, or the workers
            are not those of its cluster file.
    """
    if (devices_per_worker is None) == (gpus_per_worker is None):
        raise ConfigError(
            "--emit: a job asks for what its workers take; give --gpus-per-worker, or --devices-per-worker to train on "
            "CPU devices."
        )
    if kind == "slurm" and image is not None:
        raise ConfigError(
            f"--image: is for --emit kubernetes, and Slurm's workers use this Python environment; received {image!r}. "
            "Leave it out."
        )
    if settings.train.checkpoint_every is None:
        raise ConfigError(
            "--emit: a job continues from checkpoints when it is started again, and train.checkpoint_every is null, so "
            "that it would begin anew. Add the override train.checkpoint_every=100, say."
        )
    if kind == "slurm" or pathlib.Path(settings.plan.cluster or "").is_file():  # else it is in the image only
        each = devices_per_worker or gpus_per_worker or 0
        check_devices(settings.plan.cluster, sizes[0] * each, sizes[1] * each, "the workers have")
    run_dir = pathlib.Path(settings.train.output_dir).expanduser().absolute()
    devices = f"devices={'null' if devices_per_worker is None else devices_per_worker}"
    if kind == "slurm":
        own = [f"train.output_dir={json.dumps(str(run_dir))}", devices]
        arguments = [sys.executable, "-m", "autoshard", "train", str(config.absolute()), *(overrides or []), *own]
        output_dir, text = str(run_dir), ""
    else:
        arguments = ["python", "-m", "autoshard", "train", CONFIG_FILE, devices]
        output_dir, text = POD_OUTPUT_DIR, yaml_text(settings.model_dump(mode="json", exclude_unset=True))
    request = JobRequest(
        name=job_name(run_dir.name),
        arguments=tuple(arguments),
        output_dir=output_dir,
        least_workers=sizes[0],
        most_workers=sizes[1],
        gpus_per_worker=gpus_per_worker or 0,
        cpus_per_worker=devices_per_worker,
        max_restarts=max_restarts,
        config_text=text,
        image=image,
    )
    return emit(kind, request)
