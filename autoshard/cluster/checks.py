"""Checks that the dataclasses of this room share: numbers that are finite, positive, whole."""

import math

from autoshard.errors import ClusterError

MOST_WHOLE = 1 << 53
"""The greatest whole number up to which every whole number is also an exact float."""


def require_number(owner: str, field: str, value: object, *, zero_allowed: bool = False) -> float:
    """Returns `value` as a float.

    Args:
      owner: What the number belongs to, for the message, e.g. `device type 'H100-SXM'`.
      field: Name of the number, with its unit.
      value: The number received.
      zero_allowed: Whether zero is legal too.

    Raises:
      ClusterError: If it is not a finite number, or is negative, or is zero where that is not legal.
    """
    rule = "a finite number, zero or above" if zero_allowed else "a finite number above zero"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ClusterError(f"{owner}: {field} must be {rule}; received {value!r}. Give it as a plain number.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero_allowed):
        raise ClusterError(f"{owner}: {field} must be {rule}; received {value!r:.60}. Check the figure and its unit.")
    return number


def require_whole(owner: str, field: str, value: object, *, least: int = 1, most: int = MOST_WHOLE) -> int:
    """Returns `value` as an int; a float such as `80e9` is accepted if it is whole.

    Args:
      owner: What the number belongs to, for the message.
      field: Name of the number.
      value: The number received.
      least: Least legal value.
      most: Greatest legal value.

    Raises:
      ClusterError: If it is not a whole number in that range.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ClusterError(
            f"{owner}: {field} must be a whole number of at least {least} and at most {most}; received {value!r:.60}."
        )
    return value


def require_text(owner: str, field: str, value: object) -> str:
    """Returns `value` if it is text that is not blank.

    Raises:
      ClusterError: If it is anything else.
    """
    if not isinstance(value, str) or not value.strip():
        raise ClusterError(f"{owner}: {field} must be text that is not blank; received {value!r:.60}.")
    return value
