"""What every plan can do, whether it is of one program or in stages."""

import abc
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar


class BasePlan(abc.ABC):
    """What `Plan` and `StagedPlan` have in common. Printing a plan explains it on one screen.

    Both also tell `cluster`, `device_types`, `num_devices`, `device_flops`, `programs`, `warnings` and `configuration`;
    see `ProgramPlan` and `PipelinePlan` for these and for what each kind tells besides.

    Attributes:
      is_staged: Whether the plan is in stages, each on a mesh of its own.
    """

    __slots__ = ()
    is_staged: ClassVar[bool]

    @abc.abstractmethod
    def jit(self, fn: Callable[..., Any], devices: Sequence[Any] | None = None) -> Any:
        """Makes `fn` run as planned.

        Args:
          fn: What was planned: any function, or a `TrainStep`.
          devices: The devices to run on, in the order of the mesh or of the cluster; default all live devices.

        Returns:
          A callable with the arguments and results of `fn`, that also has `prepare(*args)`, which does all that comes
          before the first call, and `in_shardings(args)`.

        Raises:
          MeshError: The number of devices is not the plan's.
          PlanMismatchError: On first use, if `fn` is not what was planned; names the first difference.
        """

    @abc.abstractmethod
    def check(self, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Verifies that `fn(*args)`, with arrays or shapes, is what was planned.

        Raises:
          PlanMismatchError: It is not; names the first difference.
        """

    @abc.abstractmethod
    def init(self, init_fn: Callable[..., Any], *args: Any, run: Any = None, devices: Any = None) -> Any:
        """Creates the training state where the plan says; it is never whole on one device.

        Args:
          init_fn: Returns the state, e.g. from a seed. *args: Its arguments.
          run: What `jit` returned. A plan in stages needs it: where the optimizer's state lies follows from the step.
          devices: As for `jit`, without `run`.

        Raises:
          PlanMismatchError: What it returns is not the state that was planned.
        """

    @abc.abstractmethod
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as versioned JSON; the file appears whole or not at all."""

    @abc.abstractmethod
    def explain(self, program: int | None = None, full: bool = False) -> str:
        """The plan for people, on one screen.

        Args:
          program: Of a plan in stages, the number of a program, to explain that alone.
          full: All there is to tell, however long.

        Raises:
          ConfigError: There is no such program.
        """

    @abc.abstractmethod
    def draw_timeline(self, path: str | os.PathLike[str]) -> str:
        """Draws the step of a plan in stages into an .html or .png file.

        Returns:
          The timeline as text.

        Raises:
          ConfigError: The plan is not in stages; or the file has another ending.
          MissingExtraError: A PNG needs matplotlib, which is not installed.
        """

    @abc.abstractmethod
    def program(self, number: int, fn: Callable[..., Any], args: Sequence[Any] = ()) -> Any:
        """One of the programs that the plan is made of, ready to be compiled.

        Args:
          number: Of the program, as in `programs`.
          fn: What was planned. args: Its arguments by shape; none for those that the plan was made for.

        Returns:
          Its function, and the shapes that this takes.

        Raises:
          PlanMismatchError: `fn` is not what was planned; or a plan read from a file is given no arguments.
        """

    @abc.abstractmethod
    def program_title(self, number: int) -> str:
        """What a program is, in a line; empty for the only one of a plan."""

    @abc.abstractmethod
    def verify(
        self, fn: Callable[..., Any], *args: Any, target: str | None = None, time_limit_s: float | None = None
    ) -> Any:
        """Compiles `fn` as planned, for devices that need not be there, and compares. Nothing runs.

        Args:
          fn: What was planned.
          *args: Its arguments, by shape; none for those that the plan was made for. A plan that was read from a file
            does not know the pytree types of its arguments, and needs them.
          target: Devices to compile for, such as `h100`, `tpu-v5e` or `cpu`; None for the plan's own.
          time_limit_s: Seconds that the compiler may take for each program; None for no limit.

        Returns:
          Predictions beside what the compiler made of the plan: a `Verification`; of a plan in stages a `Report` with
          one for each distinct program. Both have `is_confirmed`, and can be printed.

        Raises:
          PlanMismatchError: `fn` is not what was planned.
          MissingExtraError, VerificationError: The compiler is missing, knows no such devices, refuses the program, or
            takes too long. In a `Report`, this stands in place of the outcome.
        """

    @abc.abstractmethod
    def diff(self, other: "BasePlan") -> Any:
        """What differs from this plan in another one of the same kind, and what each difference costs; see `diff`."""

    @abc.abstractmethod
    def export(self, form: str, names: Mapping[str, Sequence[str | None]] | None = None, nearest: bool = False) -> str:
        """The plan as text that other programs read.

        Args:
          form: `flax-rules`, `maxtext` or `shardings`.
          names: Logical names that the model has already; see `autoshard.logical_axes`.
          nearest: Whether rules may deviate from the plan.

        Raises:
          ConfigError: There is no such form.
          ExportError: The plan cannot be said in that form; names the part that cannot.
        """

    @abc.abstractmethod
    def compare(self, fn: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        """The plan beside others of the same step, in the forms that people write by hand where its own was chosen;
        see `autoshard.compare`.

        Args:
          fn: What was planned. *args: Its arguments; none for those that the plan was made for.
          **settings: Of a plan of one program, those of `autoshard.compare`; `cluster` among them, of which a plan
            knows the name alone. A plan in stages needs none: the forms that its search looked at are in it.
        """

    @abc.abstractmethod
    def _repr_html_(self) -> str:
        """The plan as a notebook shows it: HTML without scripts."""

    def __str__(self) -> str:
        return self.explain()
