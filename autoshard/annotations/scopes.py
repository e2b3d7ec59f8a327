"""The four annotations, as context managers and decorators for model and loss code.

with autoshard.pipeline(num_micro_batches=8):
    with autoshard.stage(devices="v100"):
        x = encoder(x)
    with autoshard.stage(devices="h100"):
        with autoshard.split(4, dims={"heads": 16}):
            x = decoder(x)
"""

import contextlib
import contextvars
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Mapping

import jax

from autoshard.annotations.block import Block, BlockKind, Dimension
from autoshard.errors import AnnotationError

Dims = Mapping[str, Dimension]
Annotation = contextlib._GeneratorContextManager[None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Open:
    """A block that is being traced: its place, and the numbers of the blocks in it."""

    place: tuple[int, ...]
    numbers: Iterator[int]


_around = contextvars.ContextVar[_Open | None]("annotated block", default=None)
"""The innermost block that this thread of control is in."""


def replicate(degree: int | None = None, *, dims: Dims | None = None) -> Annotation:
    """What is inside runs in `degree` replicas: each takes its part of the examples, with the same weights.

    Every operation inside that has the examples among its dimensions splits them into so many parts, neither more nor
    fewer, in the backward pass too. Other dimensions, devices that are left, and where weights and the optimizer's
    state lie between uses, stay the planner's choice. Around a `pipeline` it asks for so many pipelines side by side.

    Args:
      degree: Number of replicas; None for as many as there are devices that the blocks around and inside leave.
      dims: Which dimension the examples are, where it is not dimension 0 of the batch: a name for people, and what
        `split` takes.

    Raises:
      AnnotationError: `degree` or `dims` is malformed.
    """
    return _scope(BlockKind.REPLICATE, _line(), degree=_count("degree", degree), dims=_dims(dims))


def split(degree: int | None = None, *, dims: Dims | None = None, colocate: bool = False) -> Annotation:
    """What is inside is split into `degree` parts by a dimension that is no dimension of the examples.

    With `dims`, every operation inside that has one of these dimensions splits it. Without, every product, convolution
    or look-up with weights splits one of the dimensions of its weights; which of them is the planner's choice.

    Args:
      degree: Number of parts; None for as many as there are devices that the blocks around and inside leave.
      dims: Dimensions by a name for people. Each is told by its length, such as `{"heads": 16}`, or, where other
        dimensions have that length too, as dimension of an argument: `{"heads": ("*.query.kernel", 1)}`, a pattern
        of its path and the number of the dimension.
      colocate: Run on all devices of the `replicate` around it, in its place, instead of splitting each replica: for
        one layer, such as a large classifier or experts, in a replicated model.

    Raises:
      AnnotationError: `degree` or `dims` is malformed.
    """
    return _scope(BlockKind.SPLIT, _line(), degree=_count("degree", degree), dims=_dims(dims), colocated=bool(colocate))


def pipeline(num_micro_batches: int | None = None, *, num_stages: int | None = None) -> Annotation:
    """What is inside is cut into stages, which work on one micro-batch after another.

    The blocks `stage` inside are its stages, all of them; what is in none goes to a neighbour. Without any, the planner
    cuts. It needs an `autoshard.TrainStep`.

    Args:
      num_micro_batches: Of a step; None for the planner's choice. num_stages: Where there is no `stage` inside.

    Raises:
      AnnotationError: A number is malformed.
    """
    counts = {"num_micro_batches": num_micro_batches, "num_stages": num_stages}
    return _scope(BlockKind.PIPELINE, _line(), **{name: _count(name, number) for name, number in counts.items()})


def stage(devices: str | None = None) -> Annotation:
    """What is inside is one stage of the `pipeline` around it, on devices of its own.

    Args:
      devices: The kind of devices, by the name of the device or of its group in the cluster file, or a part of it
        (`"h100"` for `H100-SXM`); None for any.

    Raises:
      AnnotationError: `devices` is no name.
    """
    if devices is not None and not (isinstance(devices, str) and devices):
        raise AnnotationError(f"`devices` of a stage is the name of a kind of devices; received {devices!r}.")
    return _scope(BlockKind.STAGE, _line(), devices=devices)


@contextlib.contextmanager
def _scope(kind: BlockKind, line: str, **told: object) -> Iterator[None]:
    around = _around.get()
    place = (0,) if around is None else (*around.place, next(around.numbers))
    block = Block(kind, line, place, **told)  # pyright: ignore[reportArgumentType] - each has checked its own
    token = _around.set(_Open(place, itertools.count()))
    try:
        with jax.named_scope(block.scope):
            yield
    finally:
        _around.reset(token)


def _line() -> str:
    """The line that calls the annotation, as `file.py:12 (function)`."""
    frame = sys._getframe(2)
    name = frame.f_code.co_qualname.split(".<locals>")[-1].lstrip(".")
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno} ({name})"


def _count(name: str, number: int | None) -> int | None:
    if number is None or (isinstance(number, int) and not isinstance(number, bool) and number >= 1):
        return number
    raise AnnotationError(
        f"`{name}` of an annotation is a whole number of at least 1; received {number!r} at {_caller()}. Correct it, "
        "or leave it out."
    )


def _dims(dims: Dims | None) -> tuple[tuple[str, Dimension], ...]:
    if dims is None:
        return ()
    is_count = lambda number, least: isinstance(number, int) and not isinstance(number, bool) and number >= least
    for name, dim in dims.items():
        is_argument = isinstance(dim, tuple) and len(dim) == 2 and isinstance(dim[0], str) and is_count(dim[1], 0)
        if not (isinstance(name, str) and (is_count(dim, 2) or is_argument)):
            raise AnnotationError(
                f"`dims` of an annotation tells each dimension by its length, or by an argument and the number of its "
                f'dimension; received {name!r}: {dim!r} at {_caller()}. Write such as {{"heads": 16}} or '
                '{"heads": ("*.query.kernel", 1)}.'
            )
    return tuple(dims.items())


def _caller() -> str:
    """The line of user code that an annotation stands in."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"
