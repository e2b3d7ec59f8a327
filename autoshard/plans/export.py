"""`autoshard export`: a plan as text in the forms that other programs read."""

import enum
import json
import pathlib
from collections.abc import Mapping, Sequence

import pydantic

from autoshard.errors import ConfigError, FileFormatError
from autoshard.files import read_yaml
from autoshard.plans.maxtext import maxtext_yaml
from autoshard.plans.naming import logical_axes
from autoshard.plans.program_plan import ProgramPlan


class Form(enum.Enum):
    """A form of export."""

    FLAX_RULES = "flax-rules"
    MAXTEXT = "maxtext"
    SHARDINGS = "shardings"


def form_named(name: str) -> Form:
    """The form called `name`.

    Raises:
      ConfigError: There is none.
    """
    known = {form.value: form for form in Form}
    if name not in known:
        raise ConfigError(f"--to: a plan can be written as {', '.join(known)}; received {name!r}. Choose one of them.")
    return known[name]


def exported(
    plan: ProgramPlan, form: Form, names: Mapping[str, Sequence[str | None]] | None = None, nearest: bool = False
) -> str:
    """The plan in `form`; see `logical_axes` and `maxtext_yaml` for `names` and `nearest`.

    Raises:
      ExportError: The plan cannot be said in that form.
    """
    match form:
        case Form.FLAX_RULES:
            axes = logical_axes(plan, names, nearest=nearest)
            comments = [f"# DEVIATES: {deviation}" for deviation in axes.deviations]
            return "\n".join([*comments, axes.yaml()])
        case Form.MAXTEXT:
            return maxtext_yaml(plan, names, nearest)
        case Form.SHARDINGS:
            return shardings_text(shardings_document(plan))


def shardings_document(plan: ProgramPlan) -> dict[str, object]:
    """The mesh, and for each argument and output its path, shape, type and the mesh axes on each dimension."""
    tensors = lambda rows: [
        {"path": t.name, "shape": list(t.shape), "dtype": t.dtype, "axes": [list(e) for e in t.entries]} for t in rows
    ]
    return {
        "format": "autoshard-shardings",
        "version": 1,
        "mesh": [[name, size] for name, size in plan.axes],
        "arguments": tensors(plan.arguments),
        "outputs": tensors(plan.outputs),
    }


def shardings_text(document: dict[str, object]) -> str:
    """A document of shardings as JSON with a line for each tensor."""
    head, *rows = json.dumps(document, ensure_ascii=False).split('{"path"')
    return "\n".join([head, *('{"path"' + row.rstrip() for row in rows)]) + "\n"


def read_names(path: pathlib.Path) -> dict[str, tuple[str | None, ...]]:
    """Logical names from a YAML file: path pattern to a list of names or nulls.

    Raises:
      FileFormatError: The file holds something else.
    """
    try:
        return pydantic.TypeAdapter(dict[str, tuple[str | None, ...]]).validate_python(read_yaml(path))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise FileFormatError(
            f"`{path}` must map path patterns to lists of names, as in '*.up.kernel: [embed, mlp]'; at `{where}`: "
            f"{first['msg']}. Correct it."
        ) from error
