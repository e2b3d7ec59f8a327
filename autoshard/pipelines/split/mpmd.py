"""Splits one program into programs of several submeshes, so that each runs where its values lie.

The update of an optimizer is traced as one program over all parameters, as on one device; parameters that lie on
different meshes of devices (submeshes) cannot meet in one. Each step of the program goes to the submesh of its values
(see `locate.py`), as late as it can. What little one submesh needs of another, such as its share of a global norm, is
exchanged between levels.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from autoshard.errors import TraceError
from autoshard.pipelines.split.mpmd_program import Exchange, Level, MpmdProgram, SubmeshProgram
from autoshard.pipelines.split.placement import SMALL_BYTES, PlacedStep, Placer
from autoshard.pipelines.split.steps import Flattening, Step


def split_mpmd(
    closed: jex.ClosedJaxpr,
    submeshes_of_inputs: Sequence[int | None],
    num_submeshes: int | None = None,
    submeshes_of_outputs: Mapping[int, int | None] | None = None,
) -> MpmdProgram:
    """Splits `closed` into programs of submeshes.

    Args:
      closed: The whole program.
      submeshes_of_inputs: For each flat input, its submesh (0, 1, ...); None for one that every submesh has a copy of,
        such as a step counter.
      num_submeshes: Number of submeshes; by default, of those that inputs have.
      submeshes_of_outputs: Where to put outputs, by their flat position (None: on every submesh). An output that is the
        next version of an input belongs where that is. All others stay where they are made; those that depend on no
        value of a submesh are made on all.

    Raises:
      TraceError: If the submeshes do not fit the program, or a conditional with side effects reads values of several.
    """
    count = num_submeshes or max((p + 1 for p in submeshes_of_inputs if p is not None), default=1)
    wanted = dict(submeshes_of_outputs or {})
    _check(closed, submeshes_of_inputs, wanted, count)
    flattening = Flattening()
    inputs = [flattening.new_value(v.aval) for v in closed.jaxpr.invars]
    steps, outputs = flattening.flatten(closed, inputs)
    locator = Placer(flattening, submeshes_of_inputs, count)
    located = locator.locate(steps)

    def output_submesh(position: int, value: int) -> int | None:
        if position in wanted:
            return wanted[position]
        return None if value in locator.unowned else min(locator.sites[value].submeshes)

    submeshes = tuple(output_submesh(k, v) for k, v in enumerate(outputs))
    return _MpmdBuilder(flattening, locator, located, tuple(outputs), submeshes, tuple(submeshes_of_inputs)).program()


def _check(
    closed: jex.ClosedJaxpr, inputs: Sequence[int | None], outputs: Mapping[int, int | None], num_submeshes: int
) -> None:
    if len(inputs) != len(closed.jaxpr.invars):
        raise TraceError(
            f"Every flat input needs a submesh or None: the program has {len(closed.jaxpr.invars)} inputs, but "
            f"{len(inputs)} submeshes are given. Flatten the arguments with jax.tree.leaves."
        )
    for what, position, submesh in (
        *(("input", *x) for x in enumerate(inputs)),
        *(("output", *x) for x in outputs.items()),
    ):
        if submesh is not None and not 0 <= submesh < num_submeshes:
            raise TraceError(
                f"A submesh must be one of 0 to {num_submeshes - 1}, but {what} {position} has {submesh}. Pass "
                "num_submeshes= with the number of submeshes."
            )
    if any(not 0 <= k < len(closed.jaxpr.outvars) for k in outputs):
        raise TraceError(
            f"submeshes_of_outputs are by flat position among the {len(closed.jaxpr.outvars)} outputs, but one is for "
            f"output {max(outputs)}."
        )


class _MpmdBuilder:
    """Chooses the level and the submeshes of every located step, from the last to the first, and makes the programs."""

    def __init__(
        self,
        flattening: Flattening,
        locator: Placer,
        located: Sequence[PlacedStep],
        outputs: tuple[int, ...],
        output_submeshes: tuple[int | None, ...],
        inputs: tuple[int | None, ...],
    ):
        self.flattening, self.locator, self.located = flattening, locator, located
        self.outputs, self.output_submeshes, self.inputs = outputs, output_submeshes, inputs
        self.needed: list[dict[int, int]] = [{} for _ in flattening.avals]
        """For each value, the submeshes that need it, and the level that first does."""
        self.runs: list[dict[int, int]] = [{} for _ in located]
        """For each step, the submeshes that run it, and when."""
        self.received: dict[tuple[int, int], int] = {}
        """For each value and submesh that gets it, the submesh that sends it."""

    def need(self, value: int, submesh: int, level: int) -> None:
        """Notes that `submesh` needs `value` in `level`."""
        known = self.needed[value].get(submesh, level)
        self.needed[value][submesh] = min(known, level)

    def holders(self, output: int) -> Sequence[int]:
        """The submeshes that must have an output."""
        submesh = self.output_submeshes[output]
        return sorted(self.locator.everywhere) if submesh is None else (submesh,)

    def program(self) -> MpmdProgram:
        """The whole."""
        ends = [self.locator.ready(v, p) for k, v in enumerate(self.outputs) for p in self.holders(k)]
        ends += [x.site.level for x in self.located if x.step.has_effects]
        last = max(ends, default=0)
        for k, value in enumerate(self.outputs):
            for submesh in self.holders(k):
                self.need(value, submesh, last)
        for index in reversed(range(len(self.located))):
            self._schedule(index)
        for value, submesh in enumerate(self.inputs):
            for reader in self.needed[value]:
                if submesh not in (None, reader):
                    self.received[value, reader] = submesh
        return MpmdProgram(
            len(self.locator.everywhere),
            tuple(self.flattening.avals),
            self.inputs,
            self._levels(last + 1),
            self.outputs,
            self.output_submeshes,
        )

    def _schedule(self, index: int) -> None:
        """Decides where and when one step runs, now that all who read its results are known."""
        step, site, is_fixed = self.located[index].step, self.located[index].site, self.located[index].is_fixed
        results = [v for v in step.results if v is not None]
        for submesh in sorted({p for v in results for p in self.needed[v]} - site.submeshes):
            asked = [v for v in results if submesh in self.needed[v]]
            if not is_fixed and not self._is_less_to_send(step, asked, submesh):
                continue
            source = min(site.submeshes & {p for v in results for p in self.needed[v]} or site.submeshes)
            for v in asked:
                self.received[v, submesh] = source
                self.need(v, source, self.needed[v][submesh] - 1)
        runs = self.runs[index]
        for v in results:
            for submesh, level in self.needed[v].items():
                if (v, submesh) not in self.received:
                    runs[submesh] = min(runs.get(submesh, level), level)
        if step.has_effects and not runs:
            runs[min(site.submeshes)] = site.level
        for submesh, level in runs.items():
            for v in step.operands:
                self.need(v, submesh, level)

    def _is_less_to_send(self, step: Step, asked: Sequence[int], submesh: int) -> bool:
        """Whether sending results to a submesh takes no more bytes than sending what they are made of."""
        size = self.flattening.size_bytes
        missing = {v for v in step.operands if submesh not in self.locator.sites[v].submeshes}
        return sum(map(size, asked)) <= sum(map(size, missing))

    def _levels(self, count: int) -> tuple[Level, ...]:
        made: dict[tuple[int, int], int] = {}  # (value, submesh) -> level
        members: dict[tuple[int, int], list[Step]] = collections.defaultdict(list)
        for located, runs in zip(self.located, self.runs, strict=True):
            for submesh, level in sorted(runs.items()):
                members[level, submesh].append(located.step)
                made.update(((v, submesh), level) for v in located.step.results if v is not None)
        used: dict[tuple[int, int], set[int]] = collections.defaultdict(set)  # (value, submesh) -> levels
        for (level, submesh), steps in members.items():
            for v in dict.fromkeys(v for step in steps for v in step.operands):
                used[v, submesh].add(level)
        exchanges = self._exchanges(made)
        for level, sent in exchanges.items():
            for v, source in ((v, x.source) for x in sent for v in x.values):
                used[v, source].add(level)
        for k, v in enumerate(self.outputs):
            for submesh in self.holders(k):
                used[v, submesh].add(count)
        programs: dict[int, list[SubmeshProgram]] = collections.defaultdict(list)
        for (level, submesh), steps in sorted(members.items(), key=lambda x: x[0]):
            own = dict.fromkeys(v for s in steps for v in s.results if v is not None)
            reads = [v for v in dict.fromkeys(v for s in steps for v in s.operands) if made.get((v, submesh)) != level]
            outputs = [v for v in own if any(later > level for later in used[v, submesh])]
            programs[level].append(SubmeshProgram(submesh, tuple(steps), tuple(reads), tuple(outputs)))
        return tuple(Level(tuple(exchanges[n]), tuple(programs[n])) for n in range(count))

    def _exchanges(self, made: Mapping[tuple[int, int], int]) -> dict[int, list[Exchange]]:
        """The exchanges before each level: small values of one type that take the same way at once are one."""
        targets: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
        for (value, submesh), source in self.received.items():
            targets[value, source].append(submesh)
        kept = {(v, p) for k, v in enumerate(self.outputs) for p in self.holders(k)}
        bundles: dict[Any, list[int]] = collections.defaultdict(list)
        for (value, source), submeshes in sorted(targets.items()):
            level = made.get((value, source), -1) + 1
            aval = self.flattening.avals[value]
            is_alone = (
                value < len(self.inputs)
                or self.flattening.size_bytes(value) > SMALL_BYTES
                or jnp.issubdtype(aval.dtype, jax.dtypes.extended)
                or any((value, p) in kept for p in submeshes)
            )
            bundles[level, source, tuple(sorted(submeshes)), str(aval.dtype), value if is_alone else -1].append(value)
        exchanges: dict[int, list[Exchange]] = collections.defaultdict(list)
        for (level, source, submeshes, _, _), values in sorted(bundles.items()):
            size = sum(map(self.flattening.size_bytes, values))
            exchanges[level].append(Exchange(tuple(values), source, submeshes, size))
        return exchanges
