"""What was found of embedding tables in a loss, as data that can be printed."""

import dataclasses
import math

from autoshard.printing import amount


@dataclasses.dataclass(frozen=True, slots=True)
class LookUp:
    """One gather of rows of a table.

    Attributes:
      shape: Of the ids: one row is read for each.
      fills: Whether an id that is no row gives a fill value; otherwise the nearest row is read.
      source: The user's line.
    """

    shape: tuple[int, ...]
    fills: bool
    source: str

    @property
    def num_ids(self) -> int:
        """Rows read, duplicates included."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A parameter that the loss reads by look-ups only, with ids that depend on the batch alone.

    Attributes:
      path: Of the parameter, such as `tables.0.embedding`.
      index: Its number among the leaves of the parameters.
      num_rows: Its first dimension.
      row_shape: Its other dimensions. dtype: Its type.
      itemsize_bytes: Bytes of an element.
      look_ups: In the order of the loss.
    """

    path: str
    index: int
    num_rows: int
    row_shape: tuple[int, ...]
    dtype: str
    itemsize_bytes: int
    look_ups: tuple[LookUp, ...]

    @property
    def num_ids(self) -> int:
        """Rows read in a step, duplicates included."""
        return sum(look_up.num_ids for look_up in self.look_ups)

    @property
    def most_rows(self) -> int:
        """The most different rows that a step can read."""
        return min(self.num_rows, self.num_ids)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.row_shape) * self.itemsize_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the table."""
        return self.num_rows * self.row_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class NotATable:
    """A parameter that is looked up, and yet is no table.

    Attributes:
      path: Of the parameter. shape: Its shape.
      why: What else is done with it, with the user's line.
    """

    path: str
    shape: tuple[int, ...]
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Tables:
    """The embedding tables of a loss. Printing them shows each with its look-ups, and what is not one.

    Attributes:
      tables: In the order of the parameters.
      refused: Parameters that look like tables.
      dense_bytes: Bytes of all parameters that are no tables.
    """

    tables: tuple[Table, ...]
    refused: tuple[NotATable, ...]
    dense_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all tables."""
        return sum(table.size_bytes for table in self.tables)

    def __str__(self) -> str:
        count = len(self.tables)
        lines = [
            f"{count or 'no'} embedding table{'' if count == 1 else 's'}"
            + (f" of {amount(self.size_bytes)}" if count else "")
            + f"; {amount(self.dense_bytes)} of dense parameters"
        ]
        width = max((len(t.path) for t in self.tables), default=0)
        for table in self.tables:
            row = f"{table.dtype}[{','.join(map(str, table.row_shape))}]"
            lines.append(
                f"  {table.path:<{width}}  {table.num_rows:>13,} rows of {row}, {table.num_ids:,} ids a step, read at "
                + ", ".join(dict.fromkeys(look_up.source or "an unknown line" for look_up in table.look_ups))
            )
        if self.refused:
            lines.append("looked up, but no tables:")
            lines += [f"  {r.path} {list(r.shape)}: {r.why}" for r in self.refused]
        return "\n".join(lines)
