"""A batch script for Slurm: `srun` starts the workers, and the script restarts them or takes its place in the queue."""

import importlib.resources
import shlex
import string

from autoshard.launch.emit.request import FINAL_STATUS, NOTICE_S, JobRequest


class _Template(string.Template):
    delimiter = "@@"  # a script is full of `$`


def slurm_script(request: JobRequest) -> str:
    """The script, for `sbatch`; its workers join each other by variables, and continue what is saved.

    Slurm gives the job `MIN-MAX` nodes, as many as it can when it starts, and queues it again when a node fails.
    """
    template = importlib.resources.files("autoshard.launch.emit").joinpath("slurm.sh").read_text()
    least, most = request.least_workers, request.most_workers
    resources = []
    if request.gpus_per_worker:
        resources.append(f"#SBATCH --gpus-per-node={request.gpus_per_worker}")
    if request.cpus_per_worker is not None:
        resources.append(f"#SBATCH --cpus-per-task={request.cpus_per_worker}")
    arguments = (*request.arguments, "distributed=true", "train.resume=true")
    text = _Template(template).substitute(
        name=request.name,
        nodes=str(least) if least == most else f"{least}-{most}",
        resources="\n".join(resources),
        signal=f"B:USR1@{NOTICE_S}",
        logs=shlex.quote(f"{request.output_dir}/logs"),
        max_restarts=request.max_restarts,
        final_status=FINAL_STATUS,
        command=shlex.join(arguments),
    )
    return text.replace("#SBATCH --mem=0\n\n", "#SBATCH --mem=0\n")
