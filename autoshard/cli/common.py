"""What the commands share: options that several have, the configuration, the devices, and how errors are shown."""

import contextlib
import json
import math
import pathlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import rich.console
import rich.text
import typer

from autoshard.errors import AutoshardError, ConfigError, TransferError

INTERRUPTED = 130
"""Exit status of a run that Ctrl-C stopped: 128 + SIGINT, as shells count."""


def finite(value: float | None) -> float | None:
    """Refuses an option that is infinite or no number, which bounds alone do not; a callback of `typer.Option`."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"a number must be finite; received {value}.")
    return value


def in_a_folder(file: pathlib.Path | None) -> pathlib.Path | None:
    """Refuses a file to write whose folder is not there, before work is spent on it; a callback of `typer.Option`."""
    if file is not None and not file.parent.is_dir():
        raise typer.BadParameter(f"a file is written into a folder that is there; received {file}. Make its folder.")
    return file


Config = Annotated[pathlib.Path, typer.Argument(metavar="CONFIG", help="A training configuration, in YAML.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Replace entries of the configuration, as in train.steps=100."),
]
Devices = Annotated[int | None, typer.Option(min=1, help="Use this many CPU devices instead of the machine's own.")]
Cache = Annotated[bool | None, typer.Option(help="Answer from earlier runs, or start from them.")]
Remat = Annotated[
    str | None,
    typer.Option(
        metavar="search|as_written",
        help="Whether what layers recompute in the backward pass is chosen too, or stays as the model says.",
    ),
]
MicroBatches = Annotated[
    str | None,
    typer.Option(
        metavar="search|as_written|N",
        help="Whether the number of micro-batches is chosen too, stays as the configuration says, or is N.",
    ),
]
SavedPlan = Annotated[pathlib.Path, typer.Argument(metavar="PLAN", help="A saved plan.")]
Figures = Annotated[
    pathlib.Path | None,
    typer.Option("--json", metavar="FILE", callback=in_a_folder, help="Write all figures to this file."),
]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where in the code an error arose.")]


def load_settings(config: pathlib.Path, overrides: list[str] | None, **options: Any) -> Any:
    """The configuration, with `options` that are not None as overrides that come last."""
    from autoshard.train.config import load_config

    given = [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None]
    return load_config(config, [*(overrides or []), *given])


def plan_settings(
    cluster: pathlib.Path | None,
    mesh: str | None,
    budget_gb: float | None,
    time_limit: float | None,
    work_limit: float | None,
    cache: bool | None,
) -> dict[str, object]:
    """Options of a command that plans, as overrides of its configuration; None leaves what the file says."""
    return {
        "plan.cluster": None if cluster is None else str(cluster),
        "plan.mesh": None if mesh is None else _mesh_sizes(mesh),
        "plan.memory_budget_bytes": None if budget_gb is None else round(budget_gb * 1e9),
        "plan.time_limit_s": time_limit,
        "plan.work_limit": work_limit,
        "plan.cache": cache,
    }


def _mesh_sizes(text: str) -> dict[str, int]:
    """`data=4,tensor=2` as a mapping."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = item.partition("=")
        if not (name.strip().isidentifier() and size.strip().isdecimal()) or name.strip() in sizes:
            raise ConfigError(
                f"--mesh: axes are written NAME=SIZE, each name once, separated by commas; received {text!r}. "
                "Try: data=4,tensor=4."
            )
        sizes[name.strip()] = int(size)
    return sizes


def use_cpu_devices(count: int | None) -> None:
    """Gives JAX `count` CPU devices and no others; must come before JAX's first use of a device."""
    if count is None:
        return
    import jax

    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise ConfigError(f"devices: must be set before JAX is first used; received {count}. {error}") from error


@contextlib.contextmanager
def errors_shown(traceback: bool) -> Iterator[None]:
    """Prints an AutoshardError as one message and exits with status 2, unless its traceback is wanted.

    The status is 1 where another process of the run was lost, which need not come again.
    """
    try:
        yield
    except AutoshardError as error:
        if traceback:
            raise
        console = rich.console.Console(stderr=True)
        console.print(rich.text.Text(f"error: {error}", style="bold red"), soft_wrap=True)
        raise typer.Exit(1 if isinstance(error, TransferError) else 2) from None
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
