"""The checkpoints of a run, on disk and in memory: one front for both."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from autoshard.checkpoints.disk import DiskTier, Tell
from autoshard.checkpoints.memory import MemoryTier
from autoshard.errors import TrainingError
from autoshard.launch.messages import Tier


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """A state that was read back.

    Attributes:
        step: steps it has taken.
        state: as it was described by `like`.
        source: where it comes from; None for an initial state.
    """

    step: int
    state: Any
    source: Tier | None


class Checkpoints:
    """The checkpoints of one run. A context manager; leaving it waits until the last one is written.

    All processes of a run make and call it together, on their main threads.
    """

    def __init__(
        self, folder: pathlib.Path, keep: int, tell: Tell = lambda message: None, memory: MemoryTier | None = None
    ):
        """Opens `folder`; what killed runs left half written there is removed.

        Args:
            folder: on a file system that all processes see; made if it is missing.
            keep: the newest checkpoints that stay on disk.
            tell: called, on any thread, with what becomes of checkpoints: `Committed` on disk, `Rejected` and
                `NotSaved` by the first process only, `Committed` in memory by every process for its part.
            memory: where states are kept in memory, too; closed with this object.

        Raises:
            ConfigError: the folder cannot be used.
        """
        self._disk, self._memory = DiskTier(folder, keep, tell), memory

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.close()
            return
        if self._memory is not None:
            self._memory.close()
        with contextlib.suppress(TrainingError):  # what ended the block matters more than what closing may say
            self._disk.close(is_whole=jax.process_count() == 1)

    def close(self) -> None:
        """Waits until all is written, and ends the threads.

        Raises:
            TrainingError: the last checkpoint cannot be written, for another reason than a full disk.
        """
        if self._memory is not None:
            self._memory.wait()
            self._memory.close()
        self._disk.close()

    def latest_step(self, tier: Tier | None = None) -> int | None:
        """The newest step that `restore` may find, before anything is verified; None if there is none.

        Args:
            tier: look only there.
        """
        steps = [] if tier is Tier.MEMORY else self._disk.steps()[-1:]
        if self._memory is not None and tier is not Tier.DISK:
            steps += [step for step in [self._memory.latest_step()] if step is not None]
        return max(steps, default=None)

    def commit(self, step: int, state: Any) -> None:
        """Begins to keep `state` in memory; does nothing without a memory tier.

        Args:
            step: steps taken.
            state: a pytree of arrays; it may be donated as soon as this returns.
        """
        if self._memory is not None:
            self._memory.commit(step, state)

    def save(self, step: int, state: Any, run: Mapping[str, Any]) -> None:
        """Begins to write `state` to disk; does nothing if that checkpoint exists.

        A disk that is full is told as `NotSaved`, now or later, and the run can go on.

        Args:
            step: steps taken.
            state: a pytree of arrays; it may be donated as soon as this returns.
            run: what identifies the run, as plain data.

        Raises:
            TrainingError: the one before could not be written, for another reason than a full disk.
        """
        self._disk.save(step, state, run)

    def wait(self) -> None:
        """Waits until what was committed and saved is safe.

        Raises:
            TrainingError: it cannot be written, for another reason than a full disk.
        """
        if self._memory is not None:
            self._memory.wait()
        self._disk.wait()

    def require(self, step: int) -> None:
        """Waits until what was saved is on disk, and looks whether the last state of a run is there.

        Args:
            step: the steps that it has taken.

        Raises:
            TrainingError: it is not: the disk is full, as was told, or the state was not to be saved.
        """
        self.wait()
        newest = self.latest_step(Tier.DISK)
        if newest != step:
            left = "no checkpoint is there" if newest is None else f"the newest checkpoint is that of step {newest}"
            raise TrainingError(
                f"The state after step {step}, the last one of this run, is not saved in {self._disk.folder}, for the "
                f"reason that the warning tells; {left}. Make room, or mend what it names, and resume the run."
            )

    def check_fit(self, like: Any) -> None:
        """Refuses states of another form than those on disk, before work is spent on them.

        Args:
            like: the state as arrays or as `jax.ShapeDtypeStruct`s.

        Raises:
            ConfigError: as `restore`.
        """
        self._disk.check_fit(like)

    def restore(self, like: Any, tier: Tier | None = None) -> Restored | None:
        """The newest state that is whole in either tier; from memory if both have it.

        A damaged checkpoint on disk is renamed, told as `Rejected`, and the next older one is taken.

        Args:
            like: the state as arrays or as `jax.ShapeDtypeStruct`s, with the shapes, types and shardings wanted.
            tier: look only there.

        Returns:
            The state; None if there is none.

        Raises:
            ConfigError: a checkpoint holds a state of other shapes, or was written by a version without manifests.
        """
        self.wait()
        newest = None if tier is Tier.MEMORY else max(self._disk.steps(), default=None)
        if self._memory is not None and tier is not Tier.DISK:
            found = self._memory.restore(like, -1 if newest is None else newest)
            if found is not None:
                return Restored(*found, Tier.MEMORY)
        if newest is None:
            return None
        found = self._disk.restore(like)
        return None if found is None else Restored(*found, Tier.DISK)
