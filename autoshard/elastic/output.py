"""What a worker prints, which must not end it."""

import io
import sys


class _Lossy(io.FileIO):
    """A file that takes what a full disk does not."""

    def write(self, content, /) -> int:
        try:
            return super().write(content) or 0
        except OSError:
            return len(content)


def print_without_fail() -> None:
    """From here on, lines that the log of a worker has no room for are lost, and the worker goes on."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_Lossy(number, "wb", closefd=False)),
            encoding="utf-8",
            errors="backslashreplace",
            line_buffering=True,
        )
        for number in (1, 2)
    )
