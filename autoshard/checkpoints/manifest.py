"""The manifest of a checkpoint: what its files and its tensors must be, each with a checksum.

It is one file, `MANIFEST`, in the folder of a step. Orbax gives that folder its name after the manifest is in it, so a
folder with the name of a step and without a manifest was never made by this version.
"""

import pathlib
from typing import Annotated, Literal

import numpy as np
import pydantic
from pydantic import BaseModel, ConfigDict, Field

from autoshard.checkpoints.layout import LeafShape
from autoshard.checkpoints.sealed import read_sealed, write_sealed
from autoshard.transfer.routes import Box

MANIFEST = "autoshard_manifest.json"
VERSION = 1

UNCHECKED = frozenset({MANIFEST, "_CHECKPOINT_METADATA", "commit_success.txt"})
"""Files in a step's folder that Orbax writes after the manifest, or that are the manifest. Restoring reads neither."""

Count = Annotated[int, Field(strict=True, ge=0)]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class Entry(BaseModel):
    """Plain data of a file: nothing may be added to it, and nothing changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(Entry):
    """A file: its path in the step's folder, with `/`; its size; the XXH3 of its content."""

    path: str
    size_bytes: Count
    checksum: Checksum

    @pydantic.field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        parts = pathlib.PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path or "\\" in path:
            raise ValueError("a file of a checkpoint lies in its folder")
        return path


class ShardEntry(Entry):
    """A part of a tensor: its first index in every dimension, the one after its last, and the XXH3 of its elements."""

    start: tuple[Count, ...]
    stop: tuple[Count, ...]
    checksum: Checksum

    @property
    def box(self) -> Box:
        """The part."""
        return Box(self.start, self.stop)


class LeafEntry(Entry):
    """A tensor of the state: its path in the tree, shape, type, and the shards in which it was saved."""

    name: str
    shape: tuple[Count, ...]
    dtype: str
    shards: tuple[ShardEntry, ...]

    @property
    def leaf(self) -> LeafShape:
        """Its shape and type. Raises TypeError for a type that does not exist."""
        return LeafShape(self.name, self.shape, np.dtype(self.dtype))


class Manifest(Entry):
    """What a checkpoint is made of.

    Attributes:
        step: steps that the state has taken.
        run: checksum of what identifies the run, which is in the file `run/metadata`.
        files, leaves: what must be there.
    """

    version: Literal[1] = VERSION
    step: Count
    run: Checksum
    files: tuple[FileEntry, ...]
    leaves: tuple[LeafEntry, ...]


def write_manifest(folder: pathlib.Path, manifest: Manifest) -> None:
    """Writes the manifest into a step's folder, on the disk when this returns.

    Raises:
        FileFormatError: it cannot be written.
    """
    write_sealed(folder / MANIFEST, manifest)


def read_manifest(folder: pathlib.Path) -> Manifest:
    """The manifest of a step's folder.

    Raises:
        FileFormatError: it is missing, damaged, or of another version.
    """
    return read_sealed(folder / MANIFEST, Manifest)
