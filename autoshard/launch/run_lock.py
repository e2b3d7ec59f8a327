"""One supervisor for each run: a lock that the system frees when its holder dies."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

from autoshard.errors import ElasticError

_FILE = "supervisor.lock"


@contextlib.contextmanager
def run_lock(run_dir: pathlib.Path) -> Iterator[None]:
    """Holds the lock of a run while the block runs.

    Raises:
        ElasticError: another supervisor holds it.
    """
    path = run_dir / _FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            raise ElasticError(
                f"{run_dir}: a run has one supervisor, and process {holder or 'unknown'} is it. Stop that one first, "
                "or choose another train.output_dir."
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)


def holder_of(run_dir: pathlib.Path) -> int | None:
    """The process that supervises a run now, or None."""
    try:
        descriptor = os.open(run_dir / _FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(descriptor, 32).decode(errors="replace").strip()
        return int(text) if text.isdecimal() else None
    finally:
        os.close(descriptor)
    return None
