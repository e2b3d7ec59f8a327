"""Finds the layers of a model in the traced loss: where it can be cut with little to send.

Between two heavy equations (products, convolutions, loops, checkpointed functions) the program is cut, if at all, where
the fewest bytes are alive. Such a cut begins a layer if only one value crosses it, or if it is a valley: on neither
side, up to the next higher cut, do fewer bytes cross. In a residual network these are the submeshes between its blocks
and between their branches, where nothing but the residual stream is alive. Between two checkpointed functions, which
are blocks by their author's word, it is always cut: of a decoder whose blocks all read the encoder's output, no such
cut is lower than another, and those in the encoder are.

Where annotations ask for stages, a layer begins between any two of them: where the fewest bytes cross.
"""

import bisect
import dataclasses
import itertools

import jax.extend.core as jex

from autoshard.pipelines.split.forward import Forward
from autoshard.trace.rules.products import PRODUCTS
from autoshard.trace.walk import EquationKind, is_checkpoint, kind_of, size_bytes, variables

_HEAVY = PRODUCTS | {"sort", "gather", "custom_vjp_call"}
_NEGLIGIBLE_BYTES = 4096
"""Values up to this size (sums of losses, counts) do not make a cut more or less worth while."""
_VALLEY_TOLERANCE = 1.01


@dataclasses.dataclass(frozen=True, slots=True)
class LayerBoundaries:
    """The layers of a forward program.

    Attributes:
      starts: For each layer, the position in `Forward.main` of its first equation; the first is 0.
      stop: Number of main equations.
      names: For people.
      warning: Why there are none to speak of; None where layers were found.
    """

    starts: tuple[int, ...]
    stop: int
    names: tuple[str, ...]
    warning: str | None = None

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.starts)

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """Positions of the main equations of layers `first <= layer < stop`."""
        ends = (*self.starts, self.stop)
        return ends[first], ends[stop]


def find_layers(forward: Forward) -> LayerBoundaries:
    """The layers of `forward`; one, with a warning, where it cannot be cut."""
    equations = [forward.jaxpr.eqns[i] for i in forward.main]
    crossing, counts = _crossing(equations)
    heavy = [i for i, e in enumerate(equations) if _is_heavy(e)]
    gaps = []
    for before, after in zip(heavy, heavy[1:], strict=False):
        # of equal submeshes the first: a cut lies right behind what makes the value that crosses it
        gaps.append(min(range(before + 1, after + 1), key=lambda i: (crossing[i], i)))
    borders: list[int] = []
    heights = [crossing[g] for g in gaps]
    is_block = [is_checkpoint(equations[i]) for i in heavy]
    kept = [
        g for k, g in enumerate(gaps) if counts[g] == 1 or (is_block[k] and is_block[k + 1]) or _is_valley(heights, k)
    ]
    spans = forward.asked.spans if forward.asked is not None else ()
    for (_, last), (first, _) in itertools.pairwise(spans):
        if not any(last < start <= first for start in kept):
            border = min(range(last + 1, first + 1), key=lambda i: (crossing[i], i))
            same_gap = bisect.bisect_left(heavy, border)  # its cut is there now
            kept = [start for start in kept if start in borders or bisect.bisect_left(heavy, start) != same_gap]
            kept.append(border)
            borders.append(border)
    starts = tuple(sorted({0, *kept}))
    warning = None
    if len(heavy) < 2:  # of several, there is a lowest place between two
        warning = (
            f"No layers were found in the {len(equations)} equations of the loss: fewer than two of them are heavy "
            "(products, convolutions, loops, checkpointed functions). It stays one stage."
        )
    return LayerBoundaries(starts, len(equations), tuple(f"layer {k}" for k in range(len(starts))), warning)


def _is_heavy(equation: jex.JaxprEqn) -> bool:
    kind = kind_of(equation)
    if kind in (EquationKind.SCAN, EquationKind.WHILE, EquationKind.OPAQUE):
        return True
    return equation.primitive.name in _HEAVY or is_checkpoint(equation)


def _crossing(equations: list[jex.JaxprEqn]) -> tuple[list[float], list[int]]:
    """For each position i, the bytes and the number of values that are made before equation i and read by it or later.

    Values that only leave the program, and negligible ones, do not count.
    """
    made, last = {}, {}
    for i, equation in enumerate(equations):
        for v in variables(equation.invars):
            if v in made:
                last[v] = i
        for v in variables(equation.outvars):
            made[v] = i
    # what is read through equations that are no main ones cannot be made of main values
    crossing, counts = [0.0] * (len(equations) + 1), [0] * (len(equations) + 1)
    changes: list[list[tuple[float, int]]] = [[] for _ in range(len(equations) + 2)]
    for v, i in last.items():
        size = size_bytes(v)
        if size <= _NEGLIGIBLE_BYTES and not v.aval.shape:
            continue
        changes[made[v] + 1].append((size, 1))
        changes[i + 1].append((-size, -1))
    total, count = 0.0, 0
    for i in range(len(equations) + 1):
        for size, number in changes[i]:
            total, count = total + size, count + number
        crossing[i], counts[i] = total, count
    return crossing, counts


def _is_valley(heights: list[float], k: int) -> bool:
    """Whether on both sides of `k`, past what is equally high, it first goes up (or the row ends)."""
    for step in (-1, 1):
        i = k + step
        while 0 <= i < len(heights) and heights[k] / _VALLEY_TOLERANCE <= heights[i] <= heights[k] * _VALLEY_TOLERANCE:
            i += step
        if 0 <= i < len(heights) and heights[i] < heights[k]:
            return False
    return True
