"""`autoshard clicks`."""

import math
import pathlib
from typing import Annotated

import typer

from autoshard.cli.common import Traceback, errors_shown
from autoshard.errors import ConfigError

EPILOG = (
    "Example:\n\n    autoshard clicks runs/clicks.tsv --examples 200000\n\n"
    "    autoshard train configs/dlrm_criteo_tiny.yaml data.name=criteo data.path=runs/clicks.tsv\n\n"
    "The same options make the same file. What is printed is how well the hidden model itself ranks the clicks: the "
    "most that any model can reach on them."
)

MOST_CATEGORIES = 1 << 26
"""So many ids of each of 26 tables have different hashes of 32 bits."""


def clicks(
    out: Annotated[pathlib.Path, typer.Argument(metavar="FILE", help="The click log to write.")],
    examples: Annotated[int, typer.Option(min=1, help="Lines of the log.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, help="Draws the examples; the rule behind them is always the same.")] = 0,
    categories: Annotated[
        int, typer.Option(min=1, max=MOST_CATEGORIES, help="Categories of each of the 26 tables.")
    ] = 1000,
    zipf: Annotated[
        float, typer.Option(min=0, help="Zipf exponent of how often categories occur; 0: all alike.")
    ] = 1.1,
    traceback: Traceback = False,
) -> None:
    """Write a click log in Criteo's format, whose clicks a hidden model draws."""
    with errors_shown(traceback):
        from autoshard.train.click_metrics import click_metrics
        from autoshard.train.data.made_clicks import MadeClicks, write_clicks

        made = MadeClicks(examples, seed, zipf, categories)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            told = click_metrics(*write_clicks(out, made))
        except OSError as error:
            raise ConfigError(f"{out} cannot be written: {error.strerror}. Choose another file.") from error
        ranks = f"AUC {told.auc:.4f}, normalised entropy {told.normalized_entropy:.4f}"
        if math.isnan(told.auc):
            ranks = "and no AUC, which takes both clicks and others: raise --examples"
        count = "1 example" if examples == 1 else f"{examples:,} examples"
        typer.echo(
            f"Wrote {count} to {out}, {told.click_share:.1%} of them clicks. The hidden model itself: "
            f"log loss {told.log_loss:.4f}, {ranks}."
        )
