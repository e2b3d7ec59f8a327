"""Where checkpoints of host tables lie: rows in a folder for each step, the rest of the state as other checkpoints."""

import os
import pathlib
import shutil

from autoshard.checkpoints.agreement import from_first
from autoshard.checkpoints.checkpoints import Checkpoints
from autoshard.errors import TrainingError

_ALL = 1 << 20
"""More checkpoints than any run writes."""


def saved_step(folder: str | os.PathLike[str]) -> int | None:
    """The step of the newest checkpoint that `HostTables.save` has written to a folder; None if there is none.

    All processes of a run call it together. The first one looks for all: the others may see what it writes next.

    Raises:
      TrainingError: The newest checkpoint lacks its rows, which somebody has removed.
    """
    place = pathlib.Path(folder)
    if not from_first((place / "dense").exists):
        return None
    with dense_checkpoints(place) as checkpoints:
        step = checkpoints.latest_step()
    if step is not None and not has_tables(place, step):
        raise TrainingError(
            f"{place}: the checkpoint of step {step} has its rows in {tables_folder(place, step).name}, which is "
            "missing. Put that folder back, or choose another train.output_dir."
        )
    return step


def dense_checkpoints(folder: pathlib.Path, keep: int | None = None) -> Checkpoints:
    """Those of the rest of the state; the newest `keep` stay, all without."""
    return Checkpoints((folder / "dense").absolute(), keep or _ALL)


def tables_folder(folder: pathlib.Path, step: int) -> pathlib.Path:
    """Where the rows after a step are."""
    return folder / f"tables-{step}"


def has_tables(folder: pathlib.Path, step: int) -> bool:
    """Whether the first process sees the rows after a step in a folder. All processes of a run call it together."""
    return from_first(tables_folder(folder, step).exists)


def remove_old_tables(folder: pathlib.Path, keep: int) -> None:
    """Removes the rows of all but the newest steps. All processes of a run call it together; the first one removes."""

    def remove() -> None:
        ends = (path.name.removeprefix("tables-") for path in folder.glob("tables-*"))
        for step in sorted((int(end) for end in ends if end.isdecimal()), reverse=True)[keep:]:
            shutil.rmtree(tables_folder(folder, step))

    from_first(remove)
