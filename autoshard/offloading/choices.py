"""What each place costs a table: the time it takes of every resource in a step, and memory at every level.

Of N accelerators in M nodes, a table of R rows is read by I ids in a step, I / N on each device. With w bytes of a row
and s bytes of a row with the optimizer's state, and distinct(I) the mean number of distinct rows among them
(`autoshard.cost.id_distribution`):

    whole       on each device: R (s + w) bytes; look-up and gradient move 5 I/N w bytes, the gradients of all rows are
                reduced (R w) with those of the dense part, and all rows are updated
    by column   R s / N bytes; ids are gathered (4 I), each device looks its part of each row up (5 I w/N bytes), parts
                and their gradients are exchanged (all-to-all of I w / N each)
    by row      R s / N bytes; ids and rows of distinct ids are exchanged, and gradients (`autoshard.cost.lookups`), and
                distinct(I) / N rows are updated (of both, all R / N rows where the step updates whole tables, whose
                gradients of R w / N bytes are then there, too)
    host        R s / M bytes of host memory; a CPU finds I/M ids, gathers and updates distinct(I) / M rows, copies
                distinct(I/N) rows to each of its accelerators and adds up as many gradients; each link carries
                distinct(I/N) w bytes down and up; rows of other hosts cross the network
    pooled      as on the host, where the loss sums the rows to B vectors: the host's own thread (XLA on its CPUs) reads
                the rows of all I ids for the sums, reads and writes their gradients (3 I rows), and updates as many
                rows as a batch has places for, min(I, R); each link carries B w / N bytes down and up; of one host, in
                no mode that patches
    layers      as pooled, of all tables of a cut together: the host makes a value of V bytes by F floating-point
                operations, makes it again for its gradients, which are 2 F more (XLA on all CPUs, 4 F in all, in turn
                with all else that this thread does); each link carries V / N bytes down and up. Accelerators are spared
                3 F / N operations, counted at their peak: no less
    hot rows    the k most frequent rows are a table by row of their own, all of which is updated (k s / N), the others
                one on the host, which has places for all: both are Zipf tables, the cold rows read are distinct(I) less
                those distinct among the hot ones

Random rows are read in sectors of 32 bytes on accelerators and in lines of 64 bytes on CPUs. Tables share one exchange
of each kind, whose latencies count once (`exchange_fixed_s`), not here.
"""

import dataclasses
import enum
import math
from collections.abc import Callable

from autoshard.cost.collectives import Collective, all_gather, all_reduce, all_to_all
from autoshard.cost.lookups import Lookups, exchange_of
from autoshard.host_tables.options import Mode
from autoshard.offloading.situation import HostCut, Situation, TableUse, lines

_ID_BYTES = 4
_SECTOR_BYTES = 32
HOT_SHARES = tuple(2.0**-n for n in (1, 2, 3, 4, 6, 8, 10))
"""Shares of the rows that may be kept on accelerators as hot ones."""
_FEWEST_HOT = 1024


class Place(enum.Enum):
    """Where a table lives."""

    WHOLE = "accelerators, whole"
    BY_COLUMN = "accelerators, by column"
    BY_ROW = "accelerators, by row"
    HOST = "host memory"
    POOLED = "host memory, pooled there"
    LAYERS = "host memory, layers there"
    HOT_ROWS = "hot rows on accelerators"

    @property
    def is_on_host(self) -> bool:
        """Whether host memory has rows of it."""
        return self in (Place.HOST, Place.POOLED, Place.LAYERS, Place.HOT_ROWS)

    def fits_mode(self, mode: Mode) -> bool:
        """Whether steps can follow each other so: what is made of rows that are in flight cannot be patched."""
        return self not in (Place.POOLED, Place.LAYERS) or mode != "pipelined"

    @property
    def is_exchanged(self) -> bool:
        """Whether accelerators send each other rows of it."""
        return self in (Place.BY_COLUMN, Place.BY_ROW, Place.HOT_ROWS)


