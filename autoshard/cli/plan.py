"""`autoshard plan`."""

import pathlib
from typing import Annotated

import rich.console
import typer

from autoshard.cli.common import (
    Cache,
    Config,
    Devices,
    MicroBatches,
    Overrides,
    Remat,
    Traceback,
    errors_shown,
    finite,
    in_a_folder,
    load_settings,
    plan_settings,
    use_cpu_devices,
)

EPILOG = (
    "Examples:\n\n"
    "    autoshard plan configs/gpt3_175b.yaml\n\n"
    "    autoshard plan configs/gpt_1.3b.yaml --cluster configs/clusters/h100x16.yaml --mesh data=4,tensor=4\n\n"
    "    autoshard plan configs/quickstart.yaml --devices 8 --budget-gb 0.02 --out plan.json\n\n"
    "    autoshard plan configs/gpt_350m.yaml --cluster configs/clusters/v100x8_p100x8.yaml --out staged.json\n\n"
    "    autoshard plan configs/gpt_350m.yaml --cluster configs/clusters/v100x8.yaml plan.stages.num_stages=2\n\n"
    "    autoshard plan configs/gpt_125m.yaml --cluster configs/clusters/h100x8.yaml --check\n\n"
    "    autoshard plan configs/gpt_1.3b.yaml --cluster configs/clusters/h100x8.yaml --mesh tensor=8 "
    "'plan.annotations=[{split: 8}]' --slow 3:2.0\n\n"
    "On a cluster with several kinds of devices, as in the fourth example, the step is cut into stages, each "
    "on a mesh of its own; with plan.stages it is on one kind too (plan.stages={} fixes nothing), and with "
    "--pipelines search where that is faster than one program.\n\n"
    "To solve on another machine:"
    "\n\n"
    "    autoshard plan configs/gpt_125m.yaml --mesh data=4,tensor=2 --problem-only problem.npz\n\n"
    "    autoshard solve problem.npz --time-limit 600 --out solution.json\n\n"
    "    autoshard plan configs/gpt_125m.yaml --mesh data=4,tensor=2 --solution solution.json\n\n"
    "The first Ctrl-C ends the search with the best plan so far."
)


def plan(
    config: Config,
    overrides: Overrides = None,
    cluster: Annotated[
        pathlib.Path | None, typer.Option(help="Plan for the cluster of this file; none of it need be at hand.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="NAME=SIZE,...", help="Fix the mesh, as in data=4,tensor=4.")
    ] = None,
    out: Annotated[pathlib.Path | None, typer.Option(callback=in_a_folder, help="Save the plan to this file.")] = None,
    budget_gb: Annotated[
        float | None, typer.Option(callback=finite, help="Memory that the plan may use on each device, in 1e9 bytes.")
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            callback=finite,
            help="Seconds after which the best plan so far is taken; two runs by the clock may end differently.",
        ),
    ] = None,
    work_limit: Annotated[
        float | None,
        typer.Option(
            callback=finite, help="Limit in units of counted work, not by the clock: the answer is repeatable."
        ),
    ] = None,
    cache: Cache = None,
    check: Annotated[
        bool | None,
        typer.Option(help="Compile the plan ahead of time for its devices, and correct it where the compiler differs."),
    ] = None,
    remat: Remat = None,
    micro_batches: MicroBatches = None,
    pipelines: Annotated[
        str | None,
        typer.Option(
            metavar="search|never",
            help="Whether the step is planned in stages too, on devices of one kind; the faster plan is taken.",
        ),
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(
            metavar="state|activations|all|never",
            help="What may lie in the memory of the hosts, which the cluster must describe: optimizer state, what the "
            "backward pass reads, or both; by default both, if nothing fits the devices otherwise.",
        ),
    ] = None,
    problem_only: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="Only write the problem, for `autoshard solve` elsewhere; needs --mesh."),
    ] = None,
    solution: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="Make the plan of this solution of the problem that --problem-only wrote."),
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE:SLOWDOWN,...",
            help="Also predict the step with slow devices, as in 3:2.0, and what other shares would gain.",
        ),
    ] = None,
    devices: Devices = None,
    traceback: Traceback = False,
) -> None:
    """Plan a training step and print the plan: its mesh, shardings, time, memory, and how good it provably is.

    Nothing is allocated and nothing runs, so that a model and a cluster of any size can be planned on a laptop.
    """
    from autoshard.solver.warm_up import start_compilation

    with errors_shown(traceback):
        start_compilation()  # beside what comes before the first problem
        settings = load_settings(
            config,
            overrides,
            devices=devices,
            **plan_settings(cluster, mesh, budget_gb, time_limit, work_limit, cache),
            **{
                "plan.check": check,
                "plan.remat": remat,
                "plan.micro_batches": micro_batches,
                "plan.pipelines": pipelines,
                "plan.offload": offload,
            },
        )
        is_elsewhere = settings.plan.check and settings.plan.cluster is not None  # no live device is compiled for
        use_cpu_devices(1 if is_elsewhere and settings.devices is None else settings.devices)
        from autoshard.train.planning import make_plan_to_keep_visibly, write_config_problem
        from autoshard.train.registry import train_functions
        from autoshard.train.slow_devices import check_before_planning, forecasts_of

        if slow is not None:
            check_before_planning(settings, slow)
        functions, console = train_functions(settings), rich.console.Console(stderr=True)
        if problem_only is not None:
            write_config_problem(settings, functions, problem_only, console)
            console.print(f"Solve it with: autoshard solve {problem_only} --out solution.json", soft_wrap=True)
            return
        made = make_plan_to_keep_visibly(settings, functions, console, solution)
        typer.echo(made)
        if out is not None:
            made.save(out)
        if slow is not None:
            typer.echo(forecasts_of(made, slow))
