"""Look-ups and scatter-adds whose rows are owned by several devices: ids go to the owners, rows come back, or go along.

What runs on each device, inside a `shard_map`. Of N owners, the o-th has rows o R/N .. (o+1) R/N of every table:

    1. Ids are numbered through all tables and sorted, so that each distinct one is sent once, and those of one owner
       lie together.
    2. Each device sends every owner up to `slots` ids, and with them the most that it has for any owner: all devices
       learn by the same all-to-all whether some have ids left.
    3. A look-up's owner sends the rows back. A scatter-add's rows, of duplicates their sum, are sent along, and added.
    4. Steps 2 and 3 are repeated for what is left, until nobody has any: further rounds, which the plan's slots make
       rare, and without which overflow would drop rows.

Ids that are no rows are treated as the equation says: moved to the nearest row (`CLIP`), filled or dropped
(`FILL_OR_DROP`). `PROMISE_IN_BOUNDS` is taken as XLA takes it: a look-up moves them, and a scatter drops them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from autoshard.graph.equation_plan import IndexExchange
from autoshard.hlo.module import FURTHER_ROUNDS


def exchanged(
    equation: jex.JaxprEqn, shards: Sequence[Any], exchange: IndexExchange, num_owners: int, summed: Sequence[str]
) -> jax.Array:
    """The result of a `gather` or `scatter-add` on one device's shards, by an exchange with the other owners.

    Args:
      equation: A look-up of whole rows, as `trace/rules/indexing.py` finds them.
      shards: This device's part of the table, of the ids, and of what is added.
      exchange: What is exchanged. num_owners: The devices along its axes.
      summed: Axes over which the results will be added: what is added to must not be there as often.
    """
    table, indices, *updates = shards
    numbers, mode = equation.params["dimension_numbers"], equation.params["mode"]
    if updates:
        batching, of_ids = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
        is_moved = mode == GatherScatterMode.CLIP
    else:
        batching, of_ids = numbers.operand_batching_dims, numbers.start_indices_batching_dims
        is_moved = mode != GatherScatterMode.FILL_OR_DROP
    num_tables, own_rows = int(np.prod(table.shape[: len(batching)])), table.shape[len(batching)]
    row = table.shape[len(batching) + 1 :]
    flat = table.reshape(num_tables * own_rows, *row)
    ids = indices[..., 0]
    keys = _keys(ids, _table_numbers(ids.shape, of_ids), num_tables, own_rows, num_owners, is_moved=is_moved)
    owners = _Owners(exchange, num_owners, num_tables * own_rows, keys.reshape(-1))
    if not updates:
        filled = _fill_value(equation.params["fill_value"], table.dtype)
        rows = owners.look_up(flat, filled).reshape(*ids.shape, *row)
        return jnp.moveaxis(rows, range(ids.ndim, rows.ndim), numbers.offset_dims)
    windows = numbers.update_window_dims
    added = jnp.moveaxis(updates[0], windows, range(updates[0].ndim - len(windows), updates[0].ndim))
    is_first = jnp.array(True)
    for axis in summed:
        is_first &= jax.lax.axis_index(axis) == 0
    start = jnp.where(is_first, flat, jnp.zeros_like(flat)) if summed else flat
    return owners.add(start, added.reshape(-1, *row)).reshape(table.shape)


def _table_numbers(shape: Sequence[int], dims: Sequence[int]) -> jax.Array:
    """Which table each id of an array of `shape` is for, which has tables along `dims`."""
    number = jnp.zeros(shape, jnp.int32)
    for d in dims:
        number = number * shape[d] + jax.lax.broadcasted_iota(jnp.int32, shape, d)
    return number


def _keys(
    ids: jax.Array, tables: jax.Array, num_tables: int, own_rows: int, num_owners: int, *, is_moved: bool
) -> jax.Array:
    """Ids as numbers that sort by owner, then by the place in what the owner has; those that are no rows come last."""
    num_rows, own = own_rows * num_owners, num_tables * own_rows
    is_row = (ids >= 0) & (ids < num_rows)
    near = jnp.clip(ids, 0, num_rows - 1).astype(jnp.int32)
    keys = near // own_rows * own + tables * own_rows + near % own_rows
    return keys if is_moved else jnp.where(is_row, keys, num_owners * own)


def _fill_value(given: Any, dtype: jnp.dtype) -> Any:
    """What `FILL_OR_DROP` puts in place of rows that there are not (as `jax.lax.gather` documents it)."""
    if given is not None:
        return given
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    if dtype == jnp.bool_:
        return True
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max


class _Owners:
    """The ids of this device, sorted by owner, and the rounds in which they are exchanged.

    Attributes:
      exchange, num_owners: As for `exchanged`. own_rows: Rows that each owner has, of all tables.
      order: The place of each sorted id among the ids. number: Of each sorted id, among the distinct ones.
      distinct: The distinct ids, ascending, and what is no row behind them.
      start: Where those of each owner begin in `distinct`, and where the last ones end.
    """

    def __init__(self, exchange: IndexExchange, num_owners: int, own_rows: int, keys: jax.Array):
        self.exchange, self.num_owners, self.own_rows = exchange, num_owners, own_rows
        places = jax.lax.iota(jnp.int32, keys.shape[0])
        ordered, self.order = jax.lax.sort((keys, places), num_keys=1)
        is_first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
        self.number = jnp.cumsum(is_first.astype(jnp.int32)) - 1
        beyond = jnp.full_like(keys, num_owners * own_rows)
        self.distinct = beyond.at[self.number].set(ordered, indices_are_sorted=True)
        blocks = jnp.arange(num_owners + 1, dtype=jnp.int32) * own_rows
        self.start = jnp.searchsorted(self.distinct, blocks, method="compare_all").astype(jnp.int32)

    def look_up(self, table: jax.Array, filled: Any) -> jax.Array:
        """The row of each id, [ids, ...]."""
        slots, shape = self.exchange.slots, table.shape[1:]
        owner = jnp.minimum(self.distinct // self.own_rows, self.num_owners - 1)
        place = jax.lax.iota(jnp.int32, self.distinct.shape[0]) - self.start[owner]
        number = jnp.zeros_like(self.number).at[self.order].set(self.number, unique_indices=True)
        owner, place, is_row = owner[number], place[number], (self.distinct < self.num_owners * self.own_rows)[number]
        wide = lambda mask: mask.reshape(-1, *(1,) * len(shape))

        def one_round(round_: Any, asked: jax.Array, rows: jax.Array) -> jax.Array:
            found = table.at[asked].get(mode="clip")
            back = self._sent(found).reshape(self.num_owners * slots, *shape)
            now = place - round_ * slots
            is_here = is_row & (now >= 0) & (now < slots)
            return jnp.where(wide(is_here), back.at[owner * slots + now].get(mode="clip"), rows)

        empty = jnp.full((number.shape[0], *shape), filled, table.dtype)
        return self._rounds(one_round, empty)

    def add(self, table: jax.Array, added: jax.Array) -> jax.Array:
        """The table with the rows `added` for each id, [ids, ...]."""
        sums = jnp.zeros_like(added).at[self.number].add(added[self.order], indices_are_sorted=True)

        def one_round(round_: Any, asked: jax.Array, rows: jax.Array) -> jax.Array:
            return rows.at[asked].add(self._sent(sums.at[self._slots(round_)].get(mode="clip")), mode="drop")

        return self._rounds(one_round, table)

    def _rounds(self, one_round: Callable[[Any, jax.Array, jax.Array], jax.Array], value: jax.Array) -> jax.Array:
        """`value` after all rounds. Each is given its number, the ids that others ask for, and the value so far."""
        slots, asked = self.exchange.slots, self._asked(0)
        most = jnp.full((self.num_owners, 1), (self.start[1:] - self.start[:-1]).max(), asked.dtype)
        got = self._sent(jnp.concatenate([asked, most], axis=1))
        most, value = got[:, slots].max(), one_round(0, got[:, :slots], value)
        if slots >= min(self.number.shape[0], self.own_rows):
            return value  # there is a slot for every id that there can be

        def further(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            number, so_far = state
            return number + 1, one_round(number, self._sent(self._asked(number)), so_far)

        with jax.named_scope(FURTHER_ROUNDS):
            is_left = lambda state: state[0] * slots < most
            return jax.lax.while_loop(is_left, further, (jnp.int32(1), value))[1]

    def _slots(self, round_: Any) -> jax.Array:
        """[owners, slots] which of the distinct ids is in each slot; beyond those of the owner where there is none."""
        return self.start[:-1, None] + round_ * self.exchange.slots + jnp.arange(self.exchange.slots, dtype=jnp.int32)

    def _asked(self, round_: Any) -> jax.Array:
        """[owners, slots] the rows that this device asks each owner for, by their place there; one beyond for none."""
        place = self._slots(round_)
        first = jnp.arange(self.num_owners, dtype=jnp.int32)[:, None] * self.own_rows
        return jnp.where(place < self.start[1:, None], self.distinct.at[place].get(mode="clip") - first, self.own_rows)

    def _sent(self, value: jax.Array) -> jax.Array:
        """`value` with its o-th part sent to the o-th owner; what was received comes in the order of the senders."""
        return jax.lax.all_to_all(value, self.exchange.axes, 0, 0, tiled=True)
