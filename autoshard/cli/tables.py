"""`autoshard tables`."""

import pathlib
from typing import Annotated

import typer

from autoshard.cli.common import Config, Overrides, Traceback, errors_shown, finite, load_settings, use_cpu_devices

EPILOG = (
    "Examples:\n\n    autoshard tables configs/dlrm_criteo_1tb.yaml\n\n"
    "    autoshard tables configs/dlrm_criteo.yaml --cluster configs/clusters/h100x8_cpu.yaml --zipf 1.05 "
    "--max-staleness 2\n\n"
    "The cluster must describe its hosts. Nothing is allocated and nothing runs. What is printed tells the time of "
    "every stage, memory of every level, why each table is where it is, and the usual ways beside it."
)


def tables(
    config: Config,
    overrides: Overrides = None,
    cluster: Annotated[
        pathlib.Path | None, typer.Option(help="Plan for the cluster of this file, whose hosts are described.")
    ] = None,
    zipf: Annotated[
        float, typer.Option(callback=finite, min=0, help="Zipf exponent of how often rows are read; 0: all alike.")
    ] = 0.0,
    max_staleness: Annotated[
        int, typer.Option(min=0, help="Steps whose updates a row may lack; with 0, results are exact.")
    ] = 0,
    hot_rows: Annotated[
        bool, typer.Option(help="Also consider to keep the most frequent rows of tables on accelerators.")
    ] = False,
    pooling: Annotated[
        bool, typer.Option(help="Also consider to sum rows at the host, where the loss does nothing else with them.")
    ] = False,
    host_layers: Annotated[
        bool, typer.Option(help="Also consider to run dense layers at the host, right behind the rows that they read.")
    ] = False,
    traceback: Traceback = False,
) -> None:
    """Decide which embedding table lives where, on accelerators or in host memory, and print why."""
    with errors_shown(traceback):
        settings = load_settings(config, overrides, **{"plan.cluster": None if cluster is None else str(cluster)})
        use_cpu_devices(1 if settings.devices is None else settings.devices)
        from autoshard.cost.id_distribution import IdDistribution
        from autoshard.errors import ConfigError
        from autoshard.offloading.of_step import place_tables
        from autoshard.offloading.search import SearchOptions
        from autoshard.train.planning import arguments
        from autoshard.train.registry import staged_functions
        from autoshard.train_step import TrainStep

        if settings.plan.cluster is None:
            raise ConfigError(
                "plan.cluster: where tables live depends on accelerators and hosts; received none. Give --cluster, "
                "such as configs/clusters/h100x8_cpu.yaml."
            )
        functions = staged_functions(settings)
        state, batch = arguments(settings, functions)
        assert isinstance(functions.step, TrainStep)
        search = SearchOptions(max_staleness=max_staleness, hot_rows=hot_rows, pooling=pooling, host_layers=host_layers)
        placed = place_tables(
            functions.step, state, batch, cluster=settings.plan.cluster, ids=IdDistribution(zipf), search=search
        )
        typer.echo(placed)
