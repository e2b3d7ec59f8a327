"""Reading the keys of a mapping from a user's file: unknown keys refused, types checked, places named."""

import dataclasses
import difflib
from collections.abc import Iterable

from autoshard.errors import FileFormatError


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """One mapping of a file, with its place in the file.

    Attributes:
      place: Path of the file and the keys down to this mapping, for messages.
      values: The mapping.
    """

    place: str
    values: dict[str, object]

    @classmethod
    def of(cls, place: str, data: object) -> "Fields":
        """Checks that `data` is a mapping whose keys are text.

        Raises:
          FileFormatError: If it is not.
        """
        if not isinstance(data, dict):
            raise FileFormatError(f"{place} must be a mapping of names to values; received {_shown(data)}.")
        for key in data:
            if not isinstance(key, str):
                raise FileFormatError(f"{place}: every key must be text; received {_shown(key)}. Put it in quotes.")
        return cls(place, data)

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Refuses keys that are not among `known`.

        Raises:
          FileFormatError: If there is one; the message suggests the key that was meant.
        """
        names = sorted(known)
        for key in self.values:
            if key not in names:
                raise FileFormatError(
                    f"{self.place} has the unknown key {key!r:.80}.{suggestion(key, names)} "
                    f"Known keys: {', '.join(names)}."
                )

    def required(self, key: str) -> object:
        """The value of `key`.

        Raises:
          FileFormatError: If it is missing.
        """
        if key not in self.values:
            close = suggestion(key, self.values)
            raise FileFormatError(f"{self.place} must have the key {key!r}, which is missing.{close}")
        return self.values[key]

    def text(self, key: str) -> str:
        """The value of `key`, which must be text."""
        value = self.required(key)
        if not isinstance(value, str):
            raise FileFormatError(f"{self.place}.{key} must be text; received {_shown(value)}.")
        return value

    def number(self, key: str, default: float | None = None) -> int | float:
        """The value of `key`, which must be a number; `default`, if given, where the key is missing."""
        value = self.values.get(key, default) if default is not None else self.required(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FileFormatError(f"{self.place}.{key} must be a number; received {_shown(value)}.")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """The value of `key`, which must be a whole number; `default`, if given, where the key is missing."""
        value = self.number(key, default)
        if isinstance(value, float) and not value.is_integer():
            raise FileFormatError(f"{self.place}.{key} must be a whole number; received {_shown(value)}.")
        return int(value)

    def items(self, key: str) -> list[object]:
        """The value of `key`, which must be a list; empty where the key is missing."""
        value = self.values.get(key, [])
        if not isinstance(value, list):
            raise FileFormatError(f"{self.place}.{key} must be a list; received {_shown(value)}.")
        return value

    def fields(self, key: str) -> "Fields":
        """The value of `key`, which must be a mapping; empty where the key is missing."""
        return Fields.of(f"{self.place}.{key}", self.values.get(key, {}))


def suggestion(name: str, known: Iterable[str]) -> str:
    """A sentence that names the known name closest to `name`, or nothing if none is close."""
    close = difflib.get_close_matches(name[:80], list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _shown(value: object) -> str:
    return f"{value!r:.60}"
