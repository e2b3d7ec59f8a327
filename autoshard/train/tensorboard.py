"""Reports as scalars for TensorBoard."""

import pathlib
from typing import Any

from autoshard.errors import MissingExtraError
from autoshard.train.metrics import Report


def check_tensorboard() -> None:
    """Refuses before a run what `TensorBoard` could not write during it.

    Raises:
        MissingExtraError: tensorboardX is not installed.
    """
    _tensorboardx()


class TensorBoard:
    """Writes event files into a folder. A context manager."""

    def __init__(self, folder: pathlib.Path, after_step: int):
        """Opens `folder`; TensorBoard then ignores earlier events of steps after `after_step`.

        Raises:
            MissingExtraError: tensorboardX is not installed.
        """
        self._writer = _tensorboardx().SummaryWriter(str(folder), purge_step=after_step + 1 if after_step else None)

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, *exception: object) -> None:
        self._writer.close()

    def write(self, report: Report) -> None:
        """Adds every number of a report, under its kind: `train/loss`, `eval/loss`, and so on."""
        record = report.record()
        kind, step = record.pop("kind"), record.pop("step")
        for name, value in record.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"{kind}/{name}", float(value), step)
        self._writer.flush()


def _tensorboardx() -> Any:
    try:
        import tensorboardX
    except ImportError as error:
        raise MissingExtraError(
            "train.tensorboard: event files need tensorboardX, which is not installed. Install it with "
            "`pip install 'autoshard[tensorboard]'`, or set train.tensorboard=false."
        ) from error
    return tensorboardX
