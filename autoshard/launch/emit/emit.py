"""The job file of a run, for the cluster that is named."""

from typing import Literal

from autoshard.launch.emit.kubernetes import kubernetes_text
from autoshard.launch.emit.request import JobRequest
from autoshard.launch.emit.slurm import slurm_script

JobKind = Literal["slurm", "kubernetes"]


def emit(kind: JobKind, request: JobRequest) -> str:
    """The text of the file.

    Args:
        kind: `slurm` for a script that `sbatch` takes, `kubernetes` for documents that `kubectl apply` takes.
        request: the run.

    Raises:
        ConfigError: such a job cannot be made of the request.
    """
    return slurm_script(request) if kind == "slurm" else kubernetes_text(request)
