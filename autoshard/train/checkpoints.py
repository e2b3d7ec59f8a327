"""Checkpoints of the training state, by Orbax: a sharded state goes to a folder per step and comes back sharded.

Writing overlaps the following steps: `save` returns once the state has been copied to the host, so that the next step
may reuse its memory. A checkpoint takes its name when it is whole; what a killed run left half written is removed.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from autoshard.errors import ConfigError, TrainingError
from autoshard.trace.trace import path_name

STATE, RUN = "state", "run"
"""Items of a checkpoint: the training state, and what identifies the run."""


class Checkpoints:
    """The checkpoints of one output folder. A context manager; leaving it waits until the last one is written."""

    def __init__(self, folder: pathlib.Path, keep: int):
        """Opens `folder`, in which the newest `keep` checkpoints stay."""
        self._manager = ocp.CheckpointManager(
            folder,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True),
            item_handlers={STATE: ocp.StandardCheckpointHandler(), RUN: ocp.JsonCheckpointHandler()},
        )
        self._folder = folder

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.close()
        else:  # what ended the block matters more than what closing may say
            with contextlib.suppress(TrainingError):
                self.close()

    def close(self) -> None:
        """Waits until all is written, and ends Orbax's threads."""
        with self._explained("The last checkpoint"):
            self._manager.close()

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, run: Mapping[str, Any]) -> None:
        """Begins to write `state` as the checkpoint of `step`; does nothing if that one exists.

        Args:
            step: steps taken.
            state: a pytree of arrays; it may be donated as soon as this returns.
            run: what identifies the run, as plain data.

        Raises:
            TrainingError: this checkpoint cannot be written, or the one before it could not.
        """
        if step in self._manager.all_steps():
            return
        items = {STATE: ocp.args.StandardSave(state), RUN: ocp.args.JsonSave(dict(run))}
        with self._explained(f"The checkpoint of step {step} or the one before it"):
            self._manager.save(step, args=ocp.args.Composite(**items))

    def wait(self) -> None:
        """Waits until what was saved is on disk.

        Raises:
            TrainingError: it cannot be written.
        """
        with self._explained("The last checkpoint"):
            self._manager.wait_until_finished()

    def restore(self, step: int, like: Any) -> Any:
        """Reads the checkpoint of `step`.

        Args:
            step: a saved step.
            like: the state as arrays or as `jax.ShapeDtypeStruct`s, with the shapes, types and shardings wanted.

        Raises:
            ConfigError: the checkpoint holds a state of another shape, or is damaged.
        """
        self.wait()
        wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        try:
            # What is described is compared before data are read, which a description gone wrong could make huge.
            difference = _difference(wanted, self._manager.item_metadata(step)[STATE].tree)
            if difference is None:
                items = ocp.args.Composite(**{STATE: ocp.args.StandardRestore(wanted)})
                return self._manager.restore(step, args=items)[STATE]
        except Exception as error:  # Orbax raises whatever its readers raise, down to plain Exception
            reason = str(error).partition("\n")[0][:300]
            others = sorted(set(self._manager.all_steps()) - {step})
            older = f" Remove that folder to continue from step {others[-1]}." if others else ""
            raise ConfigError(
                f"The checkpoint of step {step} in {self._folder / str(step)} cannot be read; it is damaged or of "
                f"another version: {reason}{older}"
            ) from error
        raise ConfigError(
            f"The checkpoint of step {step} in {self._folder} does not fit this configuration: {difference}. "
            "Use the model and optimizer it was made with, or another train.output_dir."
        )

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            reason = str(error).partition("\n")[0][:300]
            older = self._manager.latest_step()
            left = (
                "No checkpoint is left." if older is None else f"The newest whole one may be older than step {older}."
            )
            raise TrainingError(
                f"{what} in {self._folder} could not be written: {reason} {left} Check the disk's space and the "
                "folder's permissions, then resume."
            ) from error


def _difference(wanted: Any, saved: Any) -> str | None:
    """The first leaf that is saved otherwise than it is wanted, in words; None if there is none.

    Random keys are saved as their words, and so are not compared.
    """
    shapes = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(saved)[0]}
    needed = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(wanted)[0]}
    for name in [*needed, *shapes]:
        ours, theirs = needed.get(name), shapes.get(name)
        if ours is None:
            return f"it holds `{name}`, which the state does not have"
        if theirs is None:
            return f"it lacks `{name}` {ours.dtype}{list(ours.shape)}"
        if jnp.issubdtype(ours.dtype, jax.dtypes.prng_key):
            continue
        if tuple(theirs.shape) != tuple(ours.shape) or theirs.dtype != ours.dtype:
            received = f"{theirs.dtype}{list(theirs.shape)}"
            return f"`{name}` is saved as {received}, but the state needs {ours.dtype}{list(ours.shape)}"
    return None
