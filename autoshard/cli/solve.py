"""`autoshard solve`."""

import os
import pathlib
import sys
import time
from typing import Annotated

import rich.console
import typer

from autoshard.cli.common import Traceback, errors_shown

EPILOG = (
    "Examples:\n\n"
    "    autoshard solve problem.npz --time-limit 60 --out solution.json\n\n"
    "    autoshard solve asplos-2025-iopddl-A.json.gz --time-limit 60\n\n"
    "The last line of the output is the list of choices, one per node; the line before holds cost and lower bound. "
    "Ctrl-C ends the search with the best solution so far. By the clock, two runs may end differently; with "
    "--work-limit, the same problem, seed and limit give the same answer on any machine. "
    "The exit status is 2 if there is no solution, if none was found, or if the file cannot be read."
)


def solve(
    context: typer.Context,
    file: Annotated[
        pathlib.Path,
        typer.Argument(
            metavar="FILE",
            help="A problem of `autoshard plan --problem-only`, or an instance of the ASPLOS 2025 contest.",
        ),
    ],
    time_limit: Annotated[
        float, typer.Option(min=0.1, help="Seconds, from the start of the process; reading the file is included.")
    ] = 60.0,
    out: Annotated[pathlib.Path | None, typer.Option(help="Write the solution to this file.")] = None,
    gap: Annotated[
        float, typer.Option(min=0.0, help="Stop once the cost is proven to be within this share of the optimum.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of everything that is random.")] = 0,
    work_limit: Annotated[
        float | None,
        typer.Option(min=0.0, help="Limit in units of counted work (about a second each) instead of the clock."),
    ] = None,
    cache: Annotated[
        bool,
        typer.Option(
            help="Start from solutions of earlier runs, and keep this one (AUTOSHARD_CACHE names the folder)."
        ),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the solution as JSON, in one line, instead.")] = False,
    traceback: Traceback = False,
) -> None:
    """Solve a problem from a file, on any machine; needs no JAX.

    Prints cost, proven lower bound and the choices. `autoshard plan --solution` makes a plan of them.
    """
    started = time.perf_counter()
    is_alone = isinstance(context.obj, float)  # called by `main`: this process has no other task
    if is_alone:
        started = context.obj
        _keep_stdout_for_python()
    with errors_shown(traceback):
        from autoshard.solve_file import SolveRequest, solve_file
        from autoshard.solver.io.solution_cache import default_cache

        request = SolveRequest(
            file, out, time_limit, work_limit, gap, seed, default_cache() if cache else None, started, is_alone
        )
        show = lambda answer: typer.echo(answer.json() if as_json else answer.lines())
        solve_file(request, rich.console.Console(stderr=True), show)


def _keep_stdout_for_python() -> None:
    """Silences what libraries print by way of C, which would come out at exit, after the answer."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
