"""A program split over several submeshes (MPMD): what each runs in each level, and what they exchange between."""

import dataclasses
from typing import Any

from autoshard.pipelines.split.steps import Step, run_steps


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """Values sent from one submesh to others, together; several only if all are small, of one type, and not inputs.

    Attributes:
      values: What is sent. size_bytes: Bytes of them, to each target.
      source, targets: The submesh that has them, and those that get them.
    """

    values: tuple[int, ...]
    source: int
    targets: tuple[int, ...]
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SubmeshProgram:
    """What one submesh runs in one level.

    Attributes:
      submesh: The submesh. steps: What it runs, in the order of the whole program.
      inputs, outputs: The values that it reads, and those of its results that are read elsewhere or later.
    """

    submesh: int
    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def __call__(self, *arrays: Any) -> list[Any]:
        """The outputs, from the inputs."""
        env = dict(zip(self.inputs, arrays, strict=True))
        run_steps(self.steps, env)
        return [env[v] for v in self.outputs]


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """Exchanges, and then programs that need nothing of each other; at most one a submesh, by ascending submesh."""

    exchanges: tuple[Exchange, ...]
    programs: tuple[SubmeshProgram, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class MpmdProgram:
    """A program split by submesh.

    Attributes:
      num_submeshes: Number of submeshes.
      avals: The abstract value of every value; the flat inputs are values 0, 1, ...
      inputs: For each flat input, its submesh; None if every submesh must have it.
      levels: What runs, in order.
      outputs: For each flat output, its value. output_submeshes: And its submesh; None if every submesh has it.
    """

    num_submeshes: int
    avals: tuple[Any, ...]
    inputs: tuple[int | None, ...]
    levels: tuple[Level, ...]
    outputs: tuple[int, ...]
    output_submeshes: tuple[int | None, ...]

    @property
    def exchanged_bytes(self) -> int:
        """Bytes sent in one run, counted once for each submesh that they are sent to."""
        return sum(x.size_bytes * len(x.targets) for level in self.levels for x in level.exchanges)

    def holders(self, output: int) -> tuple[int, ...]:
        """The submeshes that have a flat output in the end."""
        submesh = self.output_submeshes[output]
        return tuple(range(self.num_submeshes)) if submesh is None else (submesh,)
