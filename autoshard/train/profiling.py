"""A `jax.profiler` trace of chosen steps."""

import pathlib
from typing import Any

import jax

from autoshard.train.config import TrainSection


class Profile:
    """Records the steps that `section` asks for into `folder`. A context manager, which ends a trace left open."""

    def __init__(self, section: TrainSection, folder: pathlib.Path):
        self._steps = range(0)
        if section.profile_first_step is not None:
            self._steps = range(section.profile_first_step, section.profile_first_step + section.profile_steps)
        self._folder, self._is_open = folder, False

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def begin(self, step: int) -> Any:
        """Before `step`: begins the trace if it is due. Gives a context manager to take the step in."""
        if step in self._steps and not self._is_open:
            jax.profiler.start_trace(str(self._folder))
            self._is_open = True
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def end(self, step: int) -> bool:
        """After `step`: ends the trace if this was its last step, and tells whether it was."""
        is_last = self._is_open and step == self._steps[-1]
        if is_last:
            self._close()
        return is_last

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            jax.profiler.stop_trace()
