"""Checkpoints on disk: Orbax writes them beside the steps that follow, and a manifest tells what they must be.

A checkpoint counts once its folder has the name of its step: the manifest is in it by then. What a killed run left
half written has another name, and is removed when the folder is next opened.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import json
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
import pydantic

from autoshard.checkpoints.agreement import all_together, from_all, from_first
from autoshard.checkpoints.checksums import checksum_of, checksum_of_file, in_threads, share_of
from autoshard.checkpoints.layout import LeafShape, Piece, host_view, leaf_shapes, named_leaves, pieces_of
from autoshard.checkpoints.manifest import (
    MANIFEST,
    VERSION,
    FileEntry,
    LeafEntry,
    Manifest,
    ShardEntry,
    write_manifest,
)
from autoshard.checkpoints.sealed import MAX_BYTES, seal_of
from autoshard.checkpoints.spread_out import SpreadOut
from autoshard.checkpoints.verification import CORRUPT, Fault, damaged_files, files_in, leaf_difference, read_or_fault
from autoshard.errors import ConfigError, FileFormatError, TrainingError
from autoshard.files import read_json, write_text_atomically
from autoshard.launch.messages import Committed, NotSaved, Rejected, Tier

STATE, RUN = "state", "run"
"""Items of a checkpoint: the training state, and what identifies the run."""

_HALF_WRITTEN = (".orbax-checkpoint-tmp", ".manifest-tmp", ".delete-tmp")
"""What follows the step in the names of folders that a killed run leaves: Orbax's, and our two."""

_MARGIN_BYTES = 16 << 20
"""Free space that a checkpoint needs beside its tensors, for descriptions and indices; and a hundredth of them."""

_SAVE_LIMIT_S = 1200
"""Time that all processes have to write one checkpoint: Orbax's own default."""

_PART_LIMIT_S = 300
"""Time that the first process waits for what the others tell about their shards, after all tensors are written."""

_POLL_S = 0.05

Tell = Callable[[Committed | Rejected | NotSaved], None]


class _Shards(pydantic.RootModel[tuple[tuple[int, ShardEntry], ...]]):
    """Checksums of the shards that one process looks after, each with the number of its leaf."""


