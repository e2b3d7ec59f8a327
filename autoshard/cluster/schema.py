"""Checking a user's file against a Pydantic schema, with errors that name the rule, the place and the next step."""

import re
from typing import Annotated, Any, Self

import pydantic
from pydantic_core import ErrorDetails, PydanticCustomError

from autoshard.errors import FileFormatError
from autoshard.suggestions import suggestion

_RULES = {
    "string_type": "text",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "dict_type": "a mapping of names to values",
    "model_type": "a mapping of names to values",
    "model_attributes_type": "a mapping of names to values",
}
"""What a value must be, by the type of Pydantic's error."""
_RULE = "autoshard_rule"
"""The type of an error whose text follows the name of the place."""


def _as_whole(value: object) -> object:
    """Takes `80e9` for a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Text = Annotated[str, pydantic.Strict()]
Number = Annotated[float, pydantic.Strict()]
Whole = Annotated[int, pydantic.Strict(), pydantic.BeforeValidator(_as_whole)]


class Schema(pydantic.BaseModel):
    """One mapping of a file: unknown keys are refused, numbers and texts are not converted into each other."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, from_attributes=True, populate_by_name=True, use_attribute_docstrings=True
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        known = sorted(field.alias or name for name, field in cls.model_fields.items())
        for key in data if isinstance(data, dict) else ():
            if key not in known:
                raise broken_rule(
                    f"has the unknown key {key!r:.80}.{suggestion(key, known)} Known keys: {', '.join(known)}."
                )
        return data

    @classmethod
    def read(cls, data: Any, place: str) -> Self:
        """Checks plain data.

        Args:
          data: The content of a file. place: What to call it in errors.

        Raises:
          FileFormatError: If it does not follow the schema.
        """
        if data is None:
            keys = ", ".join(sorted(field.alias or name for name, field in cls.model_fields.items()))
            raise FileFormatError(
                f"{place} must be {_RULES['model_type']}; received nothing. Write it with these keys: {keys}."
            )
        try:
            return cls.model_validate(data, from_attributes=False)
        except pydantic.ValidationError as error:
            raise FileFormatError(_text(error.errors()[0], data, place)) from None


def broken_rule(text: str) -> PydanticCustomError:
    """The error of a validator: its text follows the name of the place, as in `{place} must be rising.`"""
    return PydanticCustomError(_RULE, "{text}", {"text": text})


def _text(error: ErrorDetails, data: Any, place: str) -> str:
    kind, received = error["type"], error["input"]
    path = _path(error["loc"], data)
    subject = f"{place}: {path}" if path else place
    if kind == _RULE:
        return f"{subject} {error['msg']}"
    if kind == "missing":
        key = error["loc"][-1]
        return f"{subject} must have the key {key!r}, which is missing.{suggestion(key, received)}"
    expected = str(error.get("ctx", {}).get("expected", ""))
    rule = (
        f"one of {expected}" if kind in ("enum", "literal_error") else _RULES.get(kind, f"otherwise ({error['msg']})")
    )
    close = suggestion(received, re.findall(r"'([^']*)'", expected)) if isinstance(received, str) else ""
    return f"{subject} must be {rule}; received {received!r:.60}.{close or ' Correct it.'}"


def _path(location: tuple[int | str, ...], data: Any) -> str:
    """The place of an error in the file; Pydantic's names for the members of unions are left out."""
    path = ""
    for part in location:
        if isinstance(data, dict) and part in data:
            data, path = data[part], f"{path}.{part}"
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data, path = data[part], f"{path}[{part}]"
    return path.removeprefix(".")
