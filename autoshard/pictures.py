"""Matplotlib, which not every installation has."""

from typing import Any

from autoshard.errors import MissingExtraError


def require_matplotlib(instead: str = "") -> Any:
    """The library, with what pictures need of it.

    Raises:
      MissingExtraError: It is not installed; the message ends with what to do `instead`.
    """
    try:
        import matplotlib.collections
        import matplotlib.figure
        import matplotlib.patches
    except ImportError as error:
        raise MissingExtraError(
            "A picture needs matplotlib, which is not installed. Install it with: pip install 'autoshard[pictures]'."
            + instead
        ) from error
    return matplotlib
