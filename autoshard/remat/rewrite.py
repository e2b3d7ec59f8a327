"""A loss function that keeps for its backward pass what a policy says: each layer becomes a `jax.checkpoint`.

Differentiation stays JAX's own, and so the gradients are those of the loss as it was written, but for the rounding of
sums that are made in another order.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from autoshard.errors import PlanMismatchError
from autoshard.remat.layers import HEAVY, find_runs
from autoshard.remat.policy import Keep, LayerRun, RematPolicy
from autoshard.trace.inline import inlined
from autoshard.trace.walk import is_checkpoint, nested_programs, open_jaxpr, variables
from autoshard.train_step import TrainStep

Flat = Callable[..., Sequence[Any]]
"""A function from arrays to arrays."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss function that keeps what `policy` says; with the arguments and results of `loss_fn`.

    Attributes:
      loss_fn: As of a `TrainStep`. policy: For its layers.
    """

    loss_fn: Callable[..., Any]
    policy: RematPolicy

    @property
    def __name__(self) -> str:
        return getattr(self.loss_fn, "__name__", "loss_fn")

    def __call__(self, *args: Any) -> Any:
        """The loss.

        Raises:
          PlanMismatchError: It has not the layers that the policy speaks of.
        """
        closed, out_tree = opened(self.loss_fn, args)
        return jax.tree.unflatten(out_tree, _run(closed, self.policy, jax.tree.leaves(args)))


def rematerialised(step: TrainStep, policy: RematPolicy) -> TrainStep:
    """The same step, whose loss keeps for the backward pass what `policy` says."""
    return dataclasses.replace(step, loss_fn=Loss(step.loss_fn, policy))


@dataclasses.dataclass(frozen=True, slots=True)
class Layers:
    """What can be chosen for a loss.

    Attributes:
      runs: Its layers.
      has_checkpoints: Whether it says itself what is recomputed.
      has_batched_products: Whether a layer has products that are not with weights, such as attention's.
    """

    runs: tuple[LayerRun, ...]
    has_checkpoints: bool
    has_batched_products: bool


def layers_of(step: TrainStep, state: Any, batch: Any) -> Layers:
    """The layers of the loss of a step.

    Args:
      step: The step. state, batch: Its arguments, arrays or shapes.
    """
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    params, mutable, part = jax.tree.map(shape, (state.params, state.mutable, batch))
    if step.parts is not None:
        size = step.parts[0]
        part = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), part)
    key = jax.eval_shape(step.key, state)
    args = (params, mutable, part, key) if step.has_mutable else (params, part, key)
    as_written = jax.make_jaxpr(step.loss_fn)(*args)
    closed = inlined(as_written, opens_checkpoints=True)
    runs = find_runs(closed.jaxpr)
    own = [e for r in runs for e in closed.jaxpr.eqns[r.start : r.stop]]
    return Layers(runs, _any(as_written.jaxpr, is_checkpoint), any(_holds(e, _is_batched) for e in own))


def opened(loss_fn: Callable[..., Any], args: Sequence[Any]) -> tuple[jex.ClosedJaxpr, Any]:
    """The program of a loss with its calls and checkpoints inlined, and the structure of its result."""
    closed, shapes = jax.make_jaxpr(loss_fn, return_shape=True)(*args)
    return inlined(closed, opens_checkpoints=True), jax.tree.structure(shapes)


def _run(closed: jex.ClosedJaxpr, policy: RematPolicy, args: Sequence[Any]) -> list[Any]:
    """The results of a loss, its layers under `jax.checkpoint`."""
    jaxpr = closed.jaxpr
    cuts = _cuts(policy)
    if cuts and cuts[-1][1] > len(jaxpr.eqns):
        raise PlanMismatchError(
            f"The plan recomputes layers up to equation {cuts[-1][1]} of the loss, which has {len(jaxpr.eqns)} now. "
            "Plan the new function, or go back to the old one."
        )
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
    last: dict[Any, int] = {v: len(jaxpr.eqns) for v in variables(jaxpr.outvars)}
    for i in range(len(jaxpr.eqns) - 1, -1, -1):
        for v in variables(jaxpr.eqns[i].invars):
            last.setdefault(v, i)
    done = 0
    for start, stop, keep in [*cuts, (len(jaxpr.eqns), len(jaxpr.eqns), Keep.ALL)]:
        _advance(jaxpr, done, start, Keep.ALL, env, last)
        _advance(jaxpr, start, stop, keep, env, last)
        done = stop
    return [v.val if isinstance(v, jex.Literal) else env[v] for v in jaxpr.outvars]


def _cuts(policy: RematPolicy) -> list[tuple[int, int, Keep]]:
    """(first equation, the one behind the last, what is kept) of each layer that does not keep all; of loops once."""
    found = []
    for own in policy.runs:
        if own.run.is_loop:
            found.append((own.run.start, own.run.stop, own.kept[0][0]))
            continue
        start = own.run.start
        for keep, count in own.kept:
            spans = [(start + k * own.run.period, start + (k + 1) * own.run.period, keep) for k in range(count)]
            found += spans
            start += count * own.run.period
    return [cut for cut in found if cut[2] is not Keep.ALL]


def _advance(jaxpr: jex.Jaxpr, start: int, stop: int, keep: Keep, env: dict[Any, Any], last: dict[Any, int]) -> None:
    """Evaluates equations `start` to `stop` as one function that keeps `keep`, and adds to `env` what is read later."""
    equations = jaxpr.eqns[start:stop]
    if not equations:
        return
    made = dict.fromkeys(v for e in equations for v in variables(e.outvars))
    ins = list(dict.fromkeys(v for e in equations for v in variables(e.invars) if v not in made))
    outs = [v for v in made if last.get(v, -1) >= stop]
    is_loop = len(equations) == 1 and equations[0].primitive.name == "scan" and keep is not Keep.ALL
    if is_loop:
        equations = [_loop_that_keeps(equations[0], keep)]
    names = jex.DebugInfo("layer", "layer", ("",) * len(ins), ("",) * len(outs))
    part = jaxpr.replace(constvars=[], invars=ins, outvars=outs, eqns=equations, debug_info=names)
    run: Flat = jex.jaxpr_as_fun(jex.ClosedJaxpr(part, []))
    if keep is not Keep.ALL and not is_loop:
        run = jax.checkpoint(run, policy=_saveable(keep, equations))
    env.update(zip(outs, run(*(env[v] for v in ins)), strict=True))


def _loop_that_keeps(equation: jex.JaxprEqn, keep: Keep) -> jex.JaxprEqn:
    """A scan whose body is checkpointed. A body is apart from the backward pass, which cannot share it."""
    body = equation.params["jaxpr"]
    run = jax.checkpoint(jex.jaxpr_as_fun(body), prevent_cse=False, policy=_saveable(keep, body.jaxpr.eqns))
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in body.jaxpr.invars]
    return equation.replace(params={**equation.params, "jaxpr": jax.make_jaxpr(run)(*shapes)})


# ---- what may be saved, as `jax.checkpoint` asks


def _saveable(keep: Keep, equations: Sequence[jex.JaxprEqn]) -> Callable[..., bool] | None:
    """The policy of `jax.checkpoint`: of an equation, whether its results may be kept."""
    match keep:
        case Keep.PRODUCTS:
            return _saves_products
        case Keep.WEIGHT_PRODUCTS:
            return _saves_weight_products
        case Keep.ALL_BUT_LARGEST:
            return SavesSmaller(max(_elements(v.aval) for e in equations for v in e.outvars))
        case _:
            return None


def _saves_products(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name in HEAVY


def _saves_weight_products(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name in HEAVY and not _has_batch(params)


@dataclasses.dataclass(frozen=True)  # no slots: JAX refers to it weakly
class SavesSmaller:
    """Keeps what has fewer than `limit` elements."""

    limit: int

    def __call__(self, primitive: Any, *operands: Any, **params: Any) -> bool:
        nested = [open_jaxpr(p) for p in params.values() if isinstance(p, jex.Jaxpr | jex.ClosedJaxpr)]
        if nested:
            return max((_elements(v.aval) for n in nested for v in n.outvars), default=0) < self.limit
        try:
            sizes = _result_sizes(primitive, operands, tuple(params.items()))
        except TypeError:  # a parameter that cannot be hashed
            sizes = _result_sizes.__wrapped__(primitive, operands, tuple(params.items()))
        return max(sizes, default=0) < self.limit


@functools.lru_cache(maxsize=4096)
def _result_sizes(primitive: Any, operands: tuple[Any, ...], params: tuple[tuple[str, Any], ...]) -> tuple[int, ...]:
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in operands]
    made = jax.eval_shape(lambda *arrays: primitive.bind(*arrays, **dict(params)), *shapes)
    return tuple(map(_elements, jax.tree.leaves(made)))


def _elements(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _has_batch(params: Any) -> bool:
    dimensions = params.get("dimension_numbers")
    is_product = isinstance(dimensions, tuple) and not hasattr(dimensions, "_fields") and len(dimensions) == 2
    return is_product and bool(dimensions[1][0])


def _is_batched(equation: jex.JaxprEqn) -> bool:
    return equation.primitive.name == "dot_general" and _has_batch(equation.params)


def _holds(equation: jex.JaxprEqn, test: Callable[[jex.JaxprEqn], bool]) -> bool:
    return test(equation) or any(_any(open_jaxpr(n), test) for n in nested_programs(equation))


def _any(jaxpr: jex.Jaxpr, test: Callable[[jex.JaxprEqn], bool]) -> bool:
    return any(_holds(e, test) for e in jaxpr.eqns)
