"""Checkpoints of the training state, by Orbax: a sharded state goes to a folder per step and comes back sharded."""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from autoshard.errors import ConfigError

KEPT = 2
"""Checkpoints kept; older ones are deleted once a newer one is whole."""


class Checkpoints:
    """The checkpoints of one output folder. A context manager; leaving it closes Orbax's threads."""

    def __init__(self, folder: pathlib.Path):
        self._manager = ocp.CheckpointManager(
            folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=KEPT, enable_async_checkpointing=False, cleanup_tmp_directories=True
            ),
        )
        self._folder = folder

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.close()

    def latest_step(self) -> int | None:
        """The step of the newest whole checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Writes `state` as the checkpoint of `step`; does nothing if that one exists."""
        if step not in self._manager.all_steps():
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, step: int, like: Any) -> Any:
        """Reads the checkpoint of `step`.

        Args:
            step: a saved step.
            like: a state of arrays with the shapes, types and shardings wanted.

        Raises:
            ConfigError: the checkpoint holds a state of another shape, or is damaged.
        """
        wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        except Exception as error:  # Orbax raises whatever its readers raise, down to plain Exception
            reason = str(error).partition("\n")[0][:300]
            raise ConfigError(
                f"The checkpoint of step {step} in {self._folder} does not fit this configuration or is damaged: "
                f"{reason} Use the model and optimizer it was made with, or another train.output_dir."
            ) from error
