"""The folder in which what was computed once is kept for later runs."""

import os
import pathlib

import platformdirs

VARIABLE = "AUTOSHARD_CACHE"
"""Environment variable: a folder to use instead of the user's cache folder, or `off`."""


def user_cache(name: str) -> pathlib.Path | None:
    """The folder named by `AUTOSHARD_CACHE`, or `name` in the system's usual place; None if that says `off`."""
    setting = os.environ.get(VARIABLE, "")
    if setting.strip().lower() == "off":
        return None
    return pathlib.Path(setting) if setting else platformdirs.user_cache_path("autoshard", appauthor=False) / name
