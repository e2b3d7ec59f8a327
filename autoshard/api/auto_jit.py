"""`autoshard.jit`: a function that is planned when it is first called, as `jax.jit` compiles one."""

import dataclasses
import functools
import hashlib
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, cast, overload

import jax
import numpy as np

from autoshard.api.planning import plan_on_devices
from autoshard.api.program import Plan
from autoshard.api.reading import load
from autoshard.api.staged import StagedPlan
from autoshard.calls.pure_call import PureCall, Statics, planned_call
from autoshard.checkpoints.agreement import from_first
from autoshard.errors import AutoshardError, PlanMismatchError
from autoshard.files import write_text_atomically
from autoshard.plans.make import load_cluster
from autoshard.plans.options import PlanOptions
from autoshard.printing import duration
from autoshard.trace.trace import parameter_names
from autoshard.train_step import TrainStep


@overload
def jit(fn: Callable[..., Any], **options: Any) -> "PlannedWhenCalled": ...
@overload
def jit(fn: None = None, **options: Any) -> Callable[[Callable[..., Any]], "PlannedWhenCalled"]: ...
def jit(
    fn: Callable[..., Any] | None = None,
    *,
    devices: Sequence[Any] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    **options: Any,
) -> Any:
    """Plans `fn` when it is first called, and runs it as planned; in place of `jax.jit`, also as a decorator.

        @autoshard.jit(donate_argnums=0)
        def train_step(state, batch): ...

    Each plan is for the shapes of its call, as compiled programs are. Where JAX has a compilation cache
    (`jax_compilation_cache_dir`), plans are kept beside it: a later run reads them, unless the function has become
    another. A line on standard error tells of each plan.

    Args:
      fn: What to plan; see `autoshard.plan`.
      devices: Where to run; by default all live devices.
      static_argnums, static_argnames: Arguments that are constants; a value of its own has a plan of its own.
      **options: Those of `autoshard.plan`: `cluster` (by default the live devices), `mesh`, `donate_argnums`, `pins`,
        `options` and others, but for `tables`: what is called as a function has all of its state on the devices.

    Returns:
      A callable with the arguments and results of `fn`; or, without `fn`, a decorator that makes one.

    Raises, when called:
      Errors of `autoshard.plan` and of `Plan.jit`.
    """
    made = functools.partial(
        PlannedWhenCalled,
        devices=devices,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        options=options,
    )
    return made if fn is None else made(fn)


