"""Names in a configuration, looked up in tables; an unknown one is told what is near."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from autoshard.errors import ConfigError
from autoshard.suggestions import suggestion

Entry = TypeVar("Entry")


def look_up(table: Mapping[str, Entry], key: str, name: str) -> Entry:
    """The entry of `table` called `name`.

    Raises:
        ConfigError: there is none; the message names the configuration `key` and the valid names.
    """
    if name not in table:
        raise ConfigError(f"{key}: nothing is registered as {name!r}.{valid_names(name, list(table))}")
    return table[name]


def valid_names(received: str, valid: Sequence[str]) -> str:
    """The next step for a name that is not among `valid`: the nearest valid one if any is near, and all of them."""
    return f"{suggestion(received, valid, 0.5, '`')} Valid: {', '.join(valid)}."
