"""`autoshard report`."""

import pathlib
from typing import Annotated

import typer

from autoshard.cli.common import Traceback, errors_shown

EPILOG = (
    "Examples:\n\n"
    "    autoshard report plan.json --out report.html\n\n"
    "    autoshard report runs/quickstart --out run.html\n\n"
    "    autoshard report plan.json --beside compared.json --beside verified.json --out report.html\n\n"
    "The page is one file that needs no network: memory and work over the step with what is alive at the cursor and "
    "its line of code, the model as a tree, collectives and the tensors that cause them, links and their bytes, what "
    "was considered, the price of memory; of tables in host memory their places and batches over time; of a run "
    "loss, throughput, goodput and events. compared.json is what "
    "`autoshard compare --json` writes, verified.json what `autoshard verify --json` does; plans of the same program "
    "with other budgets (--budget-gb) make the price of memory a curve."
)


def report(
    subject: Annotated[
        pathlib.Path,
        typer.Argument(metavar="PLAN|RUN_DIR", help="A saved plan, the output folder of a run, or a JSON as above."),
    ],
    out: Annotated[pathlib.Path, typer.Option(metavar="FILE", help="The page to write.")] = pathlib.Path("report.html"),
    beside: Annotated[
        list[pathlib.Path] | None,
        typer.Option(metavar="FILE", help="Show this too: a comparison, a verification, another plan; repeatable."),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Write one page to look at a plan, a comparison, a verification or a run in a browser."""
    with errors_shown(traceback):
        from autoshard.report.write import write_report

        write_report(subject, out, beside=beside or [])
        typer.echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
