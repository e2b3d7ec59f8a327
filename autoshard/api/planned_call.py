"""What `Plan.jit` returns: the planned function, called as the user calls his own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from autoshard.calls.pure_call import Statics, has_constants_or_modules, planned_call, pure_call
from autoshard.calls.wrapped import bound
from autoshard.execution.candidates import CompiledCandidate
from autoshard.execution.jit import PlannedFunction
from autoshard.execution.trial import Trial


class PlannedCall:
    """A function that runs as its plan says. Call it, or `.lower(*args).compile()` it.

    It takes what the function takes: Flax NNX modules, which it changes in place as the function does, keyword
    arguments, and constants. On GPUs the first call compiles it in the ways that the plan names, and the first calls
    find the fastest that fits the memory (`trials`); `lower` compiles it in one way, as the plan's schedule says.

    Attributes:
      mesh: The devices with the plan's axes.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        planned_fn: Callable[..., Any],
        statics: Statics,
        mesh: jax.sharding.Mesh,
        make: Callable[[Callable[..., Any]], PlannedFunction],
    ):
        """
        Args:
          fn: The user's function. planned_fn: The same as a function of arrays, as it was planned.
          statics: Its arguments that are constants. mesh: Devices with the plan's axes.
          make: Makes a pure function of arrays run as planned.
        """
        self.mesh = mesh
        self._fn, self._planned_fn, self._statics, self._make = fn, planned_fn, statics, make
        held = bound(fn)
        self._has_bound = bool(held.args or held.kwargs)
        self._functions: dict[Callable[..., Any], PlannedFunction] = {}
        self._of_arrays: set[Any] = set()  # structures of arguments that are arrays alone

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the planned function; arguments that lie otherwise are moved to their planned shardings first."""
        if self._are_arrays(args, kwargs):
            return self._function(self._fn)(*args)
        with pure_call(self._fn, args, kwargs, self._statics) as call:
            return call.finish(self._function(call.fn)(*call.args))

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Traces the function with arrays or shapes, and checks it; the first call does so if it was not done before.

        Raises:
          PlanMismatchError: It is not what was planned; names the first difference.
        """
        call = planned_call(self._fn, args, kwargs, self._statics)
        self._function(call.fn).prepare(*call.args)

    def compile(self, *args: Any, when_lowered: Callable[[], None] = lambda: None, **kwargs: Any) -> None:
        """Compiles the function for arrays or shapes, in the way in which it will run; a call then only runs it.

        Args:
          *args, **kwargs: The arguments.
          when_lowered: Called when nothing but the compilation is left to do.

        Raises:
          PlanMismatchError: It is not what was planned; names the first difference.
        """
        call = planned_call(self._fn, args, kwargs, self._statics)
        self._function(call.fn).compile(*call.args, when_lowered=when_lowered)

    def in_shardings(self, args: Sequence[Any]) -> Any:
        """The NamedSharding of every argument leaf, as pytrees like `args`; of modules, like their states."""
        call = planned_call(self._fn, args, {}, self._statics)
        return self._function(call.fn).in_shardings(call.args)

    def candidates(self, *args: Any, **kwargs: Any) -> tuple[CompiledCandidate, ...]:
        """The program for `args`, as of `lower`, compiled for GPUs in each way that the plan names; nothing runs."""
        call = planned_call(self._fn, args, kwargs, self._statics)
        return self._function(call.fn).candidates(*call.args)

    @property
    def trials(self) -> tuple[Trial, ...]:
        """On GPUs: the ways in which each program that ran so far was compiled, and what a step of each took.

        A `Trial` has `candidates`, `timed` (once all were tried) and `chosen`.
        """
        return tuple(trial for function in self._functions.values() for trial in function.trials)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers as `jax.jit(f).lower` does: for `args` (arrays or `jax.ShapeDtypeStruct`), or for the planned ones."""
        if not args and not kwargs:
            return self._function(self._planned_fn).lower()
        call = planned_call(self._fn, args, kwargs, self._statics)
        return self._function(call.fn).lower(*call.args)

    def _function(self, fn: Callable[..., Any]) -> PlannedFunction:
        if fn not in self._functions:
            self._functions[fn] = self._make(fn)
        return self._functions[fn]

    def _are_arrays(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether the arguments can be passed as they are; looked at once for each structure, since it takes long."""
        if kwargs or self._statics.argnums or self._has_bound:
            return False
        structure = jax.tree_util.tree_structure(args)
        if structure in self._of_arrays:
            return True
        if has_constants_or_modules(args):
            return False
        self._of_arrays.add(structure)
        return True
