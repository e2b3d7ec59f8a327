"""States in the memory of hosts: each process keeps its own part there, and a copy on a neighbouring host.

The files lie in a folder in memory that outlives the processes (`/dev/shm`), so that processes that are started anew
find the state of some step or two ago. The processes that read it may be fewer or more than those that wrote it.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import enum
import functools
import math
import os
import pathlib
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autoshard.checkpoints.agreement import all_together, from_all, from_first
from autoshard.checkpoints.checksums import checksum_of
from autoshard.checkpoints.disk import Tell
from autoshard.checkpoints.exchange import Peer, Server, new_key
from autoshard.checkpoints.layout import LeafShape, Piece, leaf_shapes, pieces_of, whole, words, words_sharding
from autoshard.checkpoints.slots import NUM_SLOTS, Layout, SlotReader, SlotWriter, checksums_of, layout_of, readers_in
from autoshard.checkpoints.staging import Staging
from autoshard.errors import AutoshardError, TransferError
from autoshard.folders import private_folder
from autoshard.launch.messages import Committed, NotSaved, Tier
from autoshard.transfer.peers import listening_host
from autoshard.transfer.routes import Box, boxes_of
from autoshard.transfer.shard_programs import impl_of

_RETRY_COMMITS = 100
"""Commits until what has failed is tried again: a memory that is full costs a warning now and then, not every step."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Process:
    """Another process of the run, or this one: its host, and where its server listens if there are several hosts."""

    host: str
    address: tuple[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Holding:
    """What a folder on some host holds: of which session, which steps, and in which parts."""

    host: str
    folder: str
    steps: tuple[int, ...]
    layout: Layout


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """Where a part of a leaf is: piece `number` in `folder` on `host`."""

    host: str
    folder: str
    number: int


class _Outcome(enum.Enum):
    """How far a commit came."""

    SAFE = enum.auto()
    HERE_ONLY = enum.auto()
    """Without the copy at the neighbour, which has failed before."""
    NEIGHBOUR_LOST = enum.auto()
    FAILED = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class _Signature:
    """What kind of state one layout holds: the pytree's structure, and each leaf's shape, type and sharding."""

    structure: Any
    leaves: tuple[tuple[tuple[int, ...], Any, Any], ...]

    @staticmethod
    def of(state: Any) -> "_Signature":
        """That of a state."""
        leaves, structure = jax.tree.flatten(state)
        return _Signature(structure, tuple(map(_leaf_signature, leaves)))

    def fits(self, other: "_Signature") -> bool:
        """Whether the other's states have the same parts in the same places, however their shardings are written."""
        return self.structure == other.structure and all(map(_fit, self.leaves, other.leaves))


@dataclasses.dataclass(slots=True)
class _Writing:
    """How the states of this session are written.

    Attributes:
        pieces: of this process, in the order of the layout.
        writer: the own slots.
        sole_bytes: of a slot, those that a neighbour is to keep too; 0 if there is none.
        peer: the neighbour on another host; None if there is none or it has failed.
        retry_in: commits until a neighbour that has failed is tried again.
    """

    pieces: tuple[Piece, ...]
    writer: SlotWriter
    sole_bytes: int
    peer: Peer | None = None
    retry_in: int = 0

    def drop_peer(self) -> None:
        """Ends the connection to the neighbour."""
        if self.peer is not None:
            self.peer.close()
        self.peer, self.retry_in = None, _RETRY_COMMITS


class MemoryTier:
    """The memory tier of one run. All processes make, use and close it together, on their main threads.

    A step is safe when every process has told `Committed` for it. Processes that are killed together lose nothing that
    is safe, as long as the hosts stay up; of hosts that are lost, no two that follow each other may be. Memory for
    three times the state is needed, and for three times what only one host holds at its neighbour; twice that for three
    commits where states begin to lie elsewhere than before.
    """

    def __init__(self, folder: pathlib.Path, host: str, run_id: str, tell: Tell, coordinator: str | None = None):
        """Opens the tier; nothing is read or written yet.

        Args:
            folder: in the memory of this host, for this user alone; processes of one host may share it.
            host: name of this host, which all processes in its memory give, and no others.
            run_id: tells this run from others whose states may lie in the same folder.
            tell: called by every process, on any thread: `Committed` when its part of a step and the copy at the
                neighbour are safe; `NotSaved` if that failed, after which it is tried again, at the latest a hundred
                commits later.
            coordinator: `host:port` as given to `jax.distributed.initialize`. Where there are several hosts, processes
                listen for each other on the interface that leads there; None as for `peers.host_towards_coordinator`.

        Raises:
            FolderError: the folder belongs to another user, or may be written to by one.
            TransferError: hosts cannot reach each other.
        """
        self._folder = private_folder(private_folder(folder) / checksum_of(run_id.encode()))
        self._host, self._tell = host, tell
        told = from_first(lambda: [new_key(), checksum_of(os.urandom(32)), time.time()])
        self._key, self._session, self._started_s = told
        hosts, self._server = from_all(host), None
        if len(set(hosts)) > 1:
            self._server = Server(listening_host(coordinator), self._key, self._folder)
        addresses = from_all(["", 0] if self._server is None else self._server.address)
        self._processes = [_Process(name, (at, port)) for name, (at, port) in zip(hosts, addresses, strict=True)]
        self._staging, self._signature, self._writing = Staging(), None, None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "memory-tier")
        self._pending: concurrent.futures.Future[_Outcome] | None = None
        self._num_committed = self._skip = 0
        self._peers: dict[tuple[str, int], Peer] = {}

    def close(self) -> None:
        """Ends threads and connections; what is kept stays."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._server is not None:
            self._server.close()
        for peer in self._peers.values():
            peer.close()
        if self._writing is not None:
            self._writing.drop_peer()

    def commit(self, step: int, state: Any) -> None:
        """Begins to keep this process's part of `state`; waits first until the one before is kept.

        Args:
            step: steps taken.
            state: a pytree of arrays; it may be donated as soon as this returns.
        """
        self.wait()
        self._begin_session_if_changed(_Signature.of(state))
        if self._skip:
            self._skip -= 1
            return
        leaves = [words(leaf) for leaf in jax.tree.leaves(state)]
        try:
            if self._writing is None:
                self._writing = self._begin_writing(state, leaves)
        except (OSError, AutoshardError) as error:
            self._writing, self._skip = None, _RETRY_COMMITS
            self._tell(NotSaved(step=step, why=f"in memory: {error}"))
            return
        writing = self._writing
        self._connect(writing, step)
        begin = functools.cache(writing.writer.begin)  # once, as soon as the state is there
        places = lambda: writing.writer.places(begin())
        staged = self._staging.begin(leaves, writing.pieces, places)

        def finish() -> _Outcome:
            self._staging.finish(staged, places)
            slot = begin()
            checksums = checksums_of(places())
            try:
                writing.writer.publish(step, slot, checksums)
            except (OSError, AutoshardError) as error:
                self._tell(NotSaved(step=step, why=f"in memory: {error}"))
                return _Outcome.FAILED
            if writing.sole_bytes:
                if writing.peer is None:
                    return _Outcome.HERE_ONLY
                try:
                    sole = writing.writer.bytes_of(slot)[: writing.sole_bytes]
                    writing.peer.copy(step, sole, checksums[: writing.writer.layout.num_sole])
                except TransferError as error:
                    self._tell(NotSaved(step=step, why=f"in the memory of another host: {error}"))
                    return _Outcome.NEIGHBOUR_LOST
            self._tell(Committed(step=step, tier=Tier.MEMORY))
            return _Outcome.SAFE

        self._pending = self._thread.submit(finish)

    def wait(self) -> None:
        """Waits until this process's part of the last committed step is kept, here and at the neighbour."""
        if self._pending is None:
            return
        outcome, self._pending = self._pending.result(), None
        if self._writing is None:
            return
        if outcome is _Outcome.FAILED:
            if self._writing.writer.is_there:  # older states are, too, and this one is all that cannot be written
                self._skip = _RETRY_COMMITS
            else:
                self._stop_writing()
            return
        if outcome is _Outcome.NEIGHBOUR_LOST:
            self._writing.drop_peer()
        self._num_committed += 1
        if self._num_committed == NUM_SLOTS:  # by now all processes have one of them
            self._remove_sessions_before()

    def latest_step(self) -> int | None:
        """The newest step that is completely there, before its bytes are looked at; None if there is none."""
        holdings = self._holdings()
        return next((step for step, _ in _candidates(holdings, None)), None)

    def restore(self, like: Any, at_least: int = 0) -> tuple[int, Any] | None:
        """The newest state that all processes together have whole, in the shardings asked for.

        Args:
            like: the state as arrays or as `jax.ShapeDtypeStruct`s, with the shapes, types and shardings wanted.
            at_least: a state of fewer steps is not wanted.

        Returns:
            Its step and the state; None if there is none, in which case what is there is removed.
        """
        self.wait()
        holdings, wanted = self._holdings(), leaf_shapes(like)
        readers = {reader.name: reader for reader in readers_in(self._folder)}
        for step, session in _candidates(holdings, wanted):
            if step < at_least:
                break
            damaged = self._damaged(holdings, readers, step, session)
            sources = _sources(holdings, step, session, damaged)
            if not _is_complete(sources, wanted):
                continue
            found, failure = None, ""
            try:
                found = self._assemble(like, sources, readers, step)
            except (OSError, AutoshardError) as error:
                failure = str(error)
            if not any(from_all(failure)):
                self._remove_but(readers, step, session)
                return step, found
        self._remove_sessions_before()
        return None

    def _begin_session_if_changed(self, signature: _Signature) -> None:
        """Begins another session, in all processes alike, if states are not what they were.

        What was written before stays until all have some of the new ones: it is safe, and nothing else is yet.
        """
        if self._signature is not None and not self._signature.fits(signature):
            self._stop_writing()
            self._session = checksum_of(f"what follows {self._session}".encode())
            self._num_committed = self._skip = 0
        self._signature = signature

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.drop_peer()
        self._writing = None

    def _begin_writing(self, state: Any, leaves: Sequence[Any]) -> _Writing:
        """Makes the slots of this process."""
        host_of = {process: one.host for process, one in enumerate(self._processes)}
        pieces = pieces_of(leaves, host_of)
        hosts = [_hosts_with(leaf, host_of) for leaf in leaves]
        sole = [piece for piece in pieces if len(hosts[piece.leaf][piece.box]) == 1]
        shared = [piece for piece in pieces if piece not in set(sole)]
        layout = layout_of(self._session, self._started_s, leaf_shapes(state), sole, shared)
        name = f"{self._session}-{jax.process_index()}"
        shutil.rmtree(self._folder / name, ignore_errors=True)
        writer = SlotWriter(self._folder / name, layout)
        has_neighbour = self._neighbour() is not None
        return _Writing((*sole, *shared), writer, layout.sole().slot_bytes() if has_neighbour else 0)

    def _connect(self, writing: _Writing, step: int) -> None:
        """Asks the neighbour to keep copies, unless it does, or has failed not long ago."""
        neighbour = self._neighbour()
        if neighbour is None or not writing.sole_bytes or writing.peer is not None:
            return
        if writing.retry_in:
            writing.retry_in -= 1
            return
        try:
            writing.peer = Peer(neighbour.address, self._key)
            writing.peer.keep(f"{self._session}-{jax.process_index()}-copy", writing.writer.layout.sole())
        except TransferError as error:
            writing.drop_peer()
            self._tell(NotSaved(step=step, why=f"in the memory of another host: {error}"))

    def _neighbour(self) -> _Process | None:
        """The process of the next host that keeps this one's copies; None if there is no other host."""
        hosts = list(dict.fromkeys(one.host for one in self._processes))
        if len(hosts) == 1:
            return None
        mine = [n for n, one in enumerate(self._processes) if one.host == self._host].index(jax.process_index())
        following = hosts[(hosts.index(self._host) + 1) % len(hosts)]
        theirs = [one for one in self._processes if one.host == following]
        return theirs[mine % len(theirs)]

    def _of_host(self) -> list[int]:
        """The processes of this host."""
        return [n for n, one in enumerate(self._processes) if one.host == self._host]

    def _holdings(self) -> list[_Holding]:
        """What lies on all hosts; each host's first process tells."""
        mine: list[list[Any]] = []
        if self._of_host()[0] == jax.process_index():
            mine = [
                [self._host, reader.name, reader.steps, reader.layout.model_dump(mode="json")]
                for reader in readers_in(self._folder)
            ]
        return [
            _Holding(host, folder, tuple(steps), Layout.model_validate(layout))
            for host, folder, steps, layout in all_together(from_all(mine))
        ]

    def _damaged(
        self, holdings: Sequence[_Holding], readers: Mapping[str, SlotReader], step: int, session: str
    ) -> set[_Source]:
        """The pieces of a step that are not what was written; the processes of a host share the work."""
        here, found = self._of_host(), []
        for holding in holdings:
            if holding.host == self._host and step in holding.steps and holding.layout.session == session:
                numbers = range(len(holding.layout.pieces))[here.index(jax.process_index()) :: len(here)]
                reader = readers.get(holding.folder)
                found += [
                    [holding.host, holding.folder, number]
                    for number in (numbers if reader is None else reader.damaged(step, numbers))
                ]
        return {_Source(*one) for one in all_together(from_all(found))}

    def _assemble(
        self,
        like: Any,
        sources: Mapping[tuple[int, Box], Sequence[_Source]],
        readers: Mapping[str, SlotReader],
        step: int,
    ) -> Any:
        """The state, made of pieces of this host and of others.

        Raises:
            TransferError: a piece does not arrive.
            FileFormatError, OSError: one of this host cannot be read any more.
        """
        leaves, structure = jax.tree.flatten(like)
        of_leaf: dict[int, list[tuple[Box, Sequence[_Source]]]] = collections.defaultdict(list)
        for (number, box), places in sources.items():
            of_leaf[number].append((box, places))

        def read(number: int, leaf: Any, box: Box) -> np.ndarray:
            data = np.empty(box.shape, leaf.dtype)
            for held, places in of_leaf[number]:
                part = box.overlap(held)
                if part is None:
                    continue
                inside = part.inside(box)
                data[tuple(map(slice, inside.starts, inside.stops))] = self._part(
                    places, readers, step, part, leaf.dtype
                )
            return data

        made = [
            _placed(leaf, lambda shape, box, number=number: read(number, shape, box))
            for number, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, made)

    def _part(
        self, places: Sequence[_Source], readers: Mapping[str, SlotReader], step: int, part: Box, dtype: Any
    ) -> np.ndarray:
        """A part of a piece, from this host if it has it."""
        for place in places:
            if place.host == self._host:
                return readers[place.folder].read(step, place.number, part)
        place = places[jax.process_index() % len(places)]
        holders = [one for one in self._processes if one.host == place.host]
        if not holders:
            raise TransferError(f"No process runs on the host {place.host}, which holds a piece of step {step}.")
        holder = holders[(place.number + jax.process_index()) % len(holders)]
        if holder.address not in self._peers:
            self._peers[holder.address] = Peer(holder.address, self._key)
        data = self._peers[holder.address].fetch(place.folder, step, place.number, part)
        return data.view(dtype).reshape(part.shape)

    def _remove_but(self, readers: Mapping[str, SlotReader], step: int, session: str) -> None:
        """Frees what earlier sessions left on this host, but for the step that was restored."""
        if self._of_host()[0] != jax.process_index():
            return
        for path in self._folder.iterdir():
            reader = readers.get(path.name)
            if reader is not None and reader.layout.session == session and step in reader.steps:
                with contextlib.suppress(OSError, AutoshardError):
                    reader.drop_all_but(step)
            elif not path.name.startswith(self._session):
                shutil.rmtree(path, ignore_errors=True)

    def _remove_sessions_before(self) -> None:
        """Frees what earlier sessions left on this host."""
        if self._of_host()[0] != jax.process_index():
            return
        for path in self._folder.iterdir():
            if not path.name.startswith(self._session):
                shutil.rmtree(path, ignore_errors=True)