class _Files(pydantic.RootModel[tuple[FileEntry, ...]]):
    """Files of a checkpoint that one process has read."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Saving:
    """A checkpoint that is being written.

    Attributes:
        step: its step.
        done: Orbax has written it, and it has its name.
        told: in other processes than the first: that one knows what this process knows of the checkpoint.
        stop: set when nobody waits for it any more.
    """

    step: int
    done: "concurrent.futures.Future[None]"
    told: "concurrent.futures.Future[None] | None"
    stop: threading.Event

    def failure(self) -> BaseException | None:
        """What went wrong here, as far as it is known."""
        known = [future.exception() for future in (self.done, self.told) if future is not None and future.done()]
        return next((error for error in known if error is not None), None)


@dataclasses.dataclass(frozen=True, slots=True)
class _Content:
    """What the manifest of the checkpoint that is being written will say of its tensors, as far as is known here."""

    step: int
    run: str
    leaves: tuple[LeafShape, ...]
    shards: tuple[tuple[int, ShardEntry], ...]


class DiskTier:
    """The checkpoints of one folder. All processes must make, use and close it together."""

    def __init__(self, folder: pathlib.Path, keep: int, tell: Tell):
        """Opens `folder`; the first process removes what killed runs left half written.

        Args:
            folder: made if it is missing; the same for all processes.
            keep: the newest checkpoints that stay.
            tell: called by the first process, on any thread, with what becomes of checkpoints.

        Raises:
            ConfigError: the folder cannot be made or cleaned.
        """
        self._folder, self._keep, self._tell = folder.absolute(), keep, tell
        self._saving: _Saving | None = None
        self._threads = _threads()
        self._orbax = self._checkpointer()
        self._writing: _Content | None = None
        self._spread_out = SpreadOut()
        if failure := from_first(self._clean):
            raise ConfigError(f"The folder of checkpoints {folder} cannot be used: {failure}. Choose another.")

    @property
    def folder(self) -> pathlib.Path:
        """Where the checkpoints are."""
        return self._folder

    def _clean(self) -> str:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in self._folder.iterdir():
                step = path.name.partition(".")[0]
                if step.isdecimal() and path.name.startswith(tuple(step + end for end in _HALF_WRITTEN)):
                    shutil.rmtree(path)
        except OSError as error:
            return str(error)
        return ""

    def _checkpointer(self) -> ocp.AsyncCheckpointer:
        return ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                **{STATE: ocp.StandardCheckpointHandler(), RUN: ocp.JsonCheckpointHandler()}
            ),
            async_options=ocp.AsyncOptions(
                timeout_secs=_SAVE_LIMIT_S,
                post_finalization_callback=self._before_it_takes_its_name,
                create_directories_asynchronously=False,  # else a folder that cannot be made is told after minutes
            ),
        )

    def steps(self) -> list[int]:
        """The steps of the checkpoints that count, oldest first, of the first process's view of the folder."""
        return from_first(self._steps)

    def _steps(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        return sorted(int(p.name) for p in self._folder.iterdir() if p.name.isdecimal() and p.is_dir())

    def save(self, step: int, state: Any, run: Mapping[str, Any]) -> None:
        """Begins to write `state` as the checkpoint of `step`; does nothing if that one exists.

        Too little space for it is told as `NotSaved`, now or later.

        Args:
            step: steps taken.
            state: a pytree of arrays; it may be donated as soon as this returns.
            run: what identifies the run, as plain data.

        Raises:
            TrainingError: the one before could not be written, for another reason than a full disk.
            TransferError: another process ended while parts of the state were sent to all.
        """
        self.wait()
        leaves = leaf_shapes(state)
        need_bytes = sum(leaf.size_bytes for leaf in leaves)
        answer = from_first(lambda: self._obstacle(step, need_bytes))
        if answer is not None:
            if answer:
                self._tell_first(NotSaved(step=step, why=answer))
            return
        state = self._spread_out.moved(state, state, self._spread_out.laid_out(state))
        arrays = [leaf for _, leaf in named_leaves(state)]

        def shard(piece: Any) -> tuple[int, ShardEntry]:
            checksum = checksum_of(host_view(arrays[piece.leaf], piece.shard))
            return piece.leaf, ShardEntry(start=piece.box.starts, stop=piece.box.stops, checksum=checksum)

        shards = tuple(in_threads(shard, pieces_of(arrays)))
        self._writing = _Content(step, seal_of(dict(run)), leaves, shards)
        path, stop = self._folder / str(step), threading.Event()
        items = {STATE: ocp.args.StandardSave(_boxed(state)), RUN: ocp.args.JsonSave(dict(run))}
        try:
            self._orbax.save(path, args=ocp.args.Composite(**items), custom_metadata={MANIFEST: VERSION})
        except Exception as error:  # Orbax raises whatever its writers raise, down to plain Exception
            done: concurrent.futures.Future[None] = concurrent.futures.Future()
            done.set_exception(error)
            self._saving = _Saving(step, done, None, stop)
            self.wait()
            return
        told = self._threads.submit(self._tell_the_first, self._writing, stop) if jax.process_index() else None
        self._saving = _Saving(step, self._threads.submit(self._finish, step), told, stop)

    def wait(self) -> None:
        """Waits until what was saved is on disk; all processes must call this together.

        Raises:
            TrainingError: it cannot be written, for another reason than a full disk.
        """
        if self._saving is None:
            return
        saving, wait_s = self._saving, _POLL_S / 4
        while True:  # one that fails must not leave the others waiting for it inside Orbax
            concurrent.futures.wait([saving.done], timeout=None if jax.process_count() == 1 else wait_s)
            failure = saving.failure()
            here = [saving.done.done(), None if failure is None else _reason(failure), _is_full(failure)]
            states = from_all(here)
            if all(done for done, _, _ in states) or any(reason is not None for _, reason, _ in states):
                break
            wait_s = min(2 * wait_s, 4 * _POLL_S)
        self._saving, self._writing = None, None
        saving.stop.set()
        failed = [(process, reason, full) for process, (_, reason, full) in enumerate(states) if reason is not None]
        if not failed:
            return
        if not all(done for done, _, _ in states):
            # Threads that still wait for the process that failed end by themselves, at Orbax's time limit.
            self._orbax, self._threads = self._checkpointer(), _threads()
        from_first(lambda: self._remove_half_written(saving.step))
        process, reason, _ = failed[0]
        who = f"Process {process}: " if jax.process_count() > 1 else ""
        if any(full for _, _, full in failed):
            self._tell_first(NotSaved(step=saving.step, why=f"the disk is full: {who}{reason}"))
            return
        older = self.steps()
        left = f"The newest whole one is that of step {older[-1]}." if older else "No checkpoint is left."
        raise TrainingError(
            f"The checkpoint of step {saving.step} in {self._folder} could not be written: {who}{reason} {left} "
            "Check the folder and its permissions, then resume."
        )

    def close(self, is_whole: bool = True) -> None:
        """Ends the threads.

        Args:
            is_whole: wait until the last checkpoint is written, all processes together.

        Raises:
            TrainingError: it cannot be written.
        """
        try:
            if is_whole:
                self.wait()
        finally:
            if self._saving is not None:
                self._saving.stop.set()
            self._threads.shutdown(wait=False)
            if self._saving is None:
                self._orbax.close()

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any] | None:
        """Reads the newest checkpoint that is what its manifest says; damaged ones are set aside and told.

        Args:
            like: the state as arrays or as `jax.ShapeDtypeStruct`s, with the shapes, types and shardings wanted.
            step: the newest to consider; None for the newest that there is.

        Returns:
            Its step and the state; None if there is none.

        Raises:
            ConfigError: a checkpoint holds a state of other shapes, or was written by a version without manifests.
        """
        self.wait()
        for candidate in reversed(self.steps()):
            if step is not None and candidate > step:
                continue
            found = self._read(candidate, like)
            if not isinstance(found, Fault):
                return candidate, found
            self._set_aside(candidate, found)
        return None

    def check_fit(self, like: Any) -> None:
        """Refuses states of another form than the newest checkpoint has, before work is spent on them.

        Whether what is saved is undamaged, `restore` finds out.

        Raises:
            ConfigError: as `restore`.
        """

        def look() -> str:
            newest = self._steps()[-1:]
            found = self._first_look(self._folder / str(newest[0]), like) if newest else None
            return found[1] if found is not None and not found[0] else ""

        if problem := from_first(look):
            raise ConfigError(problem)

    def _read(self, step: int, like: Any) -> Any:
        """The state of a checkpoint, in all processes; or what is wrong with it."""
        folder = self._folder / str(step)
        look = from_first(lambda: self._first_look(folder, like))
        if look is not None and look[0]:
            return Fault(*look)
        if look is not None:
            raise ConfigError(look[1])
        manifest = read_or_fault(folder)  # every process needs it; one that sees other files says so
        faults = [manifest] if isinstance(manifest, Fault) else []
        if isinstance(manifest, Manifest):
            shares = share_of([entry.size_bytes for entry in manifest.files], jax.process_count())
            faults += damaged_files(folder, [manifest.files[n] for n in shares[jax.process_index()]])
        if fault := _first(faults):
            return fault
        assert isinstance(manifest, Manifest)
        laid_out, state = self._spread_out.laid_out(like), None
        wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, laid_out)
        boxed = _boxed(wanted)
        try:
            with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
                read = reader.restore(folder / STATE, args=ocp.args.StandardRestore(boxed))
                state = read if boxed is wanted else jax.tree.leaves(read)[0]
        except Exception as error:  # Orbax raises whatever its readers raise, down to plain Exception
            faults = [Fault(STATE, f"Orbax cannot read it: {_reason(error)}")]
        else:
            faults = _changed_shards(manifest, state)
        return _first(faults) or self._spread_out.moved(state, laid_out, like)

    def _first_look(self, folder: pathlib.Path, like: Any) -> tuple[str, str] | None:
        """The file that is wrong before any tensor is read, and why; with an empty file, why the run cannot go on."""
        found = read_or_fault(folder)
        if isinstance(found, Fault):
            if found.file == MANIFEST and _is_of_an_earlier_version(folder):
                return "", (
                    f"The checkpoint in {folder} has no {MANIFEST}: it was written by an earlier version of autoshard, "
                    "which kept no checksums. Finish the run with that version, or choose another train.output_dir."
                )
            return found.file, found.why
        try:
            saved = [entry.leaf for entry in found.leaves]
        except TypeError as error:
            return MANIFEST, str(error)
        if (difference := leaf_difference(leaf_shapes(like), saved)) is None:
            return None
        return "", (
            f"The checkpoint of step {folder.name} in {self._folder} does not fit this configuration: {difference}. "
            "Use the model and optimizer it was made with, or another train.output_dir."
        )

    def _set_aside(self, step: int, fault: Fault) -> None:
        """Renames a damaged checkpoint, and tells."""

        def rename() -> str:
            path = self._folder / str(step)
            for number in range(1, 1000):
                aside = self._folder / f"{step}{CORRUPT}{f'-{number}' if number > 1 else ''}"
                if not aside.exists():
                    try:
                        path.rename(aside)
                    except OSError as error:
                        return f"!The damaged checkpoint {path} ({fault}) cannot be renamed: {error.strerror}."
                    return str(aside)
            return f"!{self._folder} holds a thousand damaged checkpoints of step {step}. Remove them."

        path = from_first(rename)
        if path.startswith("!"):
            raise TrainingError(path[1:])
        self._tell_first(Rejected(path=path, file=fault.file, why=fault.why))

    def _obstacle(self, step: int, need_bytes: int) -> str | None:
        """Why `step` is not written: the empty text if it is there already; None if nothing is in the way."""
        if step in self._steps():
            return ""
        free_bytes = shutil.disk_usage(self._folder).free
        need_bytes += need_bytes // 100 + _MARGIN_BYTES
        if free_bytes >= need_bytes:
            return None
        return f"{self._folder} has {free_bytes / 1e6:.1f} MB free, and the checkpoint needs {need_bytes / 1e6:.1f} MB"

    def _before_it_takes_its_name(self) -> None:
        """Called by Orbax in its thread of the first process, once all has been written: adds the manifest."""
        content = self._writing
        assert content is not None
        folder = self._half_written(content.step)
        sizes_bytes = files_in(folder)
        shards, files = list(content.shards), []
        if jax.process_count() == 1:
            files = _entries(folder, sorted(sizes_bytes))
        else:
            shards, files = self._gathered(content, folder, sizes_bytes)
        per_leaf: list[list[ShardEntry]] = [[] for _ in content.leaves]
        for number, entry in shards:
            per_leaf[number].append(entry)
        leaves = tuple(
            LeafEntry(name=leaf.name, shape=leaf.shape, dtype=leaf.dtype.name, shards=tuple(entries))
            for leaf, entries in zip(content.leaves, per_leaf, strict=True)
        )
        write_manifest(folder, Manifest(step=content.step, run=content.run, files=tuple(files), leaves=leaves))

    def _gathered(
        self, content: _Content, folder: pathlib.Path, sizes_bytes: Mapping[str, int]
    ) -> tuple[list[tuple[int, ShardEntry]], list[FileEntry]]:
        """Shards and files of all processes, which read a part of the files each; by files, since this is a thread."""
        parts, count = self._parts(content.step), jax.process_count()
        names = sorted(sizes_bytes)
        shares = [[names[n] for n in share] for share in share_of([sizes_bytes[n] for n in names], count)]
        parts.mkdir(exist_ok=True)
        write_text_atomically(parts / "shares.json", json.dumps({"folder": folder.name, "shares": shares}))
        shards, files = list(content.shards), _entries(folder, shares[0])
        deadline_s = time.monotonic() + _PART_LIMIT_S
        for process in range(1, count):
            while not (parts / f"files-{process}.json").exists():
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"process {process} did not check its part of {folder} in {_PART_LIMIT_S} s")
                time.sleep(_POLL_S)
            shards += _Shards.model_validate(read_json(parts / f"shards-{process}.json")).root
            files += _Files.model_validate(read_json(parts / f"files-{process}.json")).root
        shutil.rmtree(parts)
        return shards, files

    def _tell_the_first(self, content: _Content, stop: threading.Event) -> None:
        """In the other processes: tells the checksums of this one's shards, and of its part of the files."""
        parts, process = self._parts(content.step), jax.process_index()
        parts.mkdir(exist_ok=True)
        write_text_atomically(parts / f"shards-{process}.json", _Shards(content.shards).model_dump_json())
        while not (parts / "shares.json").exists():
            if stop.wait(_POLL_S):
                return
        told: Any = read_json(parts / "shares.json", max_bytes=MAX_BYTES)
        entries = _entries(self._folder / told["folder"], told["shares"][process])
        write_text_atomically(parts / f"files-{process}.json", _Files(tuple(entries)).model_dump_json())

    def _finish(self, step: int) -> None:
        """Waits for Orbax; then the first process removes what is too old, and tells."""
        self._orbax.wait_until_finished()
        if jax.process_index():
            return
        self._tell(Committed(step=step, tier=Tier.DISK))
        for old in self._steps()[: -self._keep]:
            junk = self._folder / f"{old}.delete-tmp"
            with contextlib.suppress(OSError):  # what is left is removed when the folder is next opened
                (self._folder / str(old)).rename(junk)
                shutil.rmtree(junk)

    def _half_written(self, step: int) -> pathlib.Path:
        return next(self._folder.glob(f"{step}{_HALF_WRITTEN[0]}*"), self._folder / str(step))

    def _parts(self, step: int) -> pathlib.Path:
        """Folder in which the processes tell each other what they know of the checkpoint that is being written."""
        return self._folder / f"{step}.manifest-tmp"

    def _remove_half_written(self, step: int) -> None:
        for path in (*self._folder.glob(f"{step}{_HALF_WRITTEN[0]}*"), self._parts(step)):
            shutil.rmtree(path, ignore_errors=True)

    def _tell_first(self, message: NotSaved | Rejected) -> None:
        if jax.process_index() == 0:
            self._tell(message)


