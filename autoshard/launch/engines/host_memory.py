"""The folder that a run has in the memory of a host, for checkpoints that outlive its processes."""

import contextlib
import hashlib
import os
import pathlib
import shutil

from autoshard.folders import private_folder

_SHARED_MEMORY = pathlib.Path("/dev/shm")
_PREFIX = f"autoshard-{os.getuid()}-"
_RUN = "run"
"""File beside the hosts' folders: the path of the run's output folder."""


def host_memory_dir(run_dir: pathlib.Path, host: str) -> pathlib.Path:
    """The folder of a run in the memory of a host; on disk, beside the run, where the system has none in memory."""
    if not (_SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)):
        return run_dir / "memory" / host
    name = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:16]
    return _SHARED_MEMORY / f"{_PREFIX}{name}" / host


def open_host_memory(run_dir: pathlib.Path, host: str) -> pathlib.Path:
    """Makes what `host_memory_dir` names ready for a run, which must keep others away from itself.

    Memory that runs of this user hold whose output folder is gone is freed: nothing can continue those.

    Args:
        run_dir: the run's output folder.
        host: name of this host; there may be several in one memory, as in tests.

    Raises:
        FolderError: others could write to the folder.
    """
    memory_dir = host_memory_dir(run_dir, host)
    parent = private_folder(memory_dir.parent)
    (parent / _RUN).write_bytes(os.fsencode(run_dir.resolve()))
    for other in _SHARED_MEMORY.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if other.name != parent.name and not pathlib.Path(os.fsdecode((other / _RUN).read_bytes())).exists():
                shutil.rmtree(other)
    return memory_dir


def close_host_memory(memory_dir: pathlib.Path) -> None:
    """Removes the folders of a run that ends, unless they hold states from which it may continue."""
    with contextlib.suppress(OSError):
        if all(path.name == _RUN for path in memory_dir.parent.iterdir()):
            shutil.rmtree(memory_dir.parent)


def forget_host_memory(memory_dir: pathlib.Path) -> None:
    """Removes the folders of a run with all states in them."""
    shutil.rmtree(memory_dir.parent, ignore_errors=True)
