"""What `autoshard compare` reads from its options."""

import pathlib

from autoshard.comparison.picture import check_picture
from autoshard.errors import ConfigError
from autoshard.strategies.strategies import ALL, Strategy


def strategies_named(names: str | None) -> tuple[Strategy, ...] | None:
    """The strategies of a list such as `ddp,zero3+megatron`; None, for all that apply, of None.

    Raises:
      ConfigError: There is none of such a name.
    """
    if names is None:
        return None
    known = {strategy.name: strategy for strategy in ALL}
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--only: no strategy is called {name!r}. Choose from: {', '.join(known)}.")
    return tuple(known[name] for name in dict.fromkeys(wanted))


def check_outputs(picture: pathlib.Path | None) -> None:
    """Refuses a picture that could not be written, before the long work. Errors: see `picture.check_picture`."""
    if picture is not None:
        check_picture(picture)
