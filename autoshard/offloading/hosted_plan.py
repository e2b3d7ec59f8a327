"""`autoshard.HostTablesPlan`: a plan of a training step whose embedding tables live in host memory."""

import dataclasses
import html
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import jax

from autoshard.api import BasePlan, Plan
from autoshard.comparison.comparison import Comparison
from autoshard.errors import ConfigError, ExportError, PlanMismatchError
from autoshard.files import read_json
from autoshard.host_tables.hosted import HostTables
from autoshard.host_tables.options import Execution
from autoshard.offloading.files import HostedData, hosted_of_document, write_hosted
from autoshard.offloading.host_part import HostPart, agreed
from autoshard.offloading.placement import TablePlacement
from autoshard.offloading.search import Outcome, as_planned
from autoshard.plans.plan_diff import PlanDiff
from autoshard.printing import seconds
from autoshard.tables.sparse_step import SparseStep
from autoshard.train_step import TrainStep
from autoshard.verify.verification import Verification

HOW_TO_RUN = """\
    with plan.host_tables(step, make_state) as tables:  # make_state(): step.init(...), or the state itself
        for done in tables.steps(batches):
            print(done.metrics)
"""
"""What runs such a plan."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostTablesPlan(BasePlan):
    """A plan of a training step with embedding tables in host memory, and the others and all else on the devices.

    It runs by `host_tables`. See `BasePlan` for the other methods: where they speak of a program, it is the step over
    the rows of a batch, and what was planned is the training step.

    Attributes:
      placed: Which table lives where, how steps follow each other, and what is predicted of time and memory.
      over_rows: The plan of the step over the rows of a batch.
      update: What running on the rows of a batch means for those that it does not read, for people.
      lazy: Whether these may stay as they are where whole tables would change them.
      on_devices_s: Predicted time of a step with all tables on the devices; infinite where it does not fit them, None
        where that was not asked.
      shapes: State and batch by shape; None in a plan read from a file.
    """

    placed: TablePlacement
    over_rows: Plan
    update: str
    lazy: bool
    on_devices_s: float | None = None
    shapes: tuple[Any, Any] | None = dataclasses.field(default=None, compare=False, repr=False)

    is_staged: ClassVar[bool] = False

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "HostTablesPlan":
        """Reads a plan written by `save`.

        Raises:
          FileFormatError: The file is not a plan with tables in host memory, or of another version.
        """
        return cls.of(hosted_of_document(read_json(path), path))

    @classmethod
    def of(cls, data: HostedData) -> "HostTablesPlan":
        """The plan that holds what a file does."""
        return cls(data.placed, Plan.of(data.over_rows), data.update, data.lazy, data.on_devices_s)

    def save(self, path: str | os.PathLike[str]) -> None:
        write_hosted(HostedData(self.placed, self.over_rows, self.update, self.lazy, self.on_devices_s), path)

    @property
    def part(self) -> HostPart:
        """What lies in host memory."""
        found = HostPart.of(self.placed)
        assert found is not None
        return found

    @property
    def tables(self) -> tuple[str, ...]:
        """Paths of the tables in host memory."""
        return self.placed.host_tables

    @property
    def execution(self) -> Execution:
        """How steps follow each other."""
        return self.part.execution

    @property
    def predicted(self) -> Outcome:
        """Stages and time of a step, with what the plan of the step over rows takes on the accelerators."""
        return as_planned(self.placed.situation, self.placed.best, self.over_rows.estimate.step_s)

    @property
    def step_s(self) -> float:
        """Predicted time of a step, one following the other."""
        return self.predicted.step_s

    @property
    def cluster(self) -> str:
        """Name of the cluster."""
        return self.over_rows.cluster

    @property
    def num_devices(self) -> int:
        """Devices that the plan needs."""
        return self.over_rows.num_devices

    @property
    def device_types(self) -> tuple[str, ...]:
        """The kinds of devices that it is for."""
        return self.over_rows.device_types

    @property
    def device_flops(self) -> float:
        """Floating-point operations of a device in a step."""
        return self.over_rows.device_flops

    @property
    def programs(self) -> tuple[Plan, ...]:
        """The plans of all distinct programs: that of the step over rows."""
        return (self.over_rows,)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was kept whole for want of knowledge, and the like."""
        return self.over_rows.warnings

    @property
    def configuration(self) -> str | None:
        """The training configuration that the plan was made from, as JSON."""
        return self.over_rows.configuration

    def host_tables(
        self,
        step: TrainStep,
        state: Any,
        batch: Any = None,
        *,
        sample: Iterable[Any] = (),
        execution: Execution | None = None,
        worker_bytes: int | None = None,
    ) -> HostTables:
        """Starts the worker processes, gives them the tables, and makes the step run as planned.

            with plan.host_tables(step, make_state) as tables:
                for done in tables.steps(batches):
                    print(done.metrics)

        Of several processes all call it together; they run as the first one has planned.

        Args:
          step: What was planned.
          state: Its state, as arrays, or a function without arguments that makes it; see `autoshard.HostTables`.
          batch: Arrays or shapes; None for those of planning, which a plan read from a file does not know.
          sample: Batches in which frequent rows are counted, where the plan keeps hot rows on the devices and
            `IdDistribution.is_ranked` does not tell which they are.
          execution: In place of that of the plan, such as with the number of workers that this machine can have.
          worker_bytes: Limit of the memory of each worker; None for the system's.

        Returns:
          A context manager; leaving it ends the workers.

        Raises:
          PlanMismatchError: `step` is not what was planned; or there is no `batch`.
          TrainingError: A worker does not start.
        """
        shapes = self._shapes_of(() if batch is None else (state, batch))
        part = agreed(lambda: self.placed)
        assert part is not None
        is_ranked = all(table.ids.is_ranked for table in self.placed.situation.tables)
        return HostTables(
            step,
            state,
            shapes[1],
            tables=part.tables,
            hot_rows=part.hot_rows_of(step, shapes[0], sample, is_ranked),
            pooled=part.pooled,
            host_layers=part.host_layers,
            lazy=self.lazy,
            execution=execution or part.execution,
            plan=self.over_rows,
            worker_bytes=worker_bytes,
        )

    def jit(self, fn: Callable[..., Any], devices: Sequence[Any] | None = None) -> NoReturn:
        """Raises ConfigError: no jitted function reads tables in host memory. Shows the lines that run the plan."""
        raise _not_jitted("plan.jit")

    def init(self, init_fn: Callable[..., Any], *args: Any, run: Any = None, devices: Any = None) -> NoReturn:
        """Raises ConfigError: the state is never whole on the devices. Shows the lines that run the plan."""
        raise _not_jitted("plan.init")

    def check(self, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
        function, shapes = self.program(0, fn, args)
        return self.over_rows.check(function, shapes)

    def explain(self, program: int | None = None, full: bool = False) -> str:
        if program is not None:
            return self.over_rows.explain(program, full)
        placed, over_rows = self.placed, self.over_rows.explain(full=full)
        return "\n\n".join(
            (
                f"Plan with tables in host memory for cluster {self.cluster}; {self.update}",
                str(placed) if full else f"{placed.outline}\n\n{placed.tables_text}",
                self._beside_devices,
                "The step over the rows of a batch, on the accelerators",
                over_rows if full else over_rows.partition("\n\n")[0],
                "Run it",
                HOW_TO_RUN,
            )
        )

    @property
    def _beside_devices(self) -> str:
        """The prediction with the step over rows as it is planned, beside that of the devices alone."""
        own = self.predicted
        told = f"With the step over rows as planned: {seconds(own.step_s)} a step; busiest: the {own.stages.busiest}."
        if self.on_devices_s is None:
            return told
        if math.isinf(self.on_devices_s):
            return f"{told} With all tables on the devices it does not fit them."
        ratio = self.on_devices_s / own.step_s
        return f"{told} With all tables on the devices: {seconds(self.on_devices_s)}, {ratio:.2f} times as long."

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.explain())}</pre>"

    def draw_timeline(self, path: str | os.PathLike[str]) -> str:
        return self.over_rows.draw_timeline(path)

    def program(self, number: int, fn: Callable[..., Any], args: Sequence[Any] = ()) -> tuple[Any, tuple[Any, ...]]:
        sparse = self.step_over_rows(fn, args)
        return sparse.step, (sparse.state, sparse.batch)

    def step_over_rows(self, fn: Callable[..., Any], args: Sequence[Any] = ()) -> SparseStep:
        """The step whose plan is `over_rows`.

        Args:
          fn: What was planned. args: Its arguments, state and batch; none for those that the plan was made for.

        Raises:
          PlanMismatchError: `fn` is no TrainStep; or a plan read from a file is given no arguments.
        """
        if not isinstance(fn, TrainStep):
            name = getattr(fn, "__name__", type(fn).__name__)
            raise PlanMismatchError(f"The plan is of a TrainStep; received `{name}`. Pass what was planned.")
        return self.part.step_over_rows(fn, *self._shapes_of(args), self.lazy)

    def program_title(self, number: int) -> str:
        return ""

    def verify(
        self, fn: Callable[..., Any], *args: Any, target: str | None = None, time_limit_s: float | None = None
    ) -> Verification:
        function, shapes = self.program(0, fn, args)
        return self.over_rows.verify(function, *shapes, target=target, time_limit_s=time_limit_s)

    def diff(self, other: BasePlan) -> PlanDiff:
        if not isinstance(other, HostTablesPlan):
            raise PlanMismatchError(
                "A plan with tables in host memory is compared with another such, and this one has none. Compare "
                "their step times, or `diff` two plans of one kind."
            )
        return self.over_rows.diff(other.over_rows)

    def export(self, form: str, names: Mapping[str, Sequence[str | None]] | None = None, nearest: bool = False) -> str:
        raise ExportError(
            "No form of `export` can say that tables live in host memory. `plan.over_rows.export` exports the plan of "
            "the step over the rows of a batch."
        )

    def compare(self, fn: Callable[..., Any], *args: Any, **settings: Any) -> Comparison:
        function, shapes = self.program(0, fn, args)
        return self.over_rows.compare(function, *shapes, **settings)

    def _shapes_of(self, args: Sequence[Any]) -> tuple[Any, Any]:
        """State and batch as given, or by shape as planned."""
        if args:
            state, batch = args
            return (jax.eval_shape(state) if callable(state) else state), batch
        if self.shapes is None:
            raise PlanMismatchError(
                "A plan read from a file does not know the pytree types of state and batch. Pass both, as arrays or "
                "jax.ShapeDtypeStruct; to `host_tables` the batch alone: batch=."
            )
        return self.shapes


def _not_jitted(what: str) -> ConfigError:
    return ConfigError(
        f"{what}: tables of this plan live in host memory, where no jitted function reads them. Run the plan by\n\n"
        f"{HOW_TO_RUN}\nor plan with all tables on the devices: tables=autoshard.TableOptions(on_hosts=False)."
    )