def _candidates(holdings: Sequence[_Holding], wanted: Sequence[LeafShape] | None) -> list[tuple[int, str]]:
    """Steps and sessions that are complete if no byte is damaged, newest first; of the leaves `wanted`, if given."""
    started_s = {holding.layout.session: holding.layout.started_s for holding in holdings}
    found = {(step, holding.layout.session) for holding in holdings for step in holding.steps}
    complete = []
    for step, session in sorted(found, key=lambda one: (one[0], started_s[one[1]]), reverse=True):
        leaves = next(h.layout.leaves for h in holdings if h.layout.session == session)
        shapes = [leaf.leaf for leaf in leaves]
        if wanted is not None and list(wanted) != shapes:
            continue
        if _is_complete(_sources(holdings, step, session, set()), shapes):
            complete.append((step, session))
    return complete


def _sources(
    holdings: Sequence[_Holding], step: int, session: str, damaged: set[_Source]
) -> dict[tuple[int, Box], list[_Source]]:
    """Where each part of each leaf is after `step`, as the processes of one session wrote it."""
    found: dict[tuple[int, Box], list[_Source]] = {}
    for holding in holdings:
        if holding.layout.session == session and step in holding.steps:
            for number, piece in enumerate(holding.layout.pieces):
                source = _Source(holding.host, holding.folder, number)
                if source not in damaged:
                    found.setdefault((piece.leaf, piece.box), []).append(source)
    return found


