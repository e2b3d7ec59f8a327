"""Runs whose replicas share each batch out by their speeds: the step, and the call that knows who runs which parts."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from autoshard.api.planned_call import PlannedCall
from autoshard.errors import ConfigError
from autoshard.plans.make import load_cluster
from autoshard.train.config import TrainConfig
from autoshard.train_step import TrainStep
from autoshard.uneven_step import UnevenStep


def uneven_step(config: TrainConfig, step: TrainStep) -> UnevenStep:
    """The step of a run whose replicas share a batch out, on all devices of its cluster.

    Raises:
        ConfigError: its mesh has more than one axis, or parts do not divide the batch.
    """
    section, mesh, size = config.stragglers, config.plan.mesh or {"data": 0}, config.data.batch_size
    parts = section.parts or 1
    if len(mesh) != 1:
        raise ConfigError(
            f"stragglers.parts: replicas share a batch out along the one axis of a mesh; received plan.mesh={mesh}. "
            "Leave plan.mesh out, or leave stragglers.parts out to share a tensor axis."
        )
    if size % parts:
        raise ConfigError(
            f"stragglers.parts: must divide data.batch_size; received {parts} and {size}. Change one of them."
        )
    (axis,), replicas = mesh, load_cluster(config.plan.cluster).num_devices
    if replicas > parts:
        raise ConfigError(
            f"stragglers.parts: each of {replicas} devices must have a part when shares are even; received {parts}. "
            "Take several parts for each device."
        )
    return UnevenStep(step, replicas, parts, axis, can_be_slowed=bool(section.emulate))


class SharedBatchCall:
    """The planned step, called with state and batch.

    Attributes:
        step: what was planned. mesh: its devices.
        counts: int32 [replicas]: parts that each replica runs, from the next call on.
        slowed: int32 [replicas]: how often it runs each, where the step can be slowed. Neither is changed in place.
    """

    def __init__(self, call: PlannedCall, step: UnevenStep):
        self._call, self.step, self.mesh = call, step, call.mesh
        self.counts, self.slowed = step.even, np.ones(step.replicas, np.int32)
        self._own: list[jax.sharding.Sharding] = []
        """Where the plan has the shares."""
        self._placed: dict[tuple[bytes, Any], jax.Array] = {}

    def __call__(self, state: Any, batch: Any) -> Any:
        """Takes a step."""
        if not self._own:
            self.in_shardings((state, batch))
        shares = share_arguments(self.step, self.counts, self.slowed)
        return self._call(state, batch, *map(self._place, shares, self._own))

    def prepare(self, state: Any, batch: Any) -> None:
        """As of `PlannedCall`."""
        self._call.prepare(state, batch, *share_arguments(self.step))

    def compile(self, state: Any, batch: Any, when_lowered: Callable[[], None] = lambda: None) -> None:
        """As of `PlannedCall`."""
        self._call.compile(state, batch, *share_arguments(self.step), when_lowered=when_lowered)

    def in_shardings(self, args: tuple[Any, Any]) -> tuple[Any, Any]:
        """Those of state and batch."""
        state, batch, *self._own = self._call.in_shardings((*args, *share_arguments(self.step)))
        return state, batch

    def _place(self, shares: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        """Shares, which all processes know, where the plan has them."""
        key = shares.tobytes(), sharding
        if key not in self._placed:
            self._placed[key] = jax.make_array_from_callback(shares.shape, sharding, lambda index: shares[index])
        return self._placed[key]


def share_arguments(step: Any, counts: np.ndarray | None = None, slowed: np.ndarray | None = None) -> tuple[Any, ...]:
    """What a step takes beside state and batch: of an `UnevenStep` its shares, by shape unless they are given."""
    if not isinstance(step, UnevenStep):
        return ()
    shape = jax.ShapeDtypeStruct((step.replicas,), np.int32)
    return (shape if counts is None else counts, *([shape if slowed is None else slowed] * step.can_be_slowed))
