"""What a user asks of a run that goes on: another size, by a file in its folder."""

import pathlib

import pydantic
from pydantic import BaseModel, ConfigDict, PositiveInt

from autoshard.errors import ElasticError, FileFormatError
from autoshard.files import read_json, write_text_atomically

_FILE = "scale_request.json"


class ScaleRequest(BaseModel):
    """Go on with so many workers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: PositiveInt


def write_scale_request(run_dir: pathlib.Path, request: ScaleRequest) -> None:
    """Leaves a request for the supervisor of a run, which takes it within a second; a later one replaces it."""
    write_text_atomically(run_dir / _FILE, request.model_dump_json())


def take_scale_request(run_dir: pathlib.Path) -> ScaleRequest | None:
    """The request that was left, which is removed; None without one.

    Raises:
        ElasticError: there is a file, but it is no request.
    """
    path = run_dir / _FILE
    if not path.exists():
        return None
    try:
        return ScaleRequest.model_validate(read_json(path))
    except (FileFormatError, pydantic.ValidationError) as error:
        reason = str(error).partition("\n")[0]
        raise ElasticError(f"{path} is no request and is removed: {reason} Use `autoshard scale`.") from error
    finally:
        path.unlink(missing_ok=True)
