"""Folders that are made, that other users must not write to, and names from files that must stay inside a folder."""

import os
import pathlib
import stat

from autoshard.errors import AutoshardError, ConfigError, FileFormatError, FolderError


def private_folder(path: str | os.PathLike[str]) -> pathlib.Path:
    """The folder `path` for what must come from this user alone: executables, or the state of a run.

    It is made with mode 0700 if missing, and its missing parents with the usual mode. One that exists is believed only
    if no other user could have put something there. Folders above it are not looked at.

    Args:
        path: the folder.

    Returns:
        Its absolute path; symbolic links above it are resolved.

    Raises:
        FolderError: it cannot be made, is a symbolic link or no folder, belongs to another user, or may be written to
            by others.
    """
    folder = pathlib.Path(path).expanduser()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder = folder.parent.resolve(strict=True) / folder.name
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            pass
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except NotADirectoryError as error:
        raise FolderError(
            f"{folder}: a private folder must be a folder itself, not a symbolic link or a file. Choose another path."
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FolderError(
            f"{folder}: the private folder cannot be made or opened: {reason}. Choose another path."
        ) from error
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.getuid():
        raise FolderError(
            f"{folder}: a private folder must belong to the user who runs this (number {os.getuid()}); it belongs to "
            f"number {found.st_uid}, who could have put anything there. Choose another path."
        )
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise FolderError(
            f"{folder}: a private folder may be written to by its owner only; its mode is {mode:04o}, so that others "
            f"could have put anything there. Remove it, or look through it and run `chmod 700 {folder}`."
        )
    return folder


def path_inside(folder: str | os.PathLike[str], name: str) -> pathlib.Path:
    """The path that `name`, which was read from a file, has in `folder`; it need not exist.

    Args:
        folder: where it must lie.
        name: a relative path with `/` between its parts.

    Returns:
        The path, with symbolic links resolved.

    Raises:
        FileFormatError: `name` is empty, absolute, holds a NUL, or leads out of `folder`, itself or by a link.
    """
    try:
        root = pathlib.Path(folder).resolve()
        path = (root / name).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a NUL; links in a circle
        raise _leads_out(folder, name) from error
    if pathlib.PurePosixPath(name).is_absolute() or path == root or not path.is_relative_to(root):
        raise _leads_out(folder, name)
    return path


def _leads_out(folder: str | os.PathLike[str], name: str) -> FileFormatError:
    return FileFormatError(
        f"{os.fspath(folder)}: a name in a file of this folder must stay inside of it; received {name!r:.100}. "
        "The file is damaged, or was written by someone else: do not use it."
    )


def make_folder(folder: pathlib.Path, setting: str, refusal: type[AutoshardError] = ConfigError) -> None:
    """Makes a folder and its missing parents, unless it is there.

    Args:
        folder: the folder.
        setting: the option or key that names it, for the error.
        refusal: the type of the error.

    Raises:
        ConfigError, or `refusal`: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise refusal(f"{setting}: {folder} cannot be made: {error.strerror}. Choose another.") from error
