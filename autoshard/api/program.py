"""`autoshard.Plan`: a plan of one program on one mesh, with all that can be done with it."""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, overload

import jax

from autoshard.api.balanced_call import BalancedCall
from autoshard.api.base_plan import BasePlan
from autoshard.api.planned_call import PlannedCall
from autoshard.balance.options import Balance
from autoshard.calls.modules import as_state_maker
from autoshard.calls.pure_call import FunctionOfArrays, PureCall, Statics, planned_call
from autoshard.calls.wrapped import bound, unwrapped
from autoshard.comparison.compare import compare_program
from autoshard.comparison.comparison import Comparison
from autoshard.errors import ConfigError, PlanMismatchError
from autoshard.execution.jit import device_mesh
from autoshard.plans import apply
from autoshard.plans.balanced import BalancedFunction
from autoshard.plans.diff import diff
from autoshard.plans.explain import explain
from autoshard.plans.export import exported, form_named
from autoshard.plans.files import read_plan, write_plan
from autoshard.plans.notebook import plan_html
from autoshard.plans.plan_diff import PlanDiff
from autoshard.plans.program_plan import ProgramPlan
from autoshard.strategies.hand_written import hand_written
from autoshard.trace.trace import Trace
from autoshard.train_step import TrainStep
from autoshard.verify.verification import Verification
from autoshard.verify.verify import verify


