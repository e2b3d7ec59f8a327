"""The side file of a calibration: what has been timed so far, so that an interrupted one goes on where it stopped."""

import dataclasses
import json
import os
import pathlib

import pydantic

from autoshard.errors import FileFormatError
from autoshard.files import read_json, write_text_atomically

FORMAT, VERSION = "autoshard-calibration", 1


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What timings belong to; those of another setting are of no use.

    Attributes:
      jax: Version of JAX. device_kind: What the devices call themselves. num_devices: How many.
      quick: Whether the calibration is a quick one. dtypes: Of the products.
    """

    jax: str
    device_kind: str
    num_devices: int
    quick: bool
    dtypes: tuple[str, ...]


Times = dict[str, tuple[float, ...]]
"""Seconds of one operation by the name of its probe, one for each repetition so far."""


class _Document(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=False)

    format: str
    version: int
    setting: Setting
    seconds: dict[str, list[pydantic.NonNegativeFloat]]


def side_file(out: str | os.PathLike[str]) -> pathlib.Path:
    """Where the partial results of a calibration that writes `out` are kept."""
    path = pathlib.Path(out)
    return path.with_name(path.name + ".partial.json")


def read_times(path: pathlib.Path, setting: Setting) -> Times:
    """The timings in `path`; none if there is no such file.

    Raises:
      FileFormatError: If the file is damaged, or belongs to another setting.
    """
    if not path.exists():
        return {}
    advice = "Delete it to start afresh."
    raw = read_json(path)
    if not isinstance(raw, dict) or (raw.get("format"), raw.get("version")) != (FORMAT, VERSION):
        raise FileFormatError(f"{path}: this is not the side file of a calibration, of version {VERSION}. {advice}")
    try:
        found = _Document.model_validate(raw)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise FileFormatError(f"{path}: the side file is damaged: at {where}: {first['msg']}. {advice}") from error
    if found.setting != setting:
        ours, theirs = (dataclasses.asdict(s) for s in (setting, found.setting))
        differs = ", ".join(
            f"{key} {theirs[key]!r} instead of {ours[key]!r}" for key in ours if ours[key] != theirs[key]
        )
        raise FileFormatError(f"{path}: the side file belongs to another calibration, with {differs}. {advice}")
    return {name: tuple(values) for name, values in found.seconds.items()}


def write_times(path: pathlib.Path, setting: Setting, times: Times) -> None:
    """Writes the timings.

    Raises:
      FileFormatError: If the file cannot be written.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "setting": dataclasses.asdict(setting),
        "seconds": {name: list(values) for name, values in times.items()},
    }
    write_text_atomically(path, json.dumps(content) + "\n")
