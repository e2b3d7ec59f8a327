"""Bytes between the memories of hosts: a copy kept at a neighbour, and pieces fetched after a loss.

It stands on `multiprocessing.connection`: sockets whose two ends prove to each other, by a code made with a key (HMAC),
that both know the key that the first process made for this start of the run. Only bytes and JSON travel, no pickles.
Nothing is encrypted, so the network between the processes must be trusted, as for `jax.distributed` itself.

The two other roads were left out: `jax.experimental.transfer` delivers into device memory, which training needs, and
waits for ever for a peer that is gone; collectives would queue behind the training step on every device.
"""

import contextlib
import pathlib
import secrets
import shutil
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import AuthenticationError

# The last two are what `Client` and `Listener` call; those know neither IPv6 nor time limits.
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Annotated, Literal

import numpy as np
import pydantic

from autoshard.checkpoints.checksums import checksum_of
from autoshard.checkpoints.manifest import Checksum, Count, Entry
from autoshard.checkpoints.slots import FOLDER_NAME, Layout, SlotReader, SlotWriter, checksums_of
from autoshard.errors import FileFormatError, TransferError
from autoshard.transfer.routes import Box

_CHUNK_BYTES = 4 << 20
_MAX_HEADER_BYTES = 256 << 20
PEER_LIMIT_S = 60
"""Time that the other end has for each answer and each chunk."""


class Keep(Entry):
    """Asks to keep copies of the sender's states; `Copy` messages follow on the same connection."""

    kind: Literal["keep"] = "keep"
    folder: str
    layout: Layout


class Copy(Entry):
    """The state after `step` follows, in chunks, as the layout says."""

    kind: Literal["copy"] = "copy"
    step: Count
    checksums: tuple[Checksum, ...]


class Fetch(Entry):
    """Asks for the part `start` to `stop` of a piece."""

    kind: Literal["fetch"] = "fetch"
    folder: str
    step: Count
    piece: Count
    start: tuple[Count, ...]
    stop: tuple[Count, ...]


class Answer(Entry):
    """`why` is empty if all is well; then `size_bytes` follow, in chunks, with this checksum."""

    kind: Literal["answer"] = "answer"
    why: str = ""
    size_bytes: Count = 0
    checksum: str = ""


_MESSAGE: pydantic.TypeAdapter[Keep | Copy | Fetch | Answer] = pydantic.TypeAdapter(
    Annotated[Keep | Copy | Fetch | Answer, pydantic.Field(discriminator="kind")]
)


def new_key() -> str:
    """A key that others cannot guess, as text."""
    return secrets.token_hex(32)


class Server:
    """Keeps copies for processes of other hosts, and gives out pieces of what this host has."""

    def __init__(self, host: str, key: str, folder: pathlib.Path):
        """Listens on a free port.

        Args:
            host: numeric address to listen on.
            key: as of `new_key`.
            folder: of the run, on this host.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=64)
        self._key, self._folder = key.encode(), folder
        threading.Thread(target=self._accept, name="memory-server", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._socket.getsockname()[:2]
        return host, port

    def close(self) -> None:
        """Stops listening; connections end when their other ends do."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                made, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(made,), name="memory-server", daemon=True).start()

    def _serve(self, made: socket.socket) -> None:
        """Answers one connection until its other end leaves, fails, or says something that makes no sense."""
        with contextlib.suppress(OSError, EOFError, AuthenticationError, ValueError, FileFormatError):
            with _connection(made) as connection:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                writer: SlotWriter | None = None
                while connection.poll(None):
                    message = _receive(connection)
                    if isinstance(message, Fetch):
                        self._give(connection, message)
                    elif isinstance(message, Keep):
                        writer = self._keep(connection, message)
                    elif isinstance(message, Copy) and writer is not None:
                        _take(connection, message, writer)
                    else:
                        return

    def _keep(self, connection: Connection, message: Keep) -> SlotWriter | None:
        writer, why = None, ""
        try:
            if not FOLDER_NAME.match(message.folder) or not message.folder.endswith("-copy"):
                why = f"{message.folder!r:.60} is no folder for a copy"
            else:
                shutil.rmtree(self._folder / message.folder, ignore_errors=True)  # of a connection that broke
                writer = SlotWriter(self._folder / message.folder, message.layout)
        except (OSError, FileFormatError) as error:
            why = str(error)
        _send(connection, Answer(why=why))
        return writer

    def _give(self, connection: Connection, message: Fetch) -> None:
        try:
            if not FOLDER_NAME.match(message.folder):
                raise FileFormatError(f"{message.folder!r:.60} is no folder of pieces")
            reader = SlotReader(self._folder / message.folder)
            data = reader.read(message.step, message.piece, Box(message.start, message.stop))
        except (OSError, FileFormatError, IndexError, ValueError) as error:
            _send(connection, Answer(why=str(error)))
            return
        data = data.reshape(-1).view(np.uint8)
        _send(connection, Answer(size_bytes=data.nbytes, checksum=checksum_of(data)))
        _send_chunks(connection, data)


