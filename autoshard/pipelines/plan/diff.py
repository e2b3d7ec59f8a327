"""What differs between two plans in stages: submeshes, shares, schedules, and the program of each stage."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from autoshard.pipelines.plan.equal_pipelines import EqualPipelines
from autoshard.pipelines.plan.explain import program_text
from autoshard.pipelines.plan.parameter_owners import StageId
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.plans.diff import diff
from autoshard.plans.differences import Difference
from autoshard.plans.plan_diff import PlanDiff, signed
from autoshard.printing import PAGE_WIDTH, TextConsole, amount, seconds, table

ABSENT = "absent"
"""What stands for a pipeline or stage that a plan does not have."""


@dataclasses.dataclass(frozen=True, slots=True)
class StagedSide:
    """The figures of one of the two plans: of a step, and of the submesh whose memory is fullest, on each device."""

    cluster: str
    slices: tuple[str, ...]
    batch_size: int
    step_s: float
    peak_bytes: float
    num_pipelines: int
    num_programs: int


@dataclasses.dataclass(frozen=True, slots=True)
class StageChange:
    """What is otherwise in some pipelines.

    Attributes:
      pipelines: Their numbers. stage: Which stage of each; None for what is of the whole pipeline.
      what: `examples`, `micro-batches`, `schedule`, `layers`, `devices` or `mesh`.
      before, after: In A and in B; `absent` where a plan has no such pipeline or stage.
    """

    pipelines: tuple[int, ...]
    stage: int | None
    what: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramChange:
    """A stage that both plans have, with the same layers, and whose programs differ.

    Attributes:
      stages: Where it runs in both. a, b: The numbers of its program in A and in B.
      title: What the program in B is. diff: What differs.
    """

    stages: tuple[StageId, ...]
    a: int
    b: int
    title: str
    diff: PlanDiff


@dataclasses.dataclass(frozen=True, slots=True)
class StagedDiff(Difference[StagedSide]):
    """What differs between plan A and plan B, both in stages; figures are B less A.

    Attributes:
      stages: Pipelines and stages that run otherwise, those with the same change together.
      programs: Stages with the same layers and other programs.
      owners: Parameters that live on another stage: path, where in A, where in B; None where a plan has none.
    """

    FORMAT = "autoshard-staged-diff"

    stages: tuple[StageChange, ...]
    programs: tuple[ProgramChange, ...]
    owners: tuple[tuple[str, StageId | None, StageId | None], ...]

    @property
    def is_empty(self) -> bool:
        """Whether the plans decide the same and cost the same."""
        return not (self.stages or self.programs or self.owners) and self.a == self.b

    def text(self, width: int = PAGE_WIDTH, most: int = 20) -> str:
        """The whole difference, in lines of `width`; of each table the `most` first rows, and how many more."""
        console = TextConsole(width)
        rows = table("", [("", "left"), ("A", "right"), ("B", "right"), ("B less A", "right")])
        rows.title = None
        a, b = self.a, self.b
        rows.add_row("cluster", a.cluster, b.cluster, "")
        rows.add_row("slices", ", ".join(a.slices), ", ".join(b.slices), "")
        for name, field in (("examples", "batch_size"), ("pipelines", "num_pipelines"), ("programs", "num_programs")):
            rows.add_row(name, str(getattr(a, field)), str(getattr(b, field)), "")
        rows.add_row("step", seconds(a.step_s), seconds(b.step_s), signed(self.step_s, seconds))
        rows.add_row("memory where it is fullest", *map(amount, (a.peak_bytes, b.peak_bytes)), self._memory)
        console.print(rows)
        console.print()
        if self.is_empty:
            console.print("The plans decide the same and cost the same.")
        if self.stages:
            shown = table(
                "What runs otherwise",
                [("pipeline", "left"), ("stage", "left"), ("", "left"), ("in A", "left"), ("in B", "left")],
            )
            for c in self.stages[:most]:
                stage = "all" if c.stage is None else str(c.stage)
                shown.add_row(EqualPipelines(c.pipelines).short_name, stage, c.what, c.before, c.after)
            console.print(shown)
            if self.stages[most:]:
                console.print(f"and {len(self.stages) - most} more")
            console.print()
        if self.owners:
            console.print(f"{len(self.owners)} parameters live elsewhere, such as:")
            for path, before, after in self.owners[: most // 4]:
                console.print(f"  {path}: {before or ABSENT} in A, {after or ABSENT} in B")
            console.print()
        for c in self.programs:
            console.print(f"{c.title} in B, in place of program {c.a} of A")
            console.print(c.diff.text(width, most))
        return console.text

    @property
    def _memory(self) -> str:
        return signed(self.peak_bytes, amount)

    def __str__(self) -> str:
        return self.text()


def diff_stages(a: PipelinePlan, b: PipelinePlan) -> StagedDiff:
    """Compares two plans in stages, of one step or of several, on one cluster or on two.

    Pipelines and stages are compared by their numbers. Programs are compared where a stage has the same layers in both
    plans; each pair of programs once.
    """
    alike: dict[tuple[int | None, str, str, str], list[int]] = {}
    for pipeline, stage, what, before, after in _changes(a, b):
        alike.setdefault((stage, what, before, after), []).append(pipeline)
    stages = tuple(StageChange(tuple(pipelines), *key) for key, pipelines in alike.items())
    owners = [dict(zip(plan.parameters, plan.owners, strict=True)) for plan in (a, b)]
    moved = [
        (path, owners[0].get(path), owners[1].get(path))
        for path in dict.fromkeys([*a.parameters, *b.parameters])
        if owners[0].get(path) != owners[1].get(path)
    ]
    return StagedDiff(_side(a), _side(b), stages, _programs(a, b), tuple(moved))


def _side(plan: PipelinePlan) -> StagedSide:
    return StagedSide(
        cluster=plan.cluster,
        slices=tuple(f"{s.num_devices} x {s.device}" for s in plan.slices),
        batch_size=plan.batch_size,
        step_s=plan.step_s,
        peak_bytes=plan.timeline.fullest.peak_bytes,
        num_pipelines=len(plan.arrangement.pipelines),
        num_programs=len(plan.programs),
    )


def _changes(a: PipelinePlan, b: PipelinePlan) -> Iterator[tuple[int, int | None, str, str, str]]:
    """(pipeline, stage, what, in A, in B) of all that differs."""
    tell: tuple[tuple[str, Callable[[PipelinePlan, int], str]], ...] = (
        ("examples", lambda plan, p: str(plan.pipeline(p).num_examples)),
        (
            "micro-batches",
            lambda plan, p: f"{plan.pipeline(p).num_micro_batches} x {plan.pipeline(p).micro_batch_size}",
        ),
        ("schedule", lambda plan, p: plan.pipeline(p).schedule.value),
    )
    tell_stage: tuple[tuple[str, Callable[[PipelinePlan, StageId], str]], ...] = (
        ("layers", _layers),
        ("devices", lambda plan, one: plan.mesh_of(one).name),
        ("mesh", lambda plan, one: ", ".join(f"{x}={n}" for x, n in plan.mesh_of(one).axes)),
    )
    ids = [set(plan.stage_ids) for plan in (a, b)]
    pipelines = [range(len(plan.arrangement.pipelines)) for plan in (a, b)]
    for p in range(max(map(len, pipelines))):
        for what, of in tell:
            words = [of(plan, p) if p in known else ABSENT for plan, known in zip((a, b), pipelines, strict=True)]
            if words[0] != words[1]:
                yield p, None, what, words[0], words[1]
        for one in sorted(i for i in ids[0] | ids[1] if i.pipeline == p):
            for what, of in tell_stage:
                words = [of(plan, one) if one in known else ABSENT for plan, known in zip((a, b), ids, strict=True)]
                if words[0] != words[1]:
                    yield p, one.stage, what, words[0], words[1]


def _layers(plan: PipelinePlan, one: StageId) -> str:
    part = plan.pipeline(one.pipeline).stages[one.stage]
    numbers = str(part.start) if part.stop == part.start + 1 else f"{part.start}-{part.stop - 1}"
    return numbers + (", computed again" if part.rematerialise else "")


def _programs(a: PipelinePlan, b: PipelinePlan) -> tuple[ProgramChange, ...]:
    shared = sorted(set(a.stage_ids) & set(b.stage_ids))
    numbers = lambda one: (a.program_of[one.pipeline][one.stage], b.program_of[one.pipeline][one.stage])
    same = [one for one in shared if _layers(a, one) == _layers(b, one)]
    found = []
    for (x, y), members in itertools.groupby(sorted(same, key=lambda one: (numbers(one), one)), key=numbers):
        between = diff(a.programs[x], b.programs[y])
        if not between.is_empty:
            found.append(ProgramChange(tuple(members), x, y, program_text(b, y), between))
    return tuple(found)
