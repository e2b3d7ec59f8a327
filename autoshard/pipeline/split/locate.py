"""On which places each step of a program can run, and in which phase at the earliest.

Between two phases (*levels*) values are exchanged. What a place computes from its own values it has in the same level;
what another place has made, it has in the next level.

A step on arrays of one place runs there. A step on scalars, or on small arrays of several places, may run on any place,
so that what follows a small exchange (the sum of the places' shares of a norm) is computed again on each place that
needs it, in the program's own order, and the number of levels is the least possible. A step on large arrays of several
places runs where most of its bytes are. A step on values that no place owns (step counters, constants) may run on all
places.

A conditional that reads values of several places is cut into one for each place (see `branches.py`).
"""

import dataclasses
from collections.abc import Iterator, Sequence

from autoshard.errors import TraceError
from autoshard.pipeline.split.conditionals import Cut, cut_conditional
from autoshard.pipeline.split.steps import Flattening, Site, Step

SMALL_BYTES = 4096
"""A step on values of several places that are at most this large may run on any place; they are sent."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Located:
    """A step and where it can run; `is_fixed` if on one place only, and what others need of it is sent."""

    step: Step
    site: Site
    is_fixed: bool


class Locator:
    """Locates the steps of one flattening, in program order.

    Args:
      flattening: Knows the sizes of the values.
      inputs: For each input value, its place; None if every place has it.
      num_places: Number of places.
    """

    def __init__(self, flattening: Flattening, inputs: Sequence[int | None], num_places: int):
        self._flattening = flattening
        self._inputs = len(inputs)
        self.everywhere = frozenset(range(num_places))
        self.sites = {v: Site(0, self.everywhere if p is None else frozenset({p})) for v, p in enumerate(inputs)}
        """The site of each value."""
        self.unowned = {v for v, p in enumerate(inputs) if p is None}
        """The values that depend on no value of a place."""

    def ready(self, value: int, place: int) -> int:
        """The first level in which `place` can read `value`; an input can be sent before the first."""
        return 0 if value < self._inputs else self.sites[value].level_on(place)

    def locate(self, steps: Sequence[Step], controls: tuple[int, ...] = ()) -> list[Located]:
        """Locates `steps`, which run only if `controls` say so; adds the sites of their results."""
        located: list[Located] = []
        for step in steps:
            if step.branches and self._spans_places(step):
                located.extend(self._cut(step, controls))
                continue
            site, is_fixed = self.site_of(step, controls)
            if not step.has_effects and all(v in self.unowned for v in (*step.operands, *controls)):
                self.unowned.update(v for v in step.results if v is not None)
            self.sites.update((v, site) for v in step.results if v is not None)
            located.append(Located(step, site, is_fixed))
        return located

    def site_of(self, step: Step, controls: tuple[int, ...] = (), is_local: bool = False) -> tuple[Site, bool]:
        """The site of a step's results, and whether the step runs on one place only.

        `is_local`: it stays with its operands even if these are scalars.
        """
        operands = dict.fromkeys((*step.operands, *controls))
        owned = [v for v in operands if self.sites[v].places != self.everywhere]
        common = self.everywhere.intersection(*(self.sites[v].places for v in owned))
        stays = bool(common) and ((is_local and bool(owned)) or not all(map(self._flattening.is_scalar, owned)))
        is_small = all(self._flattening.size_bytes(v) <= SMALL_BYTES for v in owned)
        if (stays or is_small) and not step.has_effects:
            candidates = sorted(common if stays else self.everywhere)
            levels = {p: max((self.sites[v].level_on(p) for v in operands), default=0) for p in candidates}
            first = min(levels.values())
            places = frozenset(p for p, level in levels.items() if level == first)
            return Site(first, places), stays and len(places) == 1
        place = self._place_of(owned)
        return Site(max((self.ready(v, place) for v in operands), default=0), frozenset({place})), True

    def _place_of(self, owned: Sequence[int]) -> int:
        """The place that the fewest bytes must be sent to."""
        candidates = sorted(set[int]().union(*(self.sites[v].places for v in owned))) or [0]
        sent = lambda p: sum(self._flattening.size_bytes(v) for v in owned if p not in self.sites[v].places)
        return min(candidates, key=sent)

    def _spans_places(self, step: Step) -> bool:
        """Whether the branches of a conditional read values of different places."""
        sites = {self.sites[v].places for v in step.operands[1:]} - {self.everywhere}
        return len(sites) > 1

    def _cut(self, step: Step, controls: tuple[int, ...]) -> Iterator[Located]:
        controls = (*controls, step.operands[0])
        branches, outputs = [], []
        for branch in step.branches:
            steps, results = self._flattening.flatten(branch, step.arguments, step.line)
            for inner in steps:
                if inner.has_effects:
                    raise TraceError(
                        "A conditional that reads values of several places runs on each of them, so its branches must "
                        f"have no side effects, but the one at {step.line or 'an unknown line'} holds "
                        f"`{inner.name}` ({inner.line or 'unknown line'}). Move that out of the conditional, or make "
                        "the conditional read the values of one place only."
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
        for piece, site in cut_conditional(step, Cut(branches, outputs, joins), self._flattening):
            self.sites.update((v, site) for v in piece.results if v is not None)
            yield Located(piece, site, len(site.places) == 1)