def _threads() -> concurrent.futures.ThreadPoolExecutor:
    """One to wait for Orbax, and one to tell the first process what this one knows."""
    return concurrent.futures.ThreadPoolExecutor(2, "checkpoint")


def _entries(folder: pathlib.Path, names: Sequence[str]) -> list[FileEntry]:
    """Size and checksum of files."""

    def entry(name: str) -> FileEntry:
        path = folder / name
        return FileEntry(path=name, size_bytes=path.stat().st_size, checksum=checksum_of_file(path))

    return in_threads(entry, names)


def _changed_shards(manifest: Manifest, state: Any) -> list[Fault]:
    """The shards of this process that were saved as they are, and are now others."""
    saved = [(entry.name, {shard.box: shard.checksum for shard in entry.shards}) for entry in manifest.leaves]
    of_leaf = dict(saved)
    named = named_leaves(state)
    arrays = [leaf for _, leaf in named]
    pieces = [p for p in pieces_of(arrays) if p.box in of_leaf[named[p.leaf][0]]]

    def look(piece: Piece) -> Fault | None:
        name = named[piece.leaf][0]
        if checksum_of(host_view(arrays[piece.leaf], piece.shard)) == of_leaf[name][piece.box]:
            return None
        return Fault(STATE, f"`{name}` is read as other numbers than were saved")

    return [fault for fault in in_threads(look, pieces) if fault is not None]


def _first(faults: Sequence[Fault]) -> Fault | None:
    """One of the faults that processes found, the same for all of them."""
    found = all_together(from_all([[fault.file, fault.why] for fault in faults[:1]]))
    return Fault(*found[0]) if found else None


def _is_of_an_earlier_version(folder: pathlib.Path) -> bool:
    """Whether a checkpoint without manifest says that it never had one."""
    if (folder / MANIFEST).exists():
        return False
    try:
        told: Any = read_json(folder / "_CHECKPOINT_METADATA")
    except FileFormatError:
        return False
    return isinstance(told, dict) and "item_handlers" in told and not told.get("custom_metadata")


def _boxed(state: Any) -> Any:
    """The state as Orbax takes it: an array alone in a dict."""
    return {"array": state} if jax.tree_util.treedef_is_leaf(jax.tree.structure(state)) else state


def _is_full(error: BaseException | None) -> bool:
    """Whether an error says that the disk, or the user's part of it, is full; TensorStore tells it as text only."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        text = str(error)
        if "No space left on device" in text or "Disk quota exceeded" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def _reason(error: BaseException) -> str:
    return f"{str(error).partition(chr(10))[0]:.300}" or type(error).__name__
