"""Where each parameter lives: one submesh holds it, its gradient sum and its optimizer state; others read copies."""

import collections
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
    each stage holds about the same share of its optimizer's state (ZeRO-1, Rajbhandari et al. 2020, arXiv:1910.02054,
    by whole parameters), as its memory and its update are counted: the largest parameter that is left goes to the stage
    that owns the least share of what it could own, and of several such to the pipeline that owns least.

    Args:
      sizes_bytes: Of each parameter.
      readers: The stages that read it, in any order. One that nobody reads lives on the first stage.
    """
    firsts: list[dict[int, StageId]] = []
    could_own: collections.defaultdict[StageId, float] = collections.defaultdict(float)
    for size, own in zip(sizes_bytes, readers, strict=True):
        first: dict[int, StageId] = {}
        for one in sorted(own):
            first.setdefault(one.pipeline, one)
        firsts.append(first)
        for one in first.values():
            could_own[one] += size
    of_pipeline = [0.0] * num_pipelines
    of_stage: collections.defaultdict[StageId, float] = collections.defaultdict(float)
    owners: list[StageId] = [StageId(0, 0)] * len(sizes_bytes)
    for n in sorted(range(len(sizes_bytes)), key=lambda n: (-sizes_bytes[n], n)):
        least = [(of_stage[one] / (could_own[one] or 1.0), of_pipeline[p], p, one) for p, one in firsts[n].items()]
        if least:
            *_, pipeline, owners[n] = min(least)
            of_pipeline[pipeline] += sizes_bytes[n]
            of_stage[owners[n]] += sizes_bytes[n]
    return tuple(owners)
