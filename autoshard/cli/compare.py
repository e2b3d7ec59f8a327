"""`autoshard compare`."""

import pathlib
from typing import Annotated

import rich.console
import typer

from autoshard.cli.common import (
    Cache,
    Config,
    Devices,
    Figures,
    MicroBatches,
    Overrides,
    Remat,
    Traceback,
    errors_shown,
    finite,
    load_settings,
    plan_settings,
    use_cpu_devices,
)
from autoshard.errors import ConfigError
from autoshard.files import write_text_atomically

EPILOG = (
    "Examples:\n\n"
    "    autoshard compare configs/gpt_1.3b.yaml --cluster configs/clusters/h100x8.yaml\n\n"
    "    autoshard compare configs/gpt_125m.yaml --picture comparison.html --json comparison.json\n\n"
    "    autoshard compare configs/quickstart.yaml --only ddp,zero3,zero3+megatron --time-limit 10\n\n"
    "    autoshard compare configs/gpt_6.7b.yaml data.batch_size=64 --remat search --only zero3,zero3+megatron "
    "--cluster configs/clusters/a100-40x16.yaml\n\n"
    "A strategy is planned like any program, under the restrictions that make it what it is, so that each is the "
    "best of its kind under the same costs and limits. `vs plan` is its step time as a multiple of the plan's. "
    "A strategy that exceeds the memory is shown with what it would need. Without --mesh, every strategy has the "
    "meshes that suit it. Where the plan chooses what layers recompute (--remat search), each strategy has the best "
    "of what people write by hand: nothing recomputed, all but the products with weights, all, or what the model says. "
    "A step in stages, as on a cluster with several kinds of devices, is compared with the other "
    "forms that its search looked at: each slice alone, pipelines across slices, a replica group on each slice with "
    "even shares, and with Whale's. Ctrl-C ends the search at hand with its best plan so far, and the next contender "
    "follows; a second one during the same search ends all."
)


def compare(
    config: Config,
    overrides: Overrides = None,
    cluster: Annotated[
        pathlib.Path | None, typer.Option(help="Compare on the cluster of this file; none of it need be at hand.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="NAME=SIZE,...", help="One mesh for all, as in data=4,tensor=4.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Only these strategies, as in ddp,zero3+megatron.")
    ] = None,
    json_file: Figures = None,
    picture: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="Draw time and memory into this .html, .png or .svg file; needs matplotlib."),
    ] = None,
    budget_gb: Annotated[
        float | None, typer.Option(callback=finite, help="Memory for each device, in 1e9 bytes.")
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(callback=finite, help="Seconds after which the best plan so far of a contender is taken."),
    ] = None,
    work_limit: Annotated[
        float | None, typer.Option(callback=finite, help="Limit in units of counted work, not by the clock.")
    ] = None,
    cache: Cache = None,
    remat: Remat = None,
    micro_batches: MicroBatches = None,
    devices: Devices = None,
    traceback: Traceback = False,
) -> None:
    """Show the plan beside data parallelism, ZeRO, Megatron and their mixes: time, communication, memory, proof."""
    with errors_shown(traceback):
        settings = load_settings(
            config,
            overrides,
            devices=devices,
            **plan_settings(cluster, mesh, budget_gb, time_limit, work_limit, cache),
            **{"plan.remat": remat, "plan.micro_batches": micro_batches},
        )
        use_cpu_devices(settings.devices)
        from autoshard.comparison.comparison import Comparison
        from autoshard.comparison.outputs import check_outputs, strategies_named
        from autoshard.comparison.picture import write_picture
        from autoshard.printing import PAGE_WIDTH
        from autoshard.train.planning import make_comparison_visibly
        from autoshard.train.registry import runs_in_stages, train_functions

        check_outputs(picture)
        if picture is not None and runs_in_stages(settings):
            raise ConfigError(
                "--picture: a picture shows what time and memory are made of, and of a step in stages the search tells "
                "only the times of other forms. Leave it out, or name a cluster of one kind of device."
            )
        strategies, console = strategies_named(only), rich.console.Console(stderr=True)
        found = make_comparison_visibly(settings, train_functions(settings), console, strategies)
        screen = rich.console.Console()
        screen.file.write(found.text(max(screen.width, PAGE_WIDTH)))
        if json_file is not None:
            write_text_atomically(json_file, found.json() + "\n")
        if picture is not None and isinstance(found, Comparison):
            write_picture(found, picture)
