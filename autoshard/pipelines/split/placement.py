"""On which submeshes each step of a program can run, and in which phase at the earliest.

Between two phases (*levels*) values are exchanged. What a submesh computes from its own values it has in the same
level; what another submesh has made, it has in the next level.

A step on arrays of one submesh runs there. A step on scalars, or on small arrays of several submeshes, may run on any
submesh, so that what follows a small exchange (the sum of the submeshes' shares of a norm) is computed again on each
submesh that needs it, in the program's own order, and the number of levels is the least possible. A step on large
arrays of several submeshes runs where most of its bytes are. A step on values that no submesh owns (step counters,
constants) may run on all submeshes.

A conditional that reads values of several submeshes is cut into one for each submesh (see `branches.py`).
"""

import dataclasses
from collections.abc import Iterator, Sequence

from autoshard.errors import TraceError
from autoshard.pipelines.split.conditionals import ConditionalSites, split_conditional
from autoshard.pipelines.split.steps import Flattening, Site, Step

SMALL_BYTES = 4096
"""A step on values of several submeshes that are at most this large may run on any submesh; they are sent."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PlacedStep:
    """A step and where it can run; `is_fixed` if on one submesh only, and what others need of it is sent."""

    step: Step
    site: Site
    is_fixed: bool


class Placer:
    """Locates the steps of one flattening, in program order.

    Args:
      flattening: Knows the sizes of the values.
      inputs: For each input value, its submesh; None if every submesh has it.
      num_submeshes: Number of submeshes.
    """

    def __init__(self, flattening: Flattening, inputs: Sequence[int | None], num_submeshes: int):
        self._flattening = flattening
        self._inputs = len(inputs)
        self.everywhere = frozenset(range(num_submeshes))
        self.sites = {v: Site(0, self.everywhere if p is None else frozenset({p})) for v, p in enumerate(inputs)}
        """The site of each value."""
        self.unowned = {v for v, p in enumerate(inputs) if p is None}
        """The values that depend on no value of a submesh."""

    def ready(self, value: int, submesh: int) -> int:
        """The first level in which `submesh` can read `value`; an input can be sent before the first."""
        return 0 if value < self._inputs else self.sites[value].level_on(submesh)

    def locate(self, steps: Sequence[Step], controls: tuple[int, ...] = ()) -> list[PlacedStep]:
        """Locates `steps`, which run only if `controls` say so; adds the sites of their results."""
        located: list[PlacedStep] = []
        for step in steps:
            if step.branches and self._spans_submeshes(step):
                located.extend(self._cut(step, controls))
                continue
            site, is_fixed = self.site_of(step, controls)
            if not step.has_effects and all(v in self.unowned for v in (*step.operands, *controls)):
                self.unowned.update(v for v in step.results if v is not None)
            self.sites.update((v, site) for v in step.results if v is not None)
            located.append(PlacedStep(step, site, is_fixed))
        return located

    def site_of(self, step: Step, controls: tuple[int, ...] = (), is_local: bool = False) -> tuple[Site, bool]:
        """The site of a step's results, and whether the step runs on one submesh only.

        `is_local`: it stays with its operands even if these are scalars.
        """
        operands = dict.fromkeys((*step.operands, *controls))
        owned = [v for v in operands if self.sites[v].submeshes != self.everywhere]
        common = self.everywhere.intersection(*(self.sites[v].submeshes for v in owned))
        stays = bool(common) and ((is_local and bool(owned)) or not all(map(self._flattening.is_scalar, owned)))
        is_small = all(self._flattening.size_bytes(v) <= SMALL_BYTES for v in owned)
        if (stays or is_small) and not step.has_effects:
            candidates = sorted(common if stays else self.everywhere)
            levels = {p: max((self.sites[v].level_on(p) for v in operands), default=0) for p in candidates}
            first = min(levels.values())
            submeshes = frozenset(p for p, level in levels.items() if level == first)
            return Site(first, submeshes), stays and len(submeshes) == 1
        submesh = self._submesh_of(owned)
        return Site(max((self.ready(v, submesh) for v in operands), default=0), frozenset({submesh})), True

    def _submesh_of(self, owned: Sequence[int]) -> int:
        """The submesh that the fewest bytes must be sent to."""
        candidates = sorted(set[int]().union(*(self.sites[v].submeshes for v in owned))) or [0]
        sent = lambda p: sum(self._flattening.size_bytes(v) for v in owned if p not in self.sites[v].submeshes)
        return min(candidates, key=sent)

    def _spans_submeshes(self, step: Step) -> bool:
        """Whether the branches of a conditional read values of different submeshes."""
        sites = {self.sites[v].submeshes for v in step.operands[1:]} - {self.everywhere}
        return len(sites) > 1

    def _cut(self, step: Step, controls: tuple[int, ...]) -> Iterator[PlacedStep]:
        controls = (*controls, step.operands[0])
        branches, outputs = [], []
        for branch in step.branches:
            steps, results = self._flattening.flatten(branch, step.arguments, step.line)
            for inner in steps:
                if inner.has_effects:
                    raise TraceError(
                        "A conditional that reads values of several submeshes runs on each of them, so its branches "
                        f"must have no side effects, but the one at {step.line or 'an unknown line'} holds "
                        f"`{inner.name}` ({inner.line or 'unknown line'}). Move that out of the conditional, or make "
                        "the conditional read the values of one submesh only."
                    )
            branches.append([(x.step, x.site) for x in self.locate(steps, controls)])
            outputs.append(results)
        joins: list[Site | None] = []
        for slot, result in enumerate(step.results):
            if result is None:
                joins.append(None)
                continue
            alternatives = tuple(results[slot] for results in outputs)
            choice = dataclasses.replace(step, operands=alternatives, branches=())
            site, _ = self.site_of(choice, controls, is_local=True)
            joins.append(site)
        for piece, site in split_conditional(step, ConditionalSites(branches, outputs, joins), self._flattening):
            self.sites.update((v, site) for v in piece.results if v is not None)
            yield PlacedStep(piece, site, len(site.submeshes) == 1)