@dataclasses.dataclass(frozen=True, slots=True)
class Loads:
    """What a step takes of each resource, in seconds of the busiest; they add up over tables.

    Attributes:
      accelerator_s: Of each accelerator, collectives included.
      cpu_s: Of all CPUs of a host together, as if there were one.
      host_memory_s: Of the memory of a host.
      thread_s: Of the one thread of a host that hands batches to its workers.
      down_s, up_s: Of the link to each accelerator, in either direction.
      network_s: Of the network between hosts.
    """

    accelerator_s: float = 0.0
    cpu_s: float = 0.0
    host_memory_s: float = 0.0
    down_s: float = 0.0
    up_s: float = 0.0
    network_s: float = 0.0
    thread_s: float = 0.0

    def __add__(self, other: "Loads") -> "Loads":
        return Loads(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A table at a place.

    Attributes:
      place: Where. hot_rows: Rows on accelerators, where these are the hot ones.
      cut: Number of the cut in front of which the host's layers are; all its tables have the same, or none has. What is
        paid once for all of them is paid by its first.
      loads: Of a step.
      device_bytes: On each accelerator. host_bytes: On each host.
      in_flight_bytes, host_in_flight_bytes: The same for each batch that is under way at once.
      patched_s: Of each accelerator, for each batch under way, if its rows must have the updates of those before.
    """

    place: Place
    loads: Loads
    device_bytes: float = 0.0
    host_bytes: float = 0.0
    in_flight_bytes: float = 0.0
    host_in_flight_bytes: float = 0.0
    patched_s: float = 0.0
    hot_rows: int = 0
    cut: int | None = None


def choices_of(
    table: TableUse, s: Situation, has_hot_rows: bool = True, has_pooling: bool = False, has_layers: bool = False
) -> list[Choice]:
    """Every place of a table.

    Args:
      table: The table. s: What it is placed on.
      has_hot_rows: Whether hot rows may live apart from cold ones.
      has_pooling: Whether the host may sum rows. has_layers: Whether dense layers may run there.
    """
    found = [whole(table, s), by_row(table, s)]
    if table.row_bytes % (4 * s.num_devices) == 0:
        found.append(by_column(table, s))
    found.append(on_host(table, s))
    if has_pooling and table.num_sums and s.num_nodes == 1:
        found.append(pooled(table, s))
    if s.num_nodes == 1:
        allowed = [n for n, cut in enumerate(s.cuts) if table.path in cut.tables]
        found += [layers(table, n, s) for n in allowed if (has_layers if s.cuts[n].params else has_pooling)]
    if has_hot_rows and table.ids.zipf_exponent > 0:
        counts = dict.fromkeys(int(table.num_rows * share) for share in HOT_SHARES)
        found += [hot_rows(table, k, s) for k in counts if k >= _FEWEST_HOT]
    return found


def whole(table: TableUse, s: Situation) -> Choice:
    """The table on every accelerator; rows are looked up where the examples are."""
    own = table.num_ids / s.num_devices
    moved = 5 * own * _sectors(table.row_bytes) + table.num_rows * (2 * table.state_bytes + table.row_bytes)
    reduced = _sending_s(all_reduce(s.mesh.axes, table.num_rows * table.row_bytes))
    bytes_ = table.num_rows * (table.state_bytes + table.row_bytes)
    return Choice(Place.WHOLE, Loads(_moved_s(moved, s) + reduced), bytes_)


def by_column(table: TableUse, s: Situation) -> Choice:
    """Some columns on each accelerator, for all examples."""
    n, ids = s.num_devices, table.num_ids
    width, state = table.row_bytes / n, table.state_bytes / n
    moved = 5 * ids * _sectors(width)
    moved += _all_rows(table, s) if s.updates_all_rows else 2 * _distinct(table, ids) * _sectors(state)
    sent = _sending_s(all_gather(s.mesh.axes, ids * _ID_BYTES)) + 2 * _sending_s(all_to_all(s.mesh.axes, ids * width))
    bytes_ = table.size_bytes / n + _gradient_bytes(table, s)
    return Choice(Place.BY_COLUMN, Loads(_moved_s(moved, s) + sent), bytes_, 2 * ids * width)


def by_row(table: TableUse, s: Situation) -> Choice:
    """Some rows on each accelerator, exchanged for ids."""
    n, own = s.num_devices, max(round(table.num_ids / s.num_devices), 1)
    exchange = exchange_of(n, own, 1, table.num_rows, _sectors(table.row_bytes), Lookups(table.ids))
    updated = table.ids.busiest_owner(table.num_ids, table.num_rows, n)
    moved = sum(exchange.moved_bytes(is_update=is_update) for is_update in (False, True))
    ids, rows = exchange.collectives(s.mesh.axes)
    sent = _sending_s(ids) + 2 * _sending_s(rows)
    moved += _all_rows(table, s) if s.updates_all_rows else 2 * updated * _sectors(table.state_bytes)
    device_s = _moved_s(moved, s)
    bytes_ = math.ceil(table.num_rows / n) * table.state_bytes + exchange.buffer_bytes(is_update=True)
    bytes_ += _gradient_bytes(table, s)
    return Choice(Place.BY_ROW, Loads(device_s + sent), bytes_)


def on_host(table: TableUse, s: Situation) -> Choice:
    """All rows in host memory, shared out over hosts; the accelerators get the rows of each batch."""
    return _cold(table, s, table.num_ids, lambda ids: _distinct(table, ids), table.num_rows)


def pooled(table: TableUse, s: Situation) -> Choice:
    """All rows in the memory of the one host, which sums them; the accelerators get the sums."""
    return _read_at_host(table, s, Place.POOLED, table.num_sums * table.row_bytes)


def layers(table: TableUse, number: int, s: Situation) -> Choice:
    """All rows in the memory of the one host, where layers read them; the accelerators get what is made in front of a
    cut, with the rows of its other tables.

    Args:
      table: Of the cut. number: Of the cut. s: What it is placed on.
    """
    cut = s.cuts[number]
    if table.path != cut.tables[0]:
        return dataclasses.replace(_read_at_host(table, s, Place.LAYERS, 0), cut=number)
    own = _read_at_host(table, s, Place.LAYERS, cut.value_bytes)
    return dataclasses.replace(
        own,
        loads=own.loads + Loads(accelerator_s=-spared_s(cut, s), thread_s=layers_s(cut, s)),
        host_bytes=own.host_bytes + cut.state_bytes,
        cut=number,
    )


def layers_s(cut: HostCut, s: Situation) -> float:
    """Seconds of the host for the layers in front of a cut."""
    return 4 * cut.flops / s.host_flops_per_s + 2 * cut.state_bytes / s.host_bytes_per_s


def spared_s(cut: HostCut, s: Situation) -> float:
    """Seconds of each accelerator that these layers would take there at least."""
    return 3 * cut.flops / s.num_devices / s.mesh.device_type.matmul_flops_per_s(cut.dtype)


def _read_at_host(table: TableUse, s: Situation, place: Place, value_bytes: int) -> Choice:
    """All rows in the memory of the one host, where they are read and updated; accelerators get so many bytes of what
    is made of them.
    """
    cold, width, state = on_host(table, s), table.row_bytes, table.state_bytes
    rows, sent_bytes = _distinct(table, table.num_ids), value_bytes / s.num_devices
    cpu_s = table.num_ids * s.rates.id_s + rows * (lines(width) + 2 * lines(state)) * s.rates.line_s
    places = min(table.num_ids, table.num_rows)
    alone_s = (3 * table.num_ids * lines(width) + 2 * places * lines(state)) * s.rates.line_s
    moved = rows * (width + 2 * state) + 2 * places * state + 3 * table.num_ids * width
    sent_s = sent_bytes / s.to_device.bandwidth_bytes_per_s
    device_s, memory_s = _moved_s(2 * sent_bytes, s) if value_bytes else 0.0, moved / s.host_bytes_per_s
    return dataclasses.replace(
        cold,
        place=place,
        loads=Loads(device_s, cpu_s, memory_s, sent_s, sent_s, thread_s=s.rates.table_s + alone_s),
        in_flight_bytes=2 * sent_bytes,
        host_in_flight_bytes=2 * places * state,
        patched_s=0.0,
    )


def hot_rows(table: TableUse, count: int, s: Situation) -> Choice:
    """The `count` most frequent rows by row on accelerators, the others on hosts."""
    share = table.ids.hottest_share(count, table.num_rows)
    hot = dataclasses.replace(table, num_rows=count, num_ids=round(table.num_ids * share))
    rest = lambda ids: max(_distinct(table, ids) - _distinct(hot, ids * share), 0.0)
    cold = _cold(table, s, table.num_ids * (1 - share), rest, table.num_rows)
    here = by_row(hot, dataclasses.replace(s, updates_all_rows=True))
    found_s = table.num_ids / s.num_nodes * s.rates.id_s  # every id is looked up among the hot ones
    return dataclasses.replace(
        cold,
        place=Place.HOT_ROWS,
        hot_rows=count,
        loads=cold.loads + here.loads + Loads(cpu_s=found_s),
        device_bytes=cold.device_bytes + here.device_bytes,
    )


def _cold(table: TableUse, s: Situation, num_ids: float, distinct: Callable[[float], float], num_rows: int) -> Choice:
    """Rows in host memory. `num_ids`: of a step, that ask for them; `distinct`: how many a batch of ids reads."""
    n, nodes, width, state = s.num_devices, s.num_nodes, table.row_bytes, table.state_bytes
    all_ids = table.num_ids
    of_all, of_device = distinct(all_ids), distinct(all_ids / n)
    of_node = s.devices_per_node * of_device
    touched = of_all / nodes
    cpu_s = num_ids / nodes * s.rates.id_s
    cpu_s += (touched * (lines(width) + 2 * lines(state)) + 3 * of_node * lines(width)) * s.rates.line_s
    moved = touched * (width + 2 * state) + 4 * of_node * width
    sent_s = of_device * width / s.to_device.bandwidth_bytes_per_s
    network_s = 0.0
    if s.between_nodes is not None:
        network_s = of_device * width * (nodes - 1) / nodes / s.between_nodes.bandwidth_bytes_per_s
    device_s = _moved_s(5 * num_ids / n * _sectors(width) + 2 * of_device * _sectors(width), s)
    loads = Loads(device_s, cpu_s, moved / s.host_bytes_per_s, sent_s, sent_s, 2 * network_s, s.rates.table_s)
    again = max(of_device + distinct(all_ids / n) - distinct(2 * all_ids / n), 0.0)
    return Choice(
        Place.HOST,
        loads,
        host_bytes=num_rows * state / nodes,
        in_flight_bytes=2 * of_device * state,
        host_in_flight_bytes=2 * of_node * state,
        patched_s=_moved_s(3 * again * _sectors(state), s),
    )


def _all_rows(table: TableUse, s: Situation) -> float:
    """Bytes that the update of all rows of a table, split over all accelerators, moves in the memory of each."""
    return math.ceil(table.num_rows / s.num_devices) * (2 * table.state_bytes + table.row_bytes)


def _gradient_bytes(table: TableUse, s: Situation) -> float:
    """Of the gradient of a table that is split over all accelerators, on each, where its update goes over all rows."""
    return math.ceil(table.num_rows / s.num_devices) * table.row_bytes if s.updates_all_rows else 0.0


def exchange_fixed_s(s: Situation) -> float:
    """Latencies and launches of the exchanges of a step: of ids, of rows, of gradients."""
    launch_s = s.mesh.device_type.launch_overhead_s
    return 3 * (all_to_all(s.mesh.axes, 1.0).fixed_s + launch_s)


def _sending_s(collective: Collective) -> float:
    """The time of a collective that is joined with others."""
    return collective.time_s - collective.fixed_s


def _distinct(table: TableUse, num_ids: float) -> float:
    return table.ids.expected_distinct(num_ids, table.num_rows)


def _moved_s(moved_bytes: float, s: Situation) -> float:
    """Time that an accelerator's memory takes, and one launch."""
    device = s.mesh.device_type
    return moved_bytes / device.memory_bytes_per_s + device.launch_overhead_s


def _sectors(size_bytes: float) -> float:
    """Bytes that a random read of so many takes."""
    return math.ceil(size_bytes / _SECTOR_BYTES) * _SECTOR_BYTES
