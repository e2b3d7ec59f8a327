"""JSON files that tell their own checksum: what was changed by chance is never taken for what was written."""

import json
import os
import pathlib
from typing import Any, TypeVar

import pydantic

from autoshard.checkpoints.checksums import checksum_of
from autoshard.errors import FileFormatError
from autoshard.files import read_json, write_text_atomically

MAX_BYTES = 256 << 20
"""About a million shards; a larger file is not read."""

_Model = TypeVar("_Model", bound=pydantic.BaseModel)


def seal_of(content: Any) -> str:
    """The checksum of plain data, the same whatever the order of its keys."""
    return checksum_of(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def write_sealed(path: pathlib.Path, content: pydantic.BaseModel) -> None:
    """Writes `{"checksum": ..., "content": ...}`: a whole new file or the old one, flushed when this returns.

    Raises:
        FileFormatError: it cannot be written.
    """
    data = content.model_dump(mode="json")
    write_text_atomically(path, json.dumps({"checksum": seal_of(data), "content": data}))


def read_sealed(path: str | os.PathLike[str], model: type[_Model]) -> _Model:
    """What `write_sealed` wrote.

    Raises:
        FileFormatError: it is missing, was changed, or is no such `model`.
    """
    data: Any = read_json(path, max_bytes=MAX_BYTES)
    shown = os.fspath(path)
    if not isinstance(data, dict) or set(data) != {"checksum", "content"}:
        raise FileFormatError(f"{shown}: it must have the entries `checksum` and `content`, and does not.")
    if data["checksum"] != seal_of(data["content"]):
        raise FileFormatError(f"{shown}: its content does not have the checksum that it tells; the file was changed.")
    try:
        return model.model_validate(data["content"])
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise FileFormatError(
            f"{shown}: `{where}`: {first['msg']}. It is not a {model.__name__} of this version of autoshard."
        ) from error
