"""Which collectives nobody waits for: those can be joined, and can hide behind computation.

Weights are known before the layer that needs them runs, and a gradient is not needed until the update. Both transfers
are joined with others of their kind by the compiler (`cost/collectives.py`, `joined`), and can run beside the
computation of other layers. One model of the latter, tunable by one number: such a collective is exposed for
`(1 - overlap)` of its time. Everything between activations is waited for, and counts in full.
"""

import dataclasses
import math
from collections.abc import Sequence

from autoshard.cluster import CollectiveKind
from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.cost.collectives import Collective, joined
from autoshard.graph.groups import Group


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """What counts of the time of a collective.

    Attributes:
      share: The share that counts.
      num_reductions: How many the compiler joins of all-reduces that a gradient is done with; None if none.
      num_alike: How many of any other.
      scalar_share: Of a sum to a scalar, the share of latencies and launch that it pays; None for anything else.
    """

    share: float = 1.0
    num_reductions: int | None = None
    num_alike: int | None = None
    scalar_share: float | None = None

    def counted(
        self, steps: Sequence[Collective], planned: Sequence[Collective] | None = None
    ) -> tuple[Collective, ...]:
        """The collectives `steps` with the time that counts; `planned` are those of the plan, if the compiler changes
        them.
        """
        if self.scalar_share is not None:
            return tuple([_with_fixed(c, self.scalar_share * c.fixed_s) for c in steps])
        is_reduced = all(c.kind is CollectiveKind.ALL_REDUCE for c in planned or steps)
        number = self.num_reductions if is_reduced else self.num_alike
        if number is None:
            return tuple(steps)
        parts = [joined(c, number) for c in steps]
        return tuple([dataclasses.replace(c, time_s=self.share * c.time_s) for c in parts])


def _with_fixed(collective: Collective, fixed_s: float) -> Collective:
    """The collective with other latencies and launches."""
    return dataclasses.replace(collective, time_s=collective.time_s - collective.fixed_s + fixed_s, fixed_s=fixed_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Exposure:
    """Which share of a collective's time is waited for, and which collectives are joined.

    Attributes:
      share: The share that counts for collectives that nobody waits for.
      analysis: Whose collectives nobody waits for, and how many of them the compiler combines.
    """

    share: float
    analysis: ProgramAnalysis

    def of_flow(self, value: int, shape: Sequence[int]) -> Terms:
        """What counts when `value`, of `shape`, is resharded."""
        if value not in self.analysis.weights and value not in self.analysis.gradients:
            return Terms()
        return self._free(math.prod(shape))

    def of_group(self, group: Group, shape: Sequence[int]) -> Terms:
        """What counts when the results of `group` are reduced; `shape` is that of the last."""
        scalar_share = self.analysis.combined.scalar_shares.get(group.index)
        if scalar_share is not None:
            return Terms(scalar_share=scalar_share)
        if not all(a.value in self.analysis.gradients for a in group.writes):
            return Terms()
        if group.index in self.analysis.combined.statistics:
            return Terms(self.share, 1, 1)
        return self._free(math.prod(shape))

    def _free(self, num_elements: int) -> Terms:
        return Terms(
            self.share, self.analysis.combined.num_reductions, self.analysis.combined.num_alike.get(num_elements, 1)
        )