class PlannedWhenCalled:
    """What `autoshard.jit` returns."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        devices: Sequence[Any] | None,
        static_argnums: int | Sequence[int] | None,
        static_argnames: str | Sequence[str] | None,
        options: dict[str, Any],
    ):
        """Takes what `jit` takes; nothing is planned yet."""
        functools.update_wrapper(self, fn)
        self._fn, self._devices, self._options = fn, devices, options
        self._statics = Statics.of(fn, static_argnums, static_argnames)
        self._static = {"static_argnums": self._statics.argnums, "static_argnames": self._statics.argnames}
        self._plans: dict[Any, Plan | StagedPlan] = {}
        self._runs: dict[Any, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function as planned for arguments of these shapes, which plans it the first time."""
        key = self._key(planned_call(self._fn, args, kwargs, self._statics))
        if key not in self._runs:
            made = self.plan(*args, **kwargs)
            is_staged = isinstance(made, StagedPlan)  # of a TrainStep, as planning has seen to
            run = (
                made.jit(cast(TrainStep, self._fn), self._devices)
                if is_staged
                else made.jit(self._fn, self._devices, **self._static)
            )
            self._runs[key] = run
        return self._runs[key](*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan | StagedPlan:
        """The plan for arguments of these shapes, arrays or `jax.ShapeDtypeStruct`; it is made now if there is none."""
        call = planned_call(self._fn, args, kwargs, self._statics)
        key = self._key(call)
        if key not in self._plans:
            self._plans[key] = self._agreed(call, args, kwargs)
        return self._plans[key]

    def _key(self, call: PureCall) -> Any:
        leaves, tree = jax.tree_util.tree_flatten(call.args)
        return call.fn, tree, tuple((np.shape(x), str(getattr(x, "dtype", type(x)))) for x in leaves)

    def _agreed(self, call: PureCall, args: Sequence[Any], kwargs: dict[str, Any]) -> Plan | StagedPlan:
        """The plan that is kept or made by the first process, in all of them: the clock may end a search anywhere."""
        if jax.process_count() == 1:
            return self._kept(call) or self._made(call, args, kwargs)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "plan.json"

            def decide() -> dict[str, Any]:
                try:
                    (self._kept(call) or self._made(call, args, kwargs)).save(path)
                except AutoshardError as error:
                    return {"error": f"{type(error).__name__}: {error}"}
                return {"plan": path.read_text()}

            decided = from_first(decide)
            if "error" in decided:
                raise AutoshardError(f"The first process cannot plan `{self._name}`: {decided['error']}")
            write_text_atomically(path, decided["plan"])
            return load(path)

    def _made(self, call: PureCall, args: Sequence[Any], kwargs: dict[str, Any]) -> Plan | StagedPlan:
        started_s = time.perf_counter()
        is_static = self._statics.argnums or self._statics.argnames
        made = plan_on_devices(self._fn, *args, **self._options, **(self._static if is_static else {}), **kwargs)
        path = self._path(call)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.save(path)
        self._tell(made, f"planned in {duration(time.perf_counter() - started_s)}")
        return made

    def _kept(self, call: PureCall) -> Plan | StagedPlan | None:
        """The plan of an earlier run, if there is one for this function and these shapes."""
        path = self._path(call)
        if path is None or not path.is_file():
            return None
        try:
            kept = load(path)
            kept.check(call.fn, call.args)
        except PlanMismatchError as error:
            self._say(f"the plan kept in {path} is of another function: {str(error).partition('. ')[0]}.")
            return None
        except AutoshardError as error:
            self._say(f"the plan kept in {path} cannot be read and is made again: {error}")
            return None
        self._tell(kept, f"plan of an earlier run, {path}")
        return kept

    def _path(self, call: PureCall) -> pathlib.Path | None:
        """The file of the plan: named by the function, the shapes, the cluster and the options."""
        folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]: JAX adds it later
        if not folder:
            return None
        given = {**self._options, "cluster": load_cluster(self._options.get("cluster"))}
        if isinstance(given.get("options"), PlanOptions):
            given["options"] = dataclasses.replace(given["options"], on_progress=None)
        leaves = jax.tree_util.tree_leaves_with_path(call.args)
        shapes = [(jax.tree_util.keystr(path), np.shape(x), str(getattr(x, "dtype", type(x)))) for path, x in leaves]
        told = [
            jax.__version__,
            getattr(self._fn, "__module__", ""),
            getattr(self._fn, "__qualname__", ""),
            parameter_names(call.fn, len(call.args)),
            shapes,
            self._static,
            sorted((name, repr(value)) for name, value in given.items()),
        ]
        digest = hashlib.sha256(repr(told).encode()).hexdigest()[:32]
        return pathlib.Path(folder) / "autoshard-plans" / f"{self._name}-{digest}.json"

    @property
    def _name(self) -> str:
        return getattr(self._fn, "__name__", "function")

    def _tell(self, made: Plan | StagedPlan, how: str) -> None:
        where = "in stages" if isinstance(made, StagedPlan) else ", ".join(f"{name}={size}" for name, size in made.axes)
        self._say(f"`{self._name}` on {made.num_devices} devices, {where}: {how}")

    def _say(self, text: str) -> None:
        if jax.process_index() == 0:
            print(f"autoshard: {text}", file=sys.stderr)
