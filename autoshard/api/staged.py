"""`autoshard.StagedPlan`: a plan of a training step in stages, with all that can be done with it."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from autoshard.api.base_plan import BasePlan
from autoshard.api.program import Plan
from autoshard.errors import AutoshardError, ConfigError, PlanMismatchError, StageError
from autoshard.pipelines.plan.comparison import StagedComparison, compare_forms
from autoshard.pipelines.plan.diff import StagedDiff, diff_stages
from autoshard.pipelines.plan.explain import explain, program_text
from autoshard.pipelines.plan.export import exported_stages
from autoshard.pipelines.plan.files import read_staged_plan, write_staged_plan
from autoshard.pipelines.plan.notebook import staged_plan_html
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.pipelines.plan.rebuild import program_function
from autoshard.pipelines.run.agreement import plan_of_first
from autoshard.pipelines.run.device_meshes import DeviceMeshes
from autoshard.pipelines.run.staged_function import StagedFunction, trace_step
from autoshard.pipelines.schedule.picture import draw_timeline
from autoshard.pipelines.schedule.timeline_text import timeline_text
from autoshard.plans.explain import explain as explain_program
from autoshard.plans.export import form_named
from autoshard.train_step import TrainStep
from autoshard.verify.report import Failure, Report
from autoshard.verify.verify import verify


@dataclasses.dataclass(frozen=True, slots=True)
class StagedPlan(PipelinePlan, BasePlan):
    """A plan of a training step over several meshes; see `PipelinePlan` for its data, `BasePlan` for its methods.

    Its `programs` are plans of the distinct stages, each a `Plan` too.
    """

    is_staged: ClassVar[bool] = True

    @classmethod
    def of(cls, data: PipelinePlan) -> "StagedPlan":
        """The plan that holds `data`."""
        fields = {f.name: getattr(data, f.name) for f in dataclasses.fields(PipelinePlan)}
        return cls(**{**fields, "programs": tuple(map(Plan.of, data.programs))})

    @classmethod
    def of_first(cls, plan: PipelinePlan | None) -> "StagedPlan":
        """The plan of process 0, in every process; all of them must call this together, others than it with None.

            plan = autoshard.plan(...) if jax.process_index() == 0 else None
            plan = autoshard.StagedPlan.of_first(plan)

        Raises:
          PlanMismatchError: The first process has no plan.
        """
        return cls.of(plan_of_first(plan))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "StagedPlan":
        """Reads a plan written by `save`.

        Raises:
          FileFormatError: The file is not a plan in stages, or of another version.
        """
        return cls.of(read_staged_plan(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        write_staged_plan(self, path)

    def jit(self, fn: TrainStep, devices: Sequence[Any] | None = None, **settings: Any) -> StagedFunction:
        """Makes the step run as planned; see `BasePlan.jit`.

        Args:
          fn: The `TrainStep` that was planned.
          devices: One for each device of the cluster, in its order (slice after slice); default all live devices.
          **settings: See `StagedFunction`.

        Raises:
          ConfigError: `balance` is asked for, which only plans of one program have.
          PlanMismatchError: `fn` is no `TrainStep`.
        """
        if settings.pop("balance", None) is not None:
            raise ConfigError(
                "Shares of a tensor axis (balance=) change in plans of one program only, and this one is in stages, "
                "which are cut for devices of unequal speed when they are planned. Plan again with the measured "
                "speeds, or leave `balance` out."
            )
        return StagedFunction(self, _train_step(fn), devices, **settings)

    def check(self, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        trace_step(self, _train_step(fn), DeviceMeshes(self, None), *args)

    def init(
        self, init_fn: Callable[..., Any], *args: Any, run: StagedFunction | None = None, devices: Any = None
    ) -> Any:
        if run is None:
            raise StageError(
                "Where the state of a step in stages lies follows from its plan and from the step. Pass what "
                "`plan.jit(step)` returned: plan.init(init_fn, seed, run=run)."
            )
        return run.init(init_fn, *args)

    def explain(self, program: int | None = None, full: bool = False) -> str:
        if program is None:
            return explain(self, full)
        if not 0 <= program < len(self.programs):
            raise ConfigError(
                f"program=, --program: the plan has the programs 0 to {len(self.programs) - 1}; received {program}. "
                "Choose one of them."
            )
        return f"{self.program_title(program)}\n{explain_program(self.programs[program], full)}"

    def _repr_html_(self) -> str:
        return staged_plan_html(self)

    def draw_timeline(self, path: str | os.PathLike[str]) -> str:
        draw_timeline(self.timeline, pathlib.Path(path), f"Step on cluster {self.cluster}, as planned")
        return timeline_text(self.timeline)

    def program(self, number: int, fn: Callable[..., Any], args: Sequence[Any] = ()) -> tuple[Any, tuple[Any, ...]]:
        state, batch = args or self._planned_shapes()
        return program_function(self, _train_step(fn), state, batch, number)

    def program_title(self, number: int) -> str:
        return program_text(self, number)

    def verify(
        self, fn: Callable[..., Any], *args: Any, target: str | None = None, time_limit_s: float | None = None
    ) -> Report:
        outcomes, titles = [], []
        for number, program in enumerate(self.programs):
            titles.append(self.program_title(number))
            function, shapes = self.program(number, fn, args)
            try:
                outcome = verify(program, function, *shapes, target=target, time_limit_s=time_limit_s)
            except PlanMismatchError:
                raise
            except AutoshardError as error:
                outcome = Failure(target or program.device, str(error))
            outcomes.append(outcome)
        return Report(tuple(outcomes), tuple(titles))

    def diff(self, other: BasePlan) -> StagedDiff:
        if not isinstance(other, StagedPlan):
            raise PlanMismatchError(
                "A plan in stages is compared with another in stages, and this one is of one program. Compare their "
                "step times, or `diff` two plans of one kind."
            )
        return diff_stages(self, other)

    def export(self, form: str, names: Mapping[str, Sequence[str | None]] | None = None, nearest: bool = False) -> str:
        return exported_stages(self, form_named(form), names, nearest)

    def compare(self, fn: Callable[..., Any], *args: Any, title: str | None = None) -> StagedComparison:
        return compare_forms(self, title or getattr(fn, "__name__", "the step"))

    def _planned_shapes(self) -> tuple[Any, Any]:
        if self.shapes is None:
            raise PlanMismatchError(
                "A plan read from a file does not know the pytree types of state and batch. Pass both, as arrays or "
                "jax.ShapeDtypeStruct."
            )
        return self.shapes


def _train_step(fn: Callable[..., Any]) -> TrainStep:
    if not isinstance(fn, TrainStep):
        name = getattr(fn, "__name__", type(fn).__name__)
        raise PlanMismatchError(
            f"A plan in stages runs the TrainStep that was planned; received `{name}`, which is none. Pass that step."
        )
    return fn
