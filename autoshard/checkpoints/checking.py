"""Looking through all checkpoints of a run, without restoring any."""

import dataclasses
import pathlib
from collections.abc import Callable

from autoshard.checkpoints.checksums import in_threads
from autoshard.checkpoints.verification import CORRUPT, Fault, damaged_files, read_or_fault
from autoshard.errors import FileFormatError


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedCheckpoint:
    """What is known of one checkpoint.

    Attributes:
        path: its folder.
        step: of the state.
        num_files, size_bytes: what its manifest lists; 0 if that cannot be read.
        faults: what is wrong, by file; none if it is what was written.
    """

    path: pathlib.Path
    step: int
    num_files: int
    size_bytes: int
    faults: tuple[Fault, ...]


def check_run(folder: pathlib.Path, advance: Callable[[], None] = lambda: None) -> list[CheckedCheckpoint]:
    """Checks every file of every checkpoint of a run, several at a time; oldest first.

    Args:
        folder: the output folder of a run, or its `checkpoints` folder.
        advance: called after each checkpoint, on any thread.

    Raises:
        FileFormatError: there is no such folder, or no checkpoint in it.
    """
    inside = folder / "checkpoints"
    place = inside if inside.is_dir() else folder
    try:
        found = sorted(path for path in place.iterdir() if path.is_dir() and _step_of(path) is not None)
    except OSError as error:
        raise FileFormatError(f"{place}: the folder cannot be read: {error.strerror}. Check the path.") from error
    if not found:
        raise FileFormatError(f"{place}: it holds no checkpoint. Give the output folder of a run that has saved one.")

    def check(path: pathlib.Path) -> CheckedCheckpoint:
        checked = check_checkpoint(path)
        advance()
        return checked

    # A run that goes on removes what is too old, maybe while it is looked at.
    checked = [one for one in in_threads(check, found) if not one.faults or one.path.is_dir()]
    return sorted(checked, key=lambda one: (one.step, one.path.name))


def check_checkpoint(path: pathlib.Path) -> CheckedCheckpoint:
    """Checks every file of one checkpoint; `path` is the folder of a step, maybe one that was set aside."""
    step = _step_of(path)
    manifest = read_or_fault(path)
    if isinstance(manifest, Fault):
        return CheckedCheckpoint(path, step or 0, 0, 0, (manifest,))
    size_bytes = sum(entry.size_bytes for entry in manifest.files)
    faults = damaged_files(path, manifest.files)
    return CheckedCheckpoint(path, manifest.step, len(manifest.files), size_bytes, tuple(faults))


def _step_of(path: pathlib.Path) -> int | None:
    """The step in the name of a checkpoint's folder; None for other folders."""
    name, end, number = path.name.partition(CORRUPT)
    is_named_so = name.isdecimal() and (not end or not number or number.removeprefix("-").isdecimal())
    return int(name) if is_named_so else None
