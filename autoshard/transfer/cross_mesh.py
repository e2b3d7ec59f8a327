"""Brings an array into another layout, over the same devices or others."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.errors import TransferError
from autoshard.transfer.connections import PeerConnections
from autoshard.transfer.pending import PendingTransfers
from autoshard.transfer.process_steps import ConcatenateStep, CopyStep, ProcessSteps, steps_of
from autoshard.transfer.routes import Box, TileRoute, find_routes
from autoshard.transfer.shard_programs import ShardPrograms, impl_of, nothing, plain

_Held = dict[tuple[Box, jax.Device], jax.Array]
"""What lies where while a move is made: a part of the tensor on a local device."""


class CrossMeshTransfer:
    """Moves arrays between meshes that may differ in devices, their number, and layout.

    It remembers how it moved: the first move of a shape between two layouts plans and compiles, later ones only run.

    In a run of several processes all of them make one together, and then make the same moves in the same order, also
    those in which they have no part: this is how the two ends of a transfer know it for the same one.

    Args:
      timeout_s: How long another process may let this one wait without sending anything; can be set later too.
      coordinator_address: `host:port` as given to `jax.distributed.initialize`. Transfers use the network interface
        that leads there; None for `JAX_COORDINATOR_ADDRESS`, or else the default route.
    """

    def __init__(self, *, timeout_s: float = 300.0, coordinator_address: str | None = None) -> None:
        self._steps: dict[tuple[tuple[int, ...], jax.sharding.Sharding, jax.sharding.Sharding], ProcessSteps] = {}
        self._parts = ShardPrograms()
        self._arrivals = PendingTransfers(timeout_s)
        self._wire = PeerConnections(coordinator_address) if jax.process_count() > 1 else None
        self._num_crossings = 0

    def move(
        self,
        array: jax.Array | jax.ShapeDtypeStruct,
        target: jax.sharding.Sharding,
        *,
        name: str = "a tensor",
        may_alias: bool = True,
    ) -> jax.Array | jax.ShapeDtypeStruct:
        """`array` in the layout `target`.

        Nothing waits for the data: work is handed to the devices, as by `jax.device_put`. Within a process no bytes
        go through its host.

        Args:
          array: Of any type, PRNG keys too. A process that has none of its devices may give its shape, type and
            sharding instead.
          target: Its shards must be equal, as JAX demands.
          name: Of the tensor, for errors.
          may_alias: Whether shards that stay where they are may be shared with the result, and those that other
            processes fetch be read late. With False, `array` and the result may be donated at any time, at the price
            of copies.

        Returns:
          An array of the same shape and type; `array` itself where it lies so already and may be shared. In a process
          that has none of the target's devices: shape, type and sharding.

        Raises:
          TransferError: `array` has no sharding or lacks local shards; or an earlier transfer failed.
        """
        self._arrivals.look()
        if array.sharding is None:
            raise TransferError(f"{name} cannot be moved: its sharding must be known, but it is None. Give one.")
        if array.sharding == target and may_alias:
            return array
        steps = self._steps_of(array.shape, array.sharding, target)
        if steps.is_shardwise and isinstance(array, jax.Array):
            return jax.device_put(array, target, may_alias=may_alias)
        first_number = self._num_crossings
        self._num_crossings += steps.num_crossings
        try:
            return self._carry_out(array, target, steps, first_number, name, may_alias)
        except jax.errors.JaxRuntimeError:
            self._arrivals.blame()
            raise

    @property
    def timeout_s(self) -> float:
        """How long another process may let this one wait without sending anything."""
        return self._arrivals.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._arrivals.timeout_s = timeout_s

    def wait(self, arrays: Any, *, timeout_s: float | None = None) -> None:
        """Blocks until all `arrays` are ready, as `jax.block_until_ready`, but not for ever.

        Only here, or in a later move, does it show that a process died or stalled: JAX lets every other way of
        waiting for what that process owed fail without its name, or never end.

        Args:
          arrays: A pytree of what was moved, or of what was computed from it.
          timeout_s: Instead of that of this object.

        Raises:
          TransferError: Another process ended, or sent nothing for `timeout_s`.
        """
        self._arrivals.wait(arrays, timeout_s)

    def watch(self, name: str, processes: Sequence[int], array: jax.Array) -> None:
        """Takes note of what a program that several processes run makes: if it does not come, the others are to blame.

        Args:
          name: Of the program, for errors. processes: The others. array: On a device of this process.
        """
        self._arrivals.expect(name, processes, plain(array))

    def blame(self) -> None:
        """To be called where JAX raises an error in work on moved arrays: returns if no transfer can be the cause.

        A computation whose operand failed to arrive fails when it is asked for, or already when it is dispatched.

        Raises:
          TransferError: A transfer failed.
        """
        self._arrivals.blame()

    @property
    def _open_wire(self) -> PeerConnections:
        if self._wire is None:
            raise TransferError(
                "A tensor must go to another process, but there was one process only when CrossMesh was made. Call "
                "jax.distributed.initialize before."
            )
        return self._wire

    def _steps_of(
        self, shape: tuple[int, ...], source: jax.sharding.Sharding, target: jax.sharding.Sharding
    ) -> ProcessSteps:
        key = (shape, source, target)
        if key not in self._steps:
            self._steps[key] = steps_of(find_routes(shape, source, target), jax.process_index())
        return self._steps[key]

    def _carry_out(
        self,
        array: jax.Array | jax.ShapeDtypeStruct,
        target: jax.sharding.Sharding,
        steps: ProcessSteps,
        first_number: int,
        name: str,
        may_alias: bool,
    ) -> jax.Array | jax.ShapeDtypeStruct:
        """The work of this process in one move, whose crossings are numbered from `first_number`."""
        held = self._cut(array, steps, name, may_alias)
        for one in steps.sends:
            part = held[one.route.box, one.route.source]
            self._open_wire.offer(first_number + one.number, plain(part))
        _put(steps.copies, held)
        for one in steps.receives:
            route = one.route
            held[route.box, route.receiver] = self._receive(first_number + one.number, route, array.dtype, name)
        _put(steps.forwards, held)
        if not steps.joins:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=target)
        shards = [self._joined(join, held, array.dtype, target.memory_kind) for join in steps.joins]
        return jax.make_array_from_single_device_arrays(array.shape, target, shards)

    def _cut(self, array: jax.Array | jax.ShapeDtypeStruct, steps: ProcessSteps, name: str, may_alias: bool) -> _Held:
        """The parts that this process gives."""
        if not steps.cuts:
            return {}
        if not isinstance(array, jax.Array):
            raise TransferError(
                f"{name} is to be moved from {steps.cuts[0].device} among others, which belongs to this process, but "
                "only its shape was given. Give the array; shapes are for processes that hold none of it."
            )
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        held: _Held = {}
        for one in steps.cuts:
            shard = shards[one.device]
            if one.inside is None:
                (whole,) = one.boxes
                held[whole, one.device] = jnp.copy(shard) if one.is_read_late and not may_alias else shard
                continue
            found = self._parts.slicer(one.inside)(shard)
            held.update({(box, one.device): part for box, part in zip(one.boxes, found, strict=True)})
        return held

    def _receive(self, number: int, route: TileRoute, dtype: jax.typing.DTypeLike, name: str) -> jax.Array:
        """A part that another process sends."""
        process = route.source.process_index
        numbers = jax.eval_shape(plain, jax.ShapeDtypeStruct(route.box.shape, dtype))
        part = self._open_wire.fetch(number, numbers.shape, numbers.dtype, route.receiver, process)
        self._arrivals.expect(name, [process], part)
        return jax.random.wrap_key_data(part, impl=impl_of(dtype)) if numbers.dtype != dtype else part

    def _joined(
        self, join: ConcatenateStep, held: _Held, dtype: jax.typing.DTypeLike, memory_kind: str | None
    ) -> jax.Array:
        """What a device ends with, in the memory that the layout names."""
        parts = [held[box, join.device] for box in join.parts]
        if not parts:
            shard = nothing(join.shape, dtype, join.device)
        elif len(parts) == 1:
            (shard,) = parts
        else:
            shard = self._parts.concatenator(join.inside)(*parts)
        if shard.sharding.memory_kind == memory_kind:
            return shard
        return jax.device_put(shard, jax.sharding.SingleDeviceSharding(join.device, memory_kind=memory_kind))


def as_array(held: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """An array without local parts, of what stands for one; arrays as they are."""
    if isinstance(held, jax.Array):
        return held
    return jax.make_array_from_single_device_arrays(held.shape, held.sharding, [], dtype=held.dtype)


def _put(copies: tuple[CopyStep, ...], held: _Held) -> None:
    """Copies parts between local devices, all in one call."""
    if copies:
        found = jax.device_put([held[one.box, one.source] for one in copies], [one.target for one in copies])
        held.update({(one.box, one.target): part for one, part in zip(copies, found, strict=True)})
