"""Ranks that are slowed by real work, for tests and demonstrations: which, and at which steps."""

from autoshard.errors import ConfigError
from autoshard.train.config import StragglersSection


def check_ranks(section: StragglersSection, axis: str, ways: int) -> None:
    """Refuses ranks that are not there, before the first step.

    Args:
        section: what is emulated.
        axis, ways: the mesh axis whose ranks they are, and how many it has.

    Raises:
        ConfigError: there is no such rank.
    """
    if max(section.emulate, default=0) >= ways:
        raise ConfigError(
            f"stragglers.emulate: ranks of axis `{axis}` are 0 to {ways - 1}; received {max(section.emulate)}. Name "
            "one of these."
        )


def slowed_ranks(section: StragglersSection, number: int) -> dict[int, float]:
    """How many times slower which ranks are made in a step.

    Args:
        section: what is emulated. number: of the step, counted from 1.
    """
    first, last = section.emulate_from, section.emulate_until
    if number < first or (last is not None and number > last):
        return {}
    return dict(section.emulate)
