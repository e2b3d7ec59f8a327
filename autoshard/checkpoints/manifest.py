"""The manifest of a checkpoint: what its files and its tensors must be, each with a checksum.

It is one file, `MANIFEST`, in the folder of a step. Orbax gives that folder its name after the manifest is in it, so a
folder with the name of a step and without a manifest was never made by this version.
"""

import json
import pathlib
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from pydantic import BaseModel, ConfigDict, Field

from autoshard.checkpoints.checksums import checksum_of
from autoshard.checkpoints.layout import LeafShape
from autoshard.errors import FileFormatError
from autoshard.files import read_json, write_text_atomically
from autoshard.transfer.routes import Box

MANIFEST = "autoshard_manifest.json"
VERSION = 1
MAX_MANIFEST_BYTES = 256 << 20
"""About a million shards; a larger file is not read."""

UNCHECKED = frozenset({MANIFEST, "_CHECKPOINT_METADATA", "commit_success.txt"})
"""Files in a step's folder that Orbax writes after the manifest, or that are the manifest. Restoring reads neither."""

_Count = Annotated[int, Field(strict=True, ge=0)]
_Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Entry):
    """A file: its path in the step's folder, with `/`; its size; the XXH3 of its content."""

    path: str
    size_bytes: _Count
    checksum: _Checksum

    @pydantic.field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        parts = pathlib.PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path or "\\" in path:
            raise ValueError("a file of a checkpoint lies in its folder")
        return path


class ShardEntry(_Entry):
    """A part of a tensor: its first index in every dimension, the one after its last, and the XXH3 of its elements."""

    start: tuple[_Count, ...]
    stop: tuple[_Count, ...]
    checksum: _Checksum

    @property
    def box(self) -> Box:
        """The part."""
        return Box(self.start, self.stop)


class LeafEntry(_Entry):
    """A tensor of the state: its path in the tree, shape, type, and the shards in which it was saved."""

    name: str
    shape: tuple[_Count, ...]
    dtype: str
    shards: tuple[ShardEntry, ...]

    @property
    def leaf(self) -> LeafShape:
        """Its shape and type. Raises TypeError for a type that does not exist."""
        return LeafShape(self.name, self.shape, np.dtype(self.dtype))


class Manifest(_Entry):
    """What a checkpoint is made of.

    Attributes:
        step: steps that the state has taken.
        run: checksum of what identifies the run, which is in the file `run/metadata`.
        files, leaves: what must be there.
    """

    version: Literal[1] = VERSION
    step: _Count
    run: _Checksum
    files: tuple[FileEntry, ...]
    leaves: tuple[LeafEntry, ...]


def write_manifest(folder: pathlib.Path, manifest: Manifest) -> None:
    """Writes the manifest into a step's folder, on the disk when this returns.

    Raises:
        FileFormatError: it cannot be written.
    """
    content = manifest.model_dump(mode="json")
    write_text_atomically(folder / MANIFEST, json.dumps({"checksum": _checksum(content), "manifest": content}))


def read_manifest(folder: pathlib.Path) -> Manifest:
    """The manifest of a step's folder.

    Raises:
        FileFormatError: it is missing, damaged, or of another version.
    """
    path = folder / MANIFEST
    data: Any = read_json(path, max_bytes=MAX_MANIFEST_BYTES)
    if not isinstance(data, dict) or set(data) != {"checksum", "manifest"}:
        raise FileFormatError(f"{path}: a manifest has the entries `checksum` and `manifest`; this file does not.")
    if data["checksum"] != _checksum(data["manifest"]):
        raise FileFormatError(f"{path}: its content does not have the checksum that it tells; the file was changed.")
    version = data["manifest"].get("version") if isinstance(data["manifest"], dict) else None
    if version != VERSION:
        raise FileFormatError(f"{path}: this version of autoshard reads manifests of version {VERSION}, not {version}.")
    try:
        return Manifest.model_validate(data["manifest"])
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise FileFormatError(f"{path}: `{where}`: {first['msg']}. The manifest is not one of autoshard's.") from error


def run_checksum(run: Any) -> str:
    """The checksum of what identifies a run, given as plain data."""
    return _checksum(run)


def _checksum(content: Any) -> str:
    return checksum_of(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