def _is_complete(sources: Mapping[tuple[int, Box], object], leaves: Sequence[LeafShape]) -> bool:
    """Whether every element of every leaf is there; parts of one session do not overlap."""
    held = collections.Counter[int]()
    for number, box in sources:
        held[number] += box.size
    return all(held[number] == math.prod(leaf.shape) for number, leaf in enumerate(leaves))


def _hosts_with(leaf: Any, host_of: Mapping[int, str]) -> dict[Box, set[str]]:
    """The hosts that hold each part of a leaf; all hosts for what is no `jax.Array`."""
    if not isinstance(leaf, jax.Array):
        return {whole(np.shape(leaf)): set(host_of.values())}
    found: dict[Box, set[str]] = {}
    for device, box in boxes_of(leaf.shape, leaf.sharding).items():
        found.setdefault(box, set()).add(host_of[device.process_index])
    return found


def _leaf_signature(leaf: Any) -> tuple[tuple[int, ...], Any, Any]:
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, leaf.sharding
    return np.shape(leaf), np.asarray(leaf).dtype, None


def _fit(one: tuple[tuple[int, ...], Any, Any], other: tuple[tuple[int, ...], Any, Any]) -> bool:
    """Whether two leaves' shapes, types and shardings are the same."""
    (shape, dtype, sharding), (other_shape, other_dtype, other_sharding) = one, other
    if shape != other_shape or dtype != other_dtype:
        return False
    if sharding is None or other_sharding is None or sharding == other_sharding:
        return sharding == other_sharding
    return sharding.is_equivalent_to(other_sharding, len(shape))


def _placed(leaf: Any, read: Any) -> Any:
    """A leaf as `like` describes it, made of what `read` gives for a part of it."""
    described = words(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)))
    is_key = described.dtype != leaf.dtype
    sharding = words_sharding(leaf.sharding, leaf.shape) if is_key else getattr(leaf, "sharding", None)
    if sharding is None:
        array = jax.numpy.asarray(read(described, whole(described.shape)))
    else:
        boxes = boxes_of(described.shape, sharding)
        made: dict[Box, np.ndarray] = {}
        parts = []
        for device, box in boxes.items():
            if device.process_index != jax.process_index():
                continue
            if box not in made:
                made[box] = read(described, box)
            where = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            parts.append(jax.device_put(made[box], where, may_alias=False))
        array = jax.make_array_from_single_device_arrays(tuple(described.shape), sharding, parts, dtype=described.dtype)
    return jax.random.wrap_key_data(array, impl=impl_of(leaf.dtype)) if is_key else array
