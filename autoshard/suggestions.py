"""Did you mean: the known name that is nearest to one that is not known."""

import difflib
from collections.abc import Iterable, Mapping


def suggestion(
    received: object, known: Iterable[object] | Mapping[str, str], cutoff: float = 0.6, quote: str = "'"
) -> str:
    """A sentence, after a blank, that names the known name most like `received`; nothing if none is alike.

    Args:
      cutoff: How alike at least, of 1 (`difflib.get_close_matches`). quote: What stands around the name.
      known: Names; or how each is told, such as `options=PlanOptions(seed=...)` for `seed`.
    """
    told = known if isinstance(known, Mapping) else {}
    names = {name: told.get(name, name) for name in known if isinstance(name, str)}
    close = difflib.get_close_matches(str(received)[:80], names, n=1, cutoff=cutoff)
    return f" Did you mean {quote}{names[close[0]]}{quote}?" if close else ""
