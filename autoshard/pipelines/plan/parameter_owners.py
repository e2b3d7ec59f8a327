"""Where each parameter lives: one submesh holds it, its gradient sum and its optimizer state; others read copies."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class StageId:
    """A stage of a pipeline, by position."""

    pipeline: int
    stage: int

    def __str__(self) -> str:
        return f"stage {self.stage} of pipeline {self.pipeline}"


def choose_owners(
    sizes_bytes: Sequence[float], readers: Sequence[Sequence[StageId]], num_pipelines: int
) -> tuple[StageId, ...]:
    """The owner of each parameter.

    Within a pipeline it is the first stage that reads the parameter. Among pipelines the owners are spread, so that
    each holds about the same share of the optimizer's state (ZeRO-1, Rajbhandari et al. 2020, arXiv:1910.02054, by
    whole parameters): the largest parameter that is left goes to the pipeline that owns least, of those that read it.

    Args:
      sizes_bytes: Of each parameter.
      readers: The stages that read it, in any order. One that nobody reads lives on the first stage.
    """
    owned = [0.0] * num_pipelines
    owners: list[StageId] = [StageId(0, 0)] * len(sizes_bytes)
    for n in sorted(range(len(sizes_bytes)), key=lambda n: (-sizes_bytes[n], n)):
        first: dict[int, StageId] = {}
        for one in sorted(readers[n]):
            first.setdefault(one.pipeline, one)
        if first:
            pipeline = min(first, key=lambda p: (owned[p], p))
            owned[pipeline] += sizes_bytes[n]
            owners[n] = first[pipeline]
    return tuple(owners)
