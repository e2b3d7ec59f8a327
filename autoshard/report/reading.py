"""What a path stands for: a plan of any kind, a comparison, a verification, or the folder of a run."""

import dataclasses
import pathlib

from autoshard.errors import FileFormatError
from autoshard.files import read_json
from autoshard.offloading.reading import AnyPlan, load
from autoshard.report.comparison_file import (
    PROGRAM_FORMAT,
    STAGED_FORMAT,
    ComparisonFile,
    StagedComparisonFile,
    read_comparison,
)
from autoshard.report.run_view import RunRecord, read_run
from autoshard.verify.report import Report

Material = AnyPlan | ComparisonFile | StagedComparisonFile | Report | RunRecord
"""What a page can be about."""


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """Something to show, and the name of its file for people."""

    name: str
    material: Material


def read_material(path: pathlib.Path) -> tuple[Named, ...]:
    """What `path` holds: one thing, or of a run's folder the run and the plans that it ran with, the last one first.

    Raises:
      FileFormatError: It is none of what a report can be about; or one of a kind that cannot be read.
    """
    if path.is_dir():
        return _of_run(path)
    document = read_json(path)
    form = document.get("format") if isinstance(document, dict) else None
    if form in (PROGRAM_FORMAT, STAGED_FORMAT):
        return (Named(path.name, read_comparison(path)),)
    if form == "autoshard-verification":
        return (Named(path.name, Report.load(path)),)
    return (Named(path.name, load(path)),)


def _of_run(folder: pathlib.Path) -> tuple[Named, ...]:
    run = read_run(folder)
    plans = [p for p in (folder / "plan.json",) if p.exists()]
    plans += sorted((folder / "plans").glob("*/plan.json"), key=lambda p: -p.stat().st_mtime)
    if not (run.metrics or run.events or plans):
        raise FileFormatError(
            f"`{folder}` is not the output folder of a run: it has no metrics.jsonl, events.jsonl or plan.json. Name "
            "the folder that `autoshard train` or `autoshard launch` wrote to, or a saved plan."
        )
    names = [str(p.relative_to(folder).parent) for p in plans]
    return Named(run.name, run), *(
        Named(path.name if name == "." else name, load(path)) for name, path in zip(names, plans, strict=True)
    )