class Peer:
    """A connection to the server of another process."""

    def __init__(self, address: tuple[str, int], key: str):
        """Connects.

        Raises:
            TransferError: the other process cannot be reached, or has another key.
        """
        self._where = f"{address[0]}:{address[1]}"
        with self._explained():
            self._connection = _connection(socket.create_connection(address, PEER_LIMIT_S))
            answer_challenge(self._connection, key.encode())
            deliver_challenge(self._connection, key.encode())

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()

    def keep(self, folder: str, layout: Layout) -> None:
        """Asks the other to keep copies of this process's states in its `folder`.

        Raises:
            TransferError: it cannot, as when its memory is full.
        """
        with self._explained():
            _send(self._connection, Keep(folder=folder, layout=layout))
            self._answer()

    def copy(self, step: int, slot: np.ndarray, checksums: Sequence[str]) -> None:
        """Hands over the state after `step`, and returns when it is kept.

        Args:
            step: steps taken.
            slot: the bytes that `keep`'s layout tells of.
            checksums: of its pieces.

        Raises:
            TransferError: it is not kept.
        """
        with self._explained():
            _send(self._connection, Copy(step=step, checksums=tuple(checksums)))
            _send_chunks(self._connection, slot)
            self._answer()

    def fetch(self, folder: str, step: int, piece: int, box: Box) -> np.ndarray:
        """The bytes of the part `box` of a piece that the other has.

        Raises:
            TransferError: it does not arrive, or not as it was sent.
        """
        with self._explained():
            _send(self._connection, Fetch(folder=folder, step=step, piece=piece, start=box.starts, stop=box.stops))
            answer = self._answer()
            data = np.empty(answer.size_bytes, np.uint8)
            _receive_chunks(self._connection, data)
        if checksum_of(data) != answer.checksum:
            raise TransferError(f"A piece of the state of step {step} was changed on its way from {self._where}.")
        return data

    def _answer(self) -> Answer:
        answer = _receive(self._connection)
        if not isinstance(answer, Answer) or answer.why:
            raise TransferError(
                f"The process at {self._where} refused: {answer.why if isinstance(answer, Answer) else answer.kind}."
            )
        return answer

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, ValueError, AuthenticationError) as error:
            raise TransferError(
                f"The memory of the process at {self._where} cannot be used: {str(error) or type(error).__name__}."
            ) from error


def _connection(made: socket.socket) -> Connection:
    """A connection over a socket; waiting for the other end in the midst of a message ends after `PEER_LIMIT_S`."""
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        made.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", PEER_LIMIT_S, 0))
    return Connection(made.detach())


def _send(connection: Connection, message: Entry) -> None:
    connection.send_bytes(message.model_dump_json().encode())


def _receive(connection: Connection) -> Keep | Copy | Fetch | Answer:
    return _MESSAGE.validate_json(connection.recv_bytes(_MAX_HEADER_BYTES))


def _send_chunks(connection: Connection, data: np.ndarray) -> None:
    for start in range(0, data.nbytes, _CHUNK_BYTES):
        connection.send_bytes(data[start : start + _CHUNK_BYTES].data)


def _receive_chunks(connection: Connection, place: np.ndarray) -> None:
    for start in range(0, place.nbytes, _CHUNK_BYTES):
        part = place[start : start + _CHUNK_BYTES]
        if connection.recv_bytes_into(part.data) != part.nbytes:
            raise ValueError("a chunk is shorter than announced")


def _take(connection: Connection, message: Copy, writer: SlotWriter) -> None:
    """Receives a state, and keeps it if it is what was sent."""
    slot = writer.begin()
    _receive_chunks(connection, writer.bytes_of(slot)[: writer.layout.slot_bytes()])
    why = ""
    if checksums_of(writer.places(slot)) != list(message.checksums):
        why = f"the state of step {message.step} was changed on its way"
    else:
        try:
            writer.publish(message.step, slot, message.checksums)
        except FileFormatError as error:
            why = str(error)
    _send(connection, Answer(why=why))
