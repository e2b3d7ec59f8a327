"""One annotated block of a program as data, and as the name of a scope."""

import dataclasses
import enum
import json
import urllib.parse
from collections.abc import Iterable, Sequence

Dimension = int | tuple[str, int]
"""How a dimension is told: by its length, or as a dimension of the arguments whose path fits a pattern."""

_PREFIX = "autoshard."


class BlockKind(enum.Enum):
    """What a block asks for."""

    PIPELINE = "pipeline"
    STAGE = "stage"
    REPLICATE = "replicate"
    SPLIT = "split"


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A block of code that says how it is to be run.

    Attributes:
      kind: What it asks for.
      line: Where it stands, `file.py:12 (function)`.
      place: Its number in the block around it, behind that one's place: tells blocks on one line apart.
      degree: Parts that `replicate` makes of the examples, `split` of a dimension; None: as many as devices are left.
      dims: (name, dimension) that `split` may split, or that `replicate` takes for the examples; empty: not told.
      colocated: Whether it runs on the devices of the block around it, in its place, instead of on a part of them.
      devices: The kind of devices of a stage; None for any.
      num_micro_batches, num_stages: Of a pipeline; None for any.
    """

    kind: BlockKind
    line: str
    place: tuple[int, ...] = ()
    degree: int | None = None
    dims: tuple[tuple[str, Dimension], ...] = ()
    colocated: bool = False
    devices: str | None = None
    num_micro_batches: int | None = None
    num_stages: int | None = None

    def __str__(self) -> str:
        told = [] if self.degree is None else [str(self.degree)]
        told += [f"{name}={_dimension_text(dim)}" for name, dim in self.dims]
        told += ["colocate=True"] * self.colocated
        told += [] if self.devices is None else [f'devices="{self.devices}"']
        for name in ("num_stages", "num_micro_batches"):
            told += [] if getattr(self, name) is None else [f"{name}={getattr(self, name)}"]
        return f"{self.kind.value}({', '.join(told)})"

    @property
    def at_line(self) -> str:
        """What it asks for and where, for messages."""
        return f"`{self}` at {self.line}"

    @property
    def scope(self) -> str:
        """The name of its scope, which tells everything; without slashes and brackets, which separate scopes."""
        default = {f.name: f.default for f in dataclasses.fields(Block)}
        told = {n: getattr(self, n) for n in default if n != "kind" and getattr(self, n) != default[n]}
        return f"{_PREFIX}{self.kind.value}?{urllib.parse.urlencode({k: json.dumps(v) for k, v in told.items()})}"


def _dimension_text(dim: Dimension) -> str:
    return str(dim) if isinstance(dim, int) else f"{dim[0]}:{dim[1]}"


def block_of_scope(name: str) -> Block | None:
    """The block that a scope's name tells of; None for any other scope."""
    if not name.startswith(_PREFIX):
        return None
    kind, _, query = name.removeprefix(_PREFIX).partition("?")
    if not query or kind not in [k.value for k in BlockKind]:
        return None
    told = {key: json.loads(text) for key, text in urllib.parse.parse_qsl(query)}
    dims = tuple((n, d if isinstance(d, int) else (d[0], d[1])) for n, d in told.pop("dims", ()))
    return Block(BlockKind(kind), told.pop("line"), tuple(told.pop("place", ())), dims=dims, **told)


def joined_blocks(around: Sequence[Block], inside: Iterable[Block]) -> tuple[Block, ...]:
    """The blocks around a nested program and those inside it, the outermost first, each of them once.

    A transposed program repeats the scopes of the one that it was made from.
    """
    return tuple(dict.fromkeys((*around, *inside)))


def common_blocks(rows: Iterable[tuple[Block, ...]]) -> tuple[Block, ...]:
    """The blocks that all of several operations stand in, the outermost first."""
    distinct = list(dict.fromkeys(rows))
    return tuple(b for b in distinct[0] if all(b in row for row in distinct[1:])) if distinct else ()
