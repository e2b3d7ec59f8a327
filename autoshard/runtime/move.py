"""Brings an array into another layout, over the same devices or others."""

import jax

from autoshard.runtime.parts import Parts, nothing
from autoshard.runtime.pieces import Box, cut
from autoshard.runtime.steps import Copy, Join, Steps, steps_of

_Held = dict[tuple[Box, jax.Device], jax.Array]
"""What lies where while a move is made: a part of the tensor on a local device."""


class CrossMesh:
    """Moves arrays between meshes that may differ in devices, their number, and layout.

    It remembers how it moved: the first move of a shape between two layouts plans and compiles, later ones only run.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[tuple[int, ...], jax.sharding.Sharding, jax.sharding.Sharding], Steps] = {}
        self._parts = Parts()

    def move(self, array: jax.Array, target: jax.sharding.Sharding) -> jax.Array:
        """`array` in the layout `target`.

        Nothing waits for the data: work is handed to the devices, as by `jax.device_put`, and no bytes go through the
        host. Like there, shards that stay where they are are shared with `array`, so neither may be donated while the
        other is in use.

        Args:
          array: Of any type, PRNG keys too.
          target: Its shards must be equal, as JAX demands.

        Returns:
          An array of the same shape and type; `array` itself where it lies so already.
        """
        if array.sharding == target:
            return array
        steps = self._steps_of(array.shape, array.sharding, target)
        held: _Held = {}
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        for one in steps.cuts:
            shard = shards[one.device]
            if one.boxes == (one.held,):
                held[one.held, one.device] = shard
                continue
            found = self._parts.cutter(one.boxes, one.held)(shard)
            held.update({(box, one.device): part for box, part in zip(one.boxes, found, strict=True)})
        _put(steps.copies, held)
        _put(steps.copies_on, held)
        shards = [self._joined(join, held, array.dtype, target.memory_kind) for join in steps.joins]
        return jax.make_array_from_single_device_arrays(array.shape, target, shards)

    def _steps_of(self, shape: tuple[int, ...], source: jax.sharding.Sharding, target: jax.sharding.Sharding) -> Steps:
        key = (shape, source, target)
        if key not in self._steps:
            self._steps[key] = steps_of(cut(shape, source, target), jax.process_index())
        return self._steps[key]

    def _joined(self, join: Join, held: _Held, dtype: jax.typing.DTypeLike, memory_kind: str | None) -> jax.Array:
        """What a device ends with, in the memory that the layout names."""
        parts = [held[box, join.device] for box in join.parts]
        if not parts:
            shard = nothing(join.box.shape, dtype, join.device)
        elif len(parts) == 1:
            (shard,) = parts
        else:
            shard = self._parts.joiner(join.parts, join.box)(*parts)
        if shard.sharding.memory_kind == memory_kind:
            return shard
        return jax.device_put(shard, jax.sharding.SingleDeviceSharding(join.device, memory_kind=memory_kind))


def _put(copies: tuple[Copy, ...], held: _Held) -> None:
    """Copies parts between local devices, all in one call."""
    if copies:
        found = jax.device_put([held[one.box, one.source] for one in copies], [one.target for one in copies])
        held.update({(one.box, one.target): part for one, part in zip(copies, found, strict=True)})
