"""Where checkpoints of host tables lie: rows in a folder for each step, the rest of the state as other checkpoints."""

import os
import pathlib

from autoshard.checkpoints.checkpoints import Checkpoints

_ALL = 1 << 20
"""More checkpoints than any run writes."""


def saved_step(folder: str | os.PathLike[str]) -> int | None:
    """The step of the newest checkpoint that `HostTables.save` has written to a folder; None if there is none."""
    place = pathlib.Path(folder)
    if not (place / "dense").exists():
        return None
    with dense_checkpoints(place) as checkpoints:
        step = checkpoints.latest_step()
    return step if step in saved_tables(place) else None


def dense_checkpoints(folder: pathlib.Path, keep: int | None = None) -> Checkpoints:
    """Those of the rest of the state; the newest `keep` stay, all without."""
    return Checkpoints((folder / "dense").absolute(), keep or _ALL)


def tables_folder(folder: pathlib.Path, step: int) -> pathlib.Path:
    """Where the rows after a step are."""
    return folder / f"tables-{step}"


def saved_tables(folder: pathlib.Path) -> list[int]:
    """Steps of which a folder has tables."""
    ends = (path.name.removeprefix("tables-") for path in folder.glob("tables-*"))
    return [int(end) for end in ends if end.isdecimal()]
