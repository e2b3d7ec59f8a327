"""Whether a checkpoint's folder is what its manifest says."""

import dataclasses
import os
import pathlib
import stat
from collections.abc import Sequence

from autoshard.checkpoints.checksums import checksum_of_file, in_threads
from autoshard.checkpoints.layout import LeafShape
from autoshard.checkpoints.manifest import MANIFEST, UNCHECKED, FileEntry, Manifest, read_manifest
from autoshard.errors import FileFormatError
from autoshard.folders import path_inside

CORRUPT = ".corrupt"
"""End of the name of a damaged checkpoint that was set aside; more such of one step get a number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a checkpoint: the file, relative to its folder, and why."""

    file: str
    why: str

    def __str__(self) -> str:
        return f"{self.file}: {self.why}"


def files_in(folder: pathlib.Path) -> dict[str, int]:
    """Size in bytes of every file of a step's folder that a manifest lists, by path.

    Raises:
        OSError: the folder cannot be read, or holds something that is neither a file nor a folder.
    """
    found = {}
    for at, _, names in os.walk(folder, onerror=_raise):
        for name in names:
            path = pathlib.Path(at, name)
            state = path.lstat()
            if not stat.S_ISREG(state.st_mode):
                raise OSError(f"{path} is not a regular file")
            found[path.relative_to(folder).as_posix()] = state.st_size
    return {name: size for name, size in found.items() if name not in UNCHECKED}


def read_or_fault(folder: pathlib.Path) -> Manifest | Fault:
    """The manifest of a step's folder, if it fits the files by name and size and the folder's own name."""
    try:
        manifest = read_manifest(folder)
        found = files_in(folder)
    except FileFormatError as error:
        return Fault(MANIFEST, str(error))
    except OSError as error:
        return Fault(".", f"it cannot be read: {error.strerror or error}")
    if folder.name.isdecimal() and int(folder.name) != manifest.step:
        return Fault(MANIFEST, f"it is the manifest of step {manifest.step}, in a folder called {folder.name}")
    for entry in manifest.files:
        if entry.path not in found:
            return Fault(entry.path, "the file is missing")
        if found[entry.path] != entry.size_bytes:
            return Fault(entry.path, f"it has {found[entry.path]} bytes, but {entry.size_bytes} were written")
    strangers = sorted(set(found) - {entry.path for entry in manifest.files})
    if strangers:
        return Fault(strangers[0], "the file is not in the manifest")
    return manifest


def damaged_files(folder: pathlib.Path, files: Sequence[FileEntry]) -> list[Fault]:
    """Those of `files` whose content is not what was written; several are read at a time."""

    def look(entry: FileEntry) -> Fault | None:
        try:
            checksum = checksum_of_file(path_inside(folder, entry.path))
        except FileFormatError as error:
            return Fault(MANIFEST, str(error))
        except OSError as error:
            return Fault(entry.path, f"it cannot be read: {error.strerror or error}")
        if checksum == entry.checksum:
            return None
        return Fault(entry.path, f"its content has the checksum {checksum}, but what was written has {entry.checksum}")

    return [fault for fault in in_threads(look, files) if fault is not None]


def leaf_difference(wanted: Sequence[LeafShape], saved: Sequence[LeafShape]) -> str | None:
    """The first leaf that is saved otherwise than it is wanted, in words; None if there is none."""
    needed, held = {leaf.name: leaf for leaf in wanted}, {leaf.name: leaf for leaf in saved}
    for name in [*needed, *held]:
        ours, theirs = needed.get(name), held.get(name)
        if ours is None:
            return f"it holds `{name}`, which the state does not have"
        if theirs is None:
            return f"it lacks `{name}` {ours}"
        if ours != theirs:
            return f"`{name}` is saved as {theirs}, but the state needs {ours}"
    return None


def _raise(error: OSError) -> None:
    raise error
