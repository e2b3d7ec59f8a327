"""`autoshard.write_report`: a page about a plan, a comparison, a verification or a run."""

import os
import pathlib
from collections.abc import Sequence

from autoshard.api.base_plan import BasePlan
from autoshard.errors import ConfigError, MissingExtraError
from autoshard.files import write_text_atomically


def write_report(
    subject: BasePlan | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    beside: Sequence[BasePlan | str | os.PathLike[str]] = (),
) -> None:
    """Writes one HTML page that needs no network.

    Args:
      subject: A plan of any kind, or the path of one; of what `autoshard compare --json` or `autoshard verify
        --json` wrote; or of the output folder of a run.
      out: The page, a file that ends in `.html`. It appears whole or not at all.
      beside: More to show on it: comparisons and verifications of the plan, and plans of the same program with other
        memory budgets, which make the price of memory a curve.

    Raises:
      ConfigError: The name of `out` ends otherwise.
      MissingExtraError: Bokeh is not installed.
      FileFormatError: A path is none of these, or the page cannot be written.
    """
    check_page(out)
    from autoshard.report.page import html_page, page_of
    from autoshard.report.reading import Named, read_material

    def named(one: BasePlan | str | os.PathLike[str]) -> tuple[Named, ...]:
        if isinstance(one, BasePlan):
            return (Named(getattr(one, "name", "plan"), one),)  # pyright: ignore[reportArgumentType]
        return read_material(pathlib.Path(one))

    page = page_of(named(subject), tuple(n for one in beside for n in named(one)))
    write_text_atomically(out, html_page(page))


def check_page(out: str | os.PathLike[str]) -> None:
    """Refuses at once what `write_report` could not write at the end. Errors: as there."""
    if pathlib.Path(out).suffix.lower() != ".html":
        raise ConfigError(f"The file name of a report ends in .html; received {os.fspath(out)!r}. Rename it.")
    try:
        import bokeh  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "A report needs Bokeh, which is not installed. Install it with: pip install 'autoshard[report]'. "
            "`autoshard explain` tells a plan in the terminal."
        ) from error
