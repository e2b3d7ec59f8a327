"""One process at a time leads a run: a lock that the system frees when its holder dies."""

import contextlib
import errno
import fcntl
import os
import pathlib
from collections.abc import Iterator

from autoshard.errors import ElasticError

_FILE = "supervisor.lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""What file systems say that know no locks."""

ONE_LEADER = "a run has one supervisor or, without one, one process that trains"
ONE_DRIVER = "the jobs of a folder have one driver"


@contextlib.contextmanager
def run_lock(run_dir: pathlib.Path, rule: str = ONE_LEADER, is_needed: bool = True) -> Iterator[None]:
    """Holds the lock of a run while the block runs.

    Args:
        run_dir: its output folder, which must be there.
        rule: why there is one, for the error.
        is_needed: whether it is an error if the file system knows no locks; else the block runs without.

    Raises:
        ElasticError: another process holds it, or it cannot be taken.
    """
    path = run_dir / _FILE
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ElasticError(
            f"{path}: {rule}, which this file tells, and it cannot be written: {error.strerror}. Check the folder and "
            "its permissions, or choose another."
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace").strip()
            raise ElasticError(
                f"{run_dir}: {rule}, and process {holder or 'unknown'} is it. Stop that one first, or choose another "
                "output folder."
            ) from None
        except OSError as error:
            if is_needed or error.errno not in _NO_LOCKS:
                raise ElasticError(
                    f"{path}: {rule}, which a lock ensures, and the file cannot be locked: {error.strerror}. Choose an "
                    "output folder on another file system."
                ) from error
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
        except OSError as error:
            raise ElasticError(
                f"{path}: {rule}, which this file tells, and it cannot be written: {error.strerror}. Make room, or "
                "choose another output folder."
            ) from error
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
