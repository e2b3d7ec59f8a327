"""Policies of rematerialisation as data: what each layer of a loss keeps for its backward pass.

The names are those of the field: keeping only the inputs of layers is Megatron-LM's "full" recomputation and JAX's
`nothing_saveable`; keeping the products with weights is `dots_with_no_batch_dims_saveable`, which leaves out the scores
of attention, as Megatron-LM's "selective" recomputation does (Korthikanti et al. 2022, arXiv:2205.05198). Products that
sum nothing are none: the compiler multiplies.
"""

import dataclasses
import enum


class Keep(enum.Enum):
    """What a layer keeps for its backward pass; everything else that this needs is computed again."""

    ALL = "all"
    ALL_BUT_LARGEST = "all but the largest values"
    PRODUCTS = "products"
    WEIGHT_PRODUCTS = "products with weights"
    INPUTS = "inputs"


RECOMPUTING = (Keep.ALL_BUT_LARGEST, Keep.WEIGHT_PRODUCTS, Keep.PRODUCTS, Keep.INPUTS)
"""All but `Keep.ALL`, in the order in which they are tried: mostly those that recompute little come first."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers of one kind that follow each other in the loss.

    Attributes:
      start: The first equation, in the loss with its calls inlined.
      period: Equations of one layer. count: Number of layers.
      is_loop: Whether the equation `start` is a loop over the layers, which then all keep the same.
    """

    start: int
    period: int
    count: int
    is_loop: bool = False

    @property
    def stop(self) -> int:
        """The first equation behind the run."""
        return self.start + (1 if self.is_loop else self.period * self.count)


@dataclasses.dataclass(frozen=True, slots=True)
class RunPolicy:
    """What the layers of a run keep: `kept` has (what, how many layers) from the first layer on."""

    run: LayerRun
    kept: tuple[tuple[Keep, int], ...]

    def __str__(self) -> str:
        parts = [f"{keep.value} in {count}" for keep, count in self.kept if count]
        if len(parts) == 1:
            return f"{self.kept[0][0].value} in all {self.run.count} layers"
        return f"{', then '.join(parts)} of {self.run.count} layers"


@dataclasses.dataclass(frozen=True, slots=True)
class RematPolicy:
    """What all layers of a loss keep for the backward pass; `jax.checkpoint` in the loss itself is taken out first.

    Attributes:
      runs: Of each run of layers, in the order of the loss.
    """

    runs: tuple[RunPolicy, ...]

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(map(str, self.runs)))

    @property
    def num_layers(self) -> int:
        """Layers that it speaks of."""
        return sum(p.run.count for p in self.runs)


def uniform(runs: tuple[LayerRun, ...], keep: Keep) -> RematPolicy:
    """All layers keep the same."""
    return RematPolicy(tuple(RunPolicy(run, ((keep, run.count),)) for run in runs))


def first_layers(runs: tuple[LayerRun, ...], first: Keep, rest: Keep, count: int) -> RematPolicy:
    """The first `count` layers keep `first`, all others `rest`.

    The memory of a step peaks where the backward pass begins. What the first layers recompute, they recompute when the
    residuals of the last ones are gone already.

    Args:
      runs: The layers, none of them in a loop. first, rest: What is kept. count: Layers, over all runs.
    """
    found = []
    for run in runs:
        own = min(count, run.count)
        count -= own
        found.append(RunPolicy(run, tuple((k, n) for k, n in ((first, own), (rest, run.count - own)) if n)))
    return RematPolicy(tuple(found))
