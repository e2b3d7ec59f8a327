"""`autoshard share`."""

import json
import pathlib
from typing import Annotated, Literal

import rich.console
import typer

from autoshard.cli.common import INTERRUPTED, Figures, Traceback, errors_shown, finite
from autoshard.errors import ConfigError

EPILOG = (
    "Examples:\n\n"
    "    autoshard share configs/jobs/mixed.yaml --cluster configs/clusters/v100x8_p100x8.yaml\n\n"
    "    autoshard share configs/jobs/mixed.yaml --cluster configs/clusters/v100x32_p100x32.yaml "
    "--simulate philly-like --picture share.html\n\n"
    "    autoshard share configs/jobs/three.yaml --cluster configs/clusters/cpu4x2.yaml --run "
    "--devices-per-worker 2\n\n"
    "    autoshard share configs/jobs/mixed.yaml --cluster configs/clusters/v100x8_p100x8.yaml --emit slurm\n\n"
    "A jobs file names for each job its training configuration (or its rates), its work, limits, weight and deadline; "
    "the guide on several jobs has all keys. Speeds come from plans, which are made once for each set of devices and "
    "kept on disk. The decision is an integer program with a proven gap; nothing runs without --run, in which the "
    "first Ctrl-C saves all jobs and stops them, and the same command continues."
)

_ENDINGS = "philly-like, helios-like, jobs (the arrivals of the file), or a file: Philly's JSON, Helios' CSV, or ours."


def share(
    jobs: Annotated[pathlib.Path, typer.Argument(metavar="JOBS", help="A jobs file, in YAML.")],
    cluster: Annotated[pathlib.Path, typer.Option(help="The cluster that the jobs share.")],
    objective: Annotated[
        Literal["completion", "throughput", "fairness", "makespan", "deadlines"],
        typer.Option(help="What is made as good as possible."),
    ] = "completion",
    horizon: Annotated[
        int, typer.Option(min=1, max=12, help="Periods that are planned, each twice as long as the one before; 1: now.")
    ] = 1,
    payback: Annotated[
        float,
        typer.Option(
            callback=finite, min=1, help="Seconds within which a move must pay; the first period of the horizon."
        ),
    ] = 900.0,
    time_limit: Annotated[
        float, typer.Option(callback=finite, min=0.1, help="Seconds that a decision may take.")
    ] = 10.0,
    gap: Annotated[
        float, typer.Option(callback=finite, min=0, help="Relative distance from the bound that is good enough.")
    ] = 0.001,
    simulate: Annotated[str | None, typer.Option(metavar="TRACE", help=f"Simulate a trace: {_ENDINGS}")] = None,
    policies: Annotated[
        str, typer.Option(help="What is simulated, separated by commas: autoshard, fifo, sjf, rigid, sia-like.")
    ] = "fifo,sjf,rigid,sia-like,autoshard",
    num_jobs: Annotated[
        int, typer.Option(min=1, help="Jobs of a trace that is made up, or the first of a file.")
    ] = 160,
    hours: Annotated[
        float, typer.Option(callback=finite, min=0.1, help="Hours in which the jobs of a made-up trace come.")
    ] = 8.0,
    failures: Annotated[
        float | None,
        typer.Option(callback=finite, min=0.1, help="Hours between failures of a node, on average; none without it."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of made-up traces and failures.")] = 0,
    picture: Annotated[
        pathlib.Path | None, typer.Option(metavar="FILE", help="Draw it: a file that ends in .html, .png or .svg.")
    ] = None,
    emit: Annotated[
        Literal["kueue", "slurm"] | None, typer.Option(help="Print priorities and sizes for this scheduler instead.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Run the jobs, and change their devices as they come and end.")
    ] = False,
    output_dir: Annotated[
        pathlib.Path, typer.Option(help="Folder of the driver's log and of a folder for each job, with --run.")
    ] = pathlib.Path("runs/share"),
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Where workers run: on this machine, or on a Ray cluster.")
    ] = "local",
    devices_per_worker: Annotated[
        int | None, typer.Option(min=1, help="CPU devices of each worker; without it, one worker a node.")
    ] = None,
    json_file: Figures = None,
    traceback: Traceback = False,
) -> None:
    """Decide which jobs get which devices of a cluster, show why, simulate it, or run it."""
    with errors_shown(traceback):
        chosen = [
            name
            for name, is_given in (("--simulate", simulate is not None), ("--emit", emit is not None), ("--run", run))
            if is_given
        ]
        if len(chosen) > 1:
            raise ConfigError(
                f"--simulate, --emit and --run exclude each other; received {' and '.join(chosen)}. Choose one."
            )
        if (emit is not None or run) and (picture is not None or json_file is not None):
            raise ConfigError(
                f"--picture and --json are of a decision or a simulation, not of {chosen[0]}. Leave them out, or "
                f"{chosen[0]}."
            )
        from autoshard.share.commands import ShareRequest, emit_text, run_jobs, show_decision, show_simulation
        from autoshard.share.picture import check_picture

        if picture is not None:
            check_picture(picture)

        console = rich.console.Console()
        request = ShareRequest(
            jobs, cluster, objective, horizon, payback, time_limit, gap, rich.console.Console(stderr=True)
        )
        if run:
            outcome = run_jobs(request, output_dir, engine, devices_per_worker, lambda text: _say(console, text))
            if outcome.is_stopped:
                raise typer.Exit(INTERRUPTED)
            if outcome.failed:
                raise typer.Exit(1)
            return
        if emit is not None:
            typer.echo(emit_text(request, emit), nl=False)
            return
        if simulate is not None:
            document = show_simulation(
                request, simulate, policies.split(","), num_jobs, hours, failures, seed, picture, console
            )
        else:
            document = show_decision(request, picture, console)
        if json_file is not None:
            from autoshard.files import write_text_atomically

            write_text_atomically(json_file, json.dumps(document, indent=1) + "\n")


def _say(console: rich.console.Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
