"""A model as traced for one micro-batch size, cut into named layers."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from autoshard.pipelines.split.forward import Forward, trace_forward
from autoshard.pipelines.split.layer_boundaries import LayerBoundaries, find_layers
from autoshard.pipelines.split.stage_program import StageSplitter
from autoshard.train_step import TrainStep


@dataclasses.dataclass(frozen=True, slots=True)
class TracedModel:
    """A model as traced for one micro-batch size, cut into layers."""

    forward: Forward
    stages: StageSplitter


def trace_model(
    step: TrainStep, state: Any, batch: Any, micro_batch_size: int, cuts: LayerBoundaries | None = None
) -> TracedModel:
    """Traces the loss of a micro-batch and finds its layers, or cuts it as `cuts` says."""
    forward = trace_forward(step, state, batch, micro_batch_size)
    if cuts is None or cuts.stop != len(forward.main):  # a program of another size may have other equations
        cuts = find_layers(forward)
    cuts = dataclasses.replace(cuts, names=_names(forward, cuts))
    return TracedModel(forward, StageSplitter(forward, cuts))


def _names(forward: Forward, cuts: LayerBoundaries) -> tuple[str, ...]:
    """Names of the layers: the longest path that most of their own parameters lie below."""
    stages = StageSplitter(forward, cuts)
    names, seen = [], set()
    for layer in range(cuts.num_layers):
        read = [forward.params.names[n] for n in stages.program(layer, layer + 1).interface.params]
        own = [n for n in read if n not in seen] or read
        seen.update(read)
        names.append(_common_path(own))
    return tuple(f"{n} ({names[:k].count(n) + 1})" if names.count(n) > 1 else n for k, n in enumerate(names))


def _common_path(paths: Sequence[str]) -> str:
    """The longest path that more than half of `paths` lie below."""
    if not paths:
        return "no weights"
    above = collections.Counter(
        ".".join(keys[:depth]) for keys in (p.split(".") for p in paths) for depth in range(1, max(2, len(keys)))
    )
    shared = [path for path, count in above.items() if 2 * count > len(paths)]
    return max(shared, key=len) if shared else paths[0].rpartition(".")[0] or paths[0]
