"""`autoshard launch`."""

import pathlib
import sys
from collections.abc import Callable
from typing import Annotated, Literal

import rich.console
import typer

from autoshard.cli.common import INTERRUPTED, Config, Overrides, Traceback, errors_shown, load_settings
from autoshard.errors import ConfigError
from autoshard.folders import make_folder
from autoshard.launch.settings import REJOIN_AFTER_S

EPILOG = (
    "Examples:\n\n"
    "    autoshard launch configs/quickstart.yaml --workers 4 --devices-per-worker 2\n\n"
    "    autoshard launch configs/quickstart.yaml --workers 2:4 --devices-per-worker 2\n\n"
    "    autoshard launch configs/quickstart.yaml --engine ray --workers 8:16\n\n"
    "    autoshard launch configs/quickstart.yaml --emit slurm --workers 8:16 --gpus-per-worker 8 > job.sh\n\n"
    "    autoshard status runs/quickstart\n\n"
    "    autoshard scale runs/quickstart --workers 3\n\n"
    "The first Ctrl-C (or SIGTERM) saves the run and ends it with status 130, the second ends it at once; the same "
    "command continues it. SIGUSR1 saves it and goes on with as many workers as there are places. SIGTERM to one "
    "worker, as at a notice of preemption, saves the run and goes on without that worker."
)

Workers = Annotated[
    str,
    typer.Option(
        metavar="N|MIN:MAX",
        help="Workers: N, a lost one being replaced, or MIN:MAX to go on with what is left.",
    ),
]
DevicesPerWorker = Annotated[
    int | None, typer.Option(min=1, help="CPU devices of each worker; without it, the accelerators of its host.")
]


def launch(
    config: Config,
    overrides: Overrides = None,
    workers: Workers = "1",
    devices_per_worker: DevicesPerWorker = None,
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Where workers run: on this machine, or on a Ray cluster. Slurm and Kubernetes: --emit."),
    ] = "local",
    rejoin_after: Annotated[
        float, typer.Option(min=0, help="Seconds until a lost worker's place is used again, with MIN:MAX.")
    ] = REJOIN_AFTER_S,
    stall_limit: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds without a heartbeat after which a worker is lost; learnt if not given."),
    ] = None,
    max_crashes: Annotated[int, typer.Option(min=0, help="Crashes and stalls after which the run ends.")] = 100,
    max_preemptions: Annotated[
        int | None, typer.Option(min=0, help="Lost hosts and notices of preemption after which the run ends.")
    ] = None,
    standbys: Annotated[bool, typer.Option(help="Keep processes ready for the next generation.")] = True,
    plan_ahead: Annotated[
        bool, typer.Option(help="Plan and compile for the likely next sizes while the run goes on.")
    ] = True,
    emit: Annotated[
        Literal["slurm", "kubernetes"] | None,
        typer.Option(help="Print a job file instead, for a cluster that restarts workers itself."),
    ] = None,
    gpus_per_worker: Annotated[
        int | None, typer.Option(min=1, help="GPUs that a worker takes of its node, with --emit.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Container image with autoshard, with --emit kubernetes.")] = None,
    traceback: Traceback = False,
) -> None:
    """Train under a supervisor, which replaces lost workers or goes on without them, planned anew.

    The output folder receives events.jsonl beside what `autoshard train` leaves, and logs/ with the output of the
    workers. The same command continues a run that was stopped, or whose supervisor was lost.
    """
    with errors_shown(traceback):
        settings = load_settings(config, overrides)
        least, most = sizes = _sizes(workers)
        if emit is not None:
            from autoshard.cli.job_files import job_file

            for option, is_given in (
                (f"--engine {engine}", engine != "local"),
                ("--rejoin-after", rejoin_after != REJOIN_AFTER_S),
                ("--stall-limit", stall_limit is not None),
                ("--max-preemptions", max_preemptions is not None),
                ("--no-standbys", not standbys),
                ("--no-plan-ahead", not plan_ahead),
            ):
                if is_given:
                    raise ConfigError(
                        f"{option}: is for the supervisor of a run, and a job of --emit {emit} has none: the cluster "
                        "restarts its workers. Leave it out, or leave out --emit."
                    )
            typer.echo(
                job_file(
                    emit, config, overrides, settings, sizes, devices_per_worker, gpus_per_worker, max_crashes, image
                ),
                nl=False,
            )
            return
        for option, value in (("--gpus-per-worker", gpus_per_worker), ("--image", image)):
            if value is not None:
                raise ConfigError(
                    f"{option}: is for job files, and there is no --emit; received {value!r}. Add --emit, or leave it "
                    "out: a worker takes the accelerators of its host, or --devices-per-worker CPU devices."
                )
        if devices_per_worker is not None:
            from autoshard.train.cluster_devices import check_devices

            check_devices(
                settings.plan.cluster, least * devices_per_worker, most * devices_per_worker, "the workers have"
            )
        from autoshard.launch.engines.local import LocalEngine
        from autoshard.launch.engines.protocol import Engine
        from autoshard.launch.engines.ray_cluster import RayEngine
        from autoshard.launch.launching import launch_run
        from autoshard.launch.settings import Budgets, LaunchSettings
        from autoshard.launch.supervisor import Ending

        run_dir = pathlib.Path(settings.train.output_dir).expanduser().absolute()
        make_folder(run_dir, "train.output_dir")
        launched = LaunchSettings(
            run_dir=run_dir,
            least_workers=least,
            most_workers=most,
            devices_per_worker=devices_per_worker,
            arguments=(sys.executable, "-m", "autoshard", "train", str(config), *(overrides or ())),
            budgets=Budgets(preemptions=max_preemptions, crashes=max_crashes),
            rejoin_after_s=rejoin_after,
            stall_limit_s=stall_limit,
            has_standbys=standbys,
            plans_ahead=plan_ahead,
        )
        console = rich.console.Console()
        say = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
        make_engine: Callable[[], Engine] = lambda: (
            LocalEngine(run_dir, most) if engine == "local" else RayEngine(run_dir, least, most, devices_per_worker)
        )
        outcome = launch_run(launched, make_engine, say)
        if outcome.ending is Ending.FINISHED:
            loss = "" if outcome.loss is None else f", loss {outcome.loss:.3f}"
            say(f"Step {outcome.step}{loss}; results are in {run_dir}")
        elif outcome.ending is Ending.STOPPED:
            say(
                f"Stopped. The state of step {outcome.step} lies in the memory of hosts alone, and is lost if these "
                "restart; the same command continues the run from it."
                if outcome.is_in_memory
                else f"Stopped and saved at step {outcome.step}; the same command continues the run."
            )
            raise typer.Exit(INTERRUPTED)
        else:
            rich.console.Console(stderr=True, style="bold red").print(
                f"error: {outcome.error}", markup=False, soft_wrap=True
            )
            raise typer.Exit(1)


def _sizes(text: str) -> tuple[int, int]:
    """`4` or `2:4` as the least and the most workers."""
    least, colon, most = text.partition(":")
    if not (least.isdecimal() and (most.isdecimal() if colon else True)):
        raise ConfigError(f"--workers: a number, or MIN:MAX; received {text!r}. Try: --workers 2:4.")
    sizes = int(least), int(most) if colon else int(least)
    if not 1 <= sizes[0] <= sizes[1]:
        raise ConfigError(f"--workers: at least 1, and MIN not above MAX; received {text!r}. Try: --workers 2:4.")
    return sizes