@dataclasses.dataclass(frozen=True, slots=True)
class Plan(ProgramPlan, BasePlan):
    """A sharding plan of one function on one mesh; see `ProgramPlan` for its data, `BasePlan` for its methods."""

    is_staged: ClassVar[bool] = False

    @classmethod
    def of(cls, data: ProgramPlan) -> "Plan":
        """The plan that holds `data`."""
        return cls(**{f.name: getattr(data, f.name) for f in dataclasses.fields(ProgramPlan)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Reads a plan written by `save`.

        Raises:
          FileFormatError: The file is not a plan of one program, or of another version.
        """
        return cls.of(read_plan(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        write_plan(self, path)

    def mesh(self, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
        """The device mesh of the plan over `devices` (default: all live devices)."""
        return device_mesh(self.axes, devices, self.logical_mesh.order, self.logical_mesh.torus)

    @overload
    def jit(
        self,
        fn: Callable[..., Any],
        devices: Sequence[Any] | None = None,
        *,
        cost_profile: bool = True,
        trial: bool = True,
        static_argnums: int | Sequence[int] | None = None,
        static_argnames: str | Sequence[str] | None = None,
        balance: None = None,
    ) -> PlannedCall: ...

    @overload
    def jit(
        self,
        fn: Callable[..., Any],
        devices: Sequence[Any] | None = None,
        *,
        cost_profile: bool = True,
        trial: bool = True,
        static_argnums: int | Sequence[int] | None = None,
        static_argnames: str | Sequence[str] | None = None,
        balance: Balance,
    ) -> BalancedCall: ...

    def jit(
        self,
        fn: Callable[..., Any],
        devices: Sequence[Any] | None = None,
        *,
        cost_profile: bool = True,
        trial: bool = True,
        static_argnums: int | Sequence[int] | None = None,
        static_argnames: str | Sequence[str] | None = None,
        balance: Balance | None = None,
    ) -> PlannedCall:
        """Makes `fn` run as planned; see `BasePlan.jit`.

        Args:
          fn, devices: As in `BasePlan.jit`.
          static_argnums, static_argnames: Arguments that are constants, as for `autoshard.plan`; by default those of
            the plan, unless it was read from a file.
          cost_profile: Whether, on GPUs, the first call of a plan that hides collectives compiles the program several
            times: for the least memory, by XLA's own costs, and by the plan's, which XLA's scheduler is handed as a
            profile; after `compile_check`, in the one of these that was chosen then. Of those that fit the plan's
            budget, the fastest runs. Otherwise it is compiled once, by XLA's own costs.
          trial: Whether the fastest of these is found by timing a few calls of each, the first calls of the run; all
            compute the same step, up to rounding. Otherwise by replaying what was compiled, which gives the same
            program, and so the same numbers, in every run.
          balance: Lets devices have unequal shares of the work, which can change from step to step; see `Balance`. What
            is returned has `.balance` then, which shows and sets the shares.

        Returns:
          A callable that also has `.lower(*args).compile()`; without arguments for those that the plan was made for.
          Devices of `jax.experimental.topologies` serve for ahead-of-time compilation.
        """
        mesh = self.mesh(devices)
        statics = self._statics(fn, static_argnums, static_argnames)
        if balance is not None and any(a.in_host for a in self.arguments):
            raise ConfigError(
                "balance= moves state between devices while a run goes on, and this plan keeps some in the memory of "
                "the hosts. Plan without offload, or leave balance out."
            )
        if balance is not None:
            balanced = lambda pure: BalancedFunction(self, pure, mesh, balance, cost_profile)
            return BalancedCall(fn, self._planned_fn(fn), statics, mesh, balanced)
        make = lambda pure: apply.planned_function(self, pure, mesh, cost_profile, trial)
        return PlannedCall(fn, self._planned_fn(fn), statics, mesh, make)

    def check(self, fn: Callable[..., Any], args: Sequence[Any]) -> Trace:
        call = self._pure_call(fn, args)
        return apply.check(self, call.fn, call.args)

    def _planned_fn(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` as the function of arrays that was planned; itself where that is not known."""
        kept = None if self.kept_trace is None else self.kept_trace.fn
        return kept if isinstance(kept, FunctionOfArrays) and kept.fn is unwrapped(bound(fn).fn) else fn

    def _statics(
        self,
        fn: Callable[..., Any],
        argnums: int | Sequence[int] | None = None,
        argnames: str | Sequence[str] | None = None,
    ) -> Statics:
        planned = self._planned_fn(fn)
        if argnums is None and argnames is None and isinstance(planned, FunctionOfArrays):
            return planned.form.statics
        return Statics.of(fn, argnums, argnames)

    def _pure_call(self, fn: Callable[..., Any], args: Sequence[Any]) -> PureCall:
        """`fn(*args)` as a call of a pure function of arrays; without arguments, as it was planned."""
        if not args:
            return PureCall(self._planned_fn(fn), (), lambda result: result)
        return planned_call(fn, args, statics=self._statics(fn))

    def init(
        self,
        init_fn: Callable[..., Any],
        *args: Any,
        argument: int = 0,
        run: PlannedCall | None = None,
        devices: Sequence[Any] | None = None,
    ) -> Any:
        """Creates an argument of the planned function already sharded; see `BasePlan.init`.

        Args:
          init_fn, *args, run, devices: As in `BasePlan.init`.
          argument: Which positional argument of the planned function is made: the state, unless told otherwise.
        """
        mesh = self.mesh(devices) if run is None else run.mesh
        make, finish = as_state_maker(init_fn, args)
        return finish(apply.create_argument(self, mesh, make, args, argument))

    def in_shardings(self, like: Any = None, argument: int | None = None, devices: Sequence[Any] | None = None) -> Any:
        """NamedShardings of the arguments, for `jax.device_put`, `jax.jit`, or restoring a checkpoint.

        Args:
          like: A pytree with the leaves of what is asked for, such as abstract arrays, whose structure the result has.
            Needed only for a plan read from a file, which does not know the pytree types and else gives a mapping from
            path to sharding.
          argument: Which positional argument; None for the tuple of all.
          devices: As for `jit`.

        Raises:
          PlanMismatchError: `like` has other leaves than the plan.
        """
        return apply.argument_shardings(self, self.mesh(devices), like, argument)

    def explain(self, program: int | None = None, full: bool = False) -> str:
        if program is not None:
            raise _only_in_stages("program=, --program")
        return explain(self, full)

    def _repr_html_(self) -> str:
        return plan_html(self)

    def draw_timeline(self, path: str | os.PathLike[str]) -> str:
        raise _only_in_stages("A timeline, --timeline")

    def program(self, number: int, fn: Callable[..., Any], args: Sequence[Any] = ()) -> tuple[Any, tuple[Any, ...]]:
        call = self._pure_call(fn, args)
        return call.fn, call.args or apply.argument_shapes(self)

    def program_title(self, number: int) -> str:
        return ""

    def verify(
        self, fn: Callable[..., Any], *args: Any, target: str | None = None, time_limit_s: float | None = None
    ) -> Verification:
        call = self._pure_call(fn, args)
        return verify(self, call.fn, *call.args, target=target, time_limit_s=time_limit_s)

    def diff(self, other: BasePlan) -> PlanDiff:
        if not isinstance(other, Plan):
            raise PlanMismatchError(
                "A plan of one program is compared with another of one program, and this one is in stages. Compare "
                "their step times, or `diff` two plans of one kind."
            )
        return diff(self, other)

    def export(self, form: str, names: Mapping[str, Sequence[str | None]] | None = None, nearest: bool = False) -> str:
        return exported(self, form_named(form), names, nearest)

    def compare(self, fn: Callable[..., Any], *args: Any, **settings: Any) -> Comparison:
        call = self._pure_call(fn, args)
        given = call.args or apply.argument_shapes(self)
        is_chosen = self.choice is not None and self.choice.variant.policy is not None
        forms = hand_written(fn, *given) if is_chosen and isinstance(fn, TrainStep) else ()
        return compare_program(call.fn, *given, own=self, forms=forms, **settings)


def _only_in_stages(what: str) -> ConfigError:
    return ConfigError(
        f"{what}: only plans in stages have several programs and a timeline, and this is a plan of one program. Leave "
        "it out."
    )
