"""A loss function that keeps for its backward pass what a policy says: each layer becomes a `jax.checkpoint`.

Differentiation stays JAX's own, and so the gradients are those of the loss as it was written, but for the rounding of
sums that are made in another order.

Checkpoints of layers, and between them, give way to the policy. Those within a loop that is none over layers, such as
attention in blocks (Rabe and Staats 2021, arXiv:2112.05682), stay: without them each iteration would write what it
keeps to memory, which can take longer than making it again, and which the loop is there to avoid.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from autoshard.errors import PlanMismatchError
from autoshard.loss_function import loss_of_arrays
from autoshard.module_params import ModuleParams
from autoshard.remat.layers import find_runs, is_heavy, is_loop_of_layers
from autoshard.remat.policy import Keep, LayerRun, RematPolicy
from autoshard.trace.absent_cudnn import assume_cudnn
from autoshard.trace.inline import inlined
from autoshard.trace.operand_order import operands_ordered
from autoshard.trace.outer_products import sums_nothing
from autoshard.trace.rules.attention import FUSED
from autoshard.trace.rules.products import PRODUCTS
from autoshard.trace.walk import (
    EquationKind,
    is_checkpoint,
    kind_of,
    nested_programs,
    open_jaxpr,
    scan_counts,
    variables,
)
from autoshard.train_step import TrainStep


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss function that keeps what `policy` says; with the arguments and results of `loss_fn`.

    Attributes:
      loss_fn: As of a `TrainStep`. policy: For its layers.
    """

    takes_arrays: ClassVar[bool] = True

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
        takes_module, has_mutable = isinstance(args[0], ModuleParams), len(args) == 4
        closed, out_tree = opened(loss_of_arrays(self.loss_fn, takes_module, has_mutable), args)
        num_params = len(jax.tree.leaves(args[0]))
        return jax.tree.unflatten(out_tree, evaluated(closed, self.policy, jax.tree.leaves(args), num_params))


def rematerialised(step: TrainStep, policy: RematPolicy) -> TrainStep:
    """The same step, whose loss keeps for the backward pass what `policy` says."""
    return dataclasses.replace(step, loss_fn=Loss(step.loss_fn, policy))


@dataclasses.dataclass(frozen=True, slots=True)
class Layers:
    """What can be chosen for a loss.

    Attributes:
      runs: Its layers.
      has_checkpoints: Whether it says itself what layers recompute.
      has_batched_products: Whether a layer has products that are not with weights, such as attention's.
      has_loops: Whether a layer has products in loops, such as attention in blocks. What these keep they write to
        memory, one iteration after another, which can take longer than making it again.
    """

    runs: tuple[LayerRun, ...]
    has_checkpoints: bool
    has_batched_products: bool
    has_loops: bool = False


@assume_cudnn()
def layers_of(step: TrainStep, state: Any, batch: Any) -> Layers:
    """The layers of the loss of a step.

    Args:
      step: The step. state, batch: Its arguments, arrays or shapes.
    """
    as_written, closed = loss_of(step, state, batch)
    runs = find_runs(closed.jaxpr)
    own = [e for r in runs for e in closed.jaxpr.eqns[r.start : r.stop]]
    within = [
        inner
        for e in own
        for inner in ((i for n in nested_programs(e) for i in open_jaxpr(n).eqns) if is_loop_of_layers(e) else (e,))
    ]
    return Layers(
        runs,
        _has_checkpointed_layers(as_written),
        any(_holds(e, _is_batched) for e in own),
        any(_holds(e, _is_loop_of_products) for e in within),
    )


def loss_of(step: TrainStep, state: Any, batch: Any) -> tuple[jex.ClosedJaxpr, jex.ClosedJaxpr]:
    """The program of the loss of a step's micro-batch as it is written, and with its calls and checkpoints inlined;
    arguments as of `layers_of`."""
    loss_fn = step.of_arrays(state.params).loss_fn
    as_written = jax.make_jaxpr(loss_fn)(*loss_arguments(step, state, batch))
    return as_written, inlined(as_written, opens_checkpoints=True)


def loss_arguments(step: TrainStep, state: Any, batch: Any) -> tuple[Any, ...]:
    """The shapes with which the loss of a step's micro-batch is called; arguments as of `layers_of`."""
    params, mutable, part = jax.tree.map(_shape, (state.params, state.mutable, batch))
    if step.parts is not None:
        size = step.parts[0]
        part = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), part)
    key = jax.eval_shape(step.key, state)
    return (params, mutable, part, key) if step.of_arrays(state.params).has_mutable else (params, part, key)


def _has_checkpointed_layers(closed: jex.ClosedJaxpr) -> bool:
    """Whether a loss has checkpoints of layers, or between them, which give way to a policy."""
    equations = inlined(closed).jaxpr.eqns
    bodies = (inlined(e.params["jaxpr"]) for e in equations if is_loop_of_layers(e))
    return any(map(is_checkpoint, itertools.chain(equations, *(b.jaxpr.eqns for b in bodies))))


def has_checkpoints(program: jex.ClosedJaxpr) -> bool:
    """Whether a program says itself what is recomputed, by `jax.checkpoint`."""
    return _any(program.jaxpr, is_checkpoint)


def opened(loss_fn: Callable[..., Any], args: Sequence[Any]) -> tuple[jex.ClosedJaxpr, Any]:
    """The program of a loss with its calls and checkpoints inlined, but for those in loops, and the structure of its
    result."""
    closed, shapes = jax.make_jaxpr(loss_fn, return_shape=True)(*args)
    return operands_ordered(inlined(closed, opens_checkpoints=True)), jax.tree.structure(shapes)


class _Span(NamedTuple):
    """Equations that keep the same for the backward pass: a layer, or all between two layers."""

    start: int
    stop: int
    keep: Keep
    is_loop: bool = False


def evaluated(closed: jex.ClosedJaxpr, policy: RematPolicy, args: Sequence[Any], num_params: int) -> list[Any]:
    """The results of a loss, its layers under `jax.checkpoint`; its first `num_params` arguments are parameters."""
    jaxpr, count = closed.jaxpr, len(closed.jaxpr.eqns)
    spans = _spans(policy)
    if spans and spans[-1].stop > count:
        raise PlanMismatchError(
            f"The plan recomputes layers up to equation {spans[-1].stop} of the loss, which has {count} now. Plan the "
            "new function, or go back to the old one."
        )
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
    last: dict[Any, int] = {v: i for i, e in enumerate(jaxpr.eqns) for v in variables(e.invars)}
    last |= {v: count for v in variables(jaxpr.outvars)}
    of_weights = _made_of(jaxpr, jaxpr.invars[:num_params])
    done = 0
    for span in [*spans, _Span(count, count, Keep.ALL)]:
        for own in (_Span(done, span.start, Keep.ALL), span):
            part = _part(jaxpr, own, last)
            results = _function(part, own, of_weights)(*(env[v] for v in part.invars))
            env.update(zip(part.outvars, results, strict=True))
        done = span.stop
    return [v.val if isinstance(v, jex.Literal) else env[v] for v in jaxpr.outvars]


def _spans(policy: RematPolicy) -> list[_Span]:
    """The layers that do not keep all, and loops over layers, in the order of the loss."""
    found = []
    for own in policy.runs:
        if own.run.is_loop:
            found.append(_Span(own.run.start, own.run.stop, own.kept[0][0], is_loop=True))
            continue
        start, period = own.run.start, own.run.period
        for keep, count in own.kept:
            found += [_Span(start + k * period, start + (k + 1) * period, keep) for k in range(count)]
            start += count * period
    return [span for span in found if span.is_loop or span.keep is not Keep.ALL]


def _part(jaxpr: jex.Jaxpr, span: _Span, last: Mapping[Any, int]) -> jex.Jaxpr:
    """The equations of a span as a program; `last`: by variable, the last equation that reads it."""
    equations = jaxpr.eqns[span.start : span.stop]
    made = dict.fromkeys(v for e in equations for v in variables(e.outvars))
    ins = list(dict.fromkeys(v for e in equations for v in variables(e.invars) if v not in made))
    outs = [v for v in made if last.get(v, -1) >= span.stop]
    names = jex.DebugInfo("layer", "layer", ("",) * len(ins), ("",) * len(outs))
    return jaxpr.replace(constvars=[], invars=ins, outvars=outs, eqns=equations, debug_info=names)


def _function(part: jex.Jaxpr, span: _Span, of_weights: Collection[Any]) -> Callable[..., Sequence[Any]]:
    """The function of a span, which keeps what it shall."""
    if span.is_loop:
        (equation,) = part.eqns
        return jex.jaxpr_as_fun(jex.ClosedJaxpr(part.replace(eqns=[_loop_that_keeps(equation, span.keep)]), []))
    run = jex.jaxpr_as_fun(jex.ClosedJaxpr(part, []))
    return run if span.keep is Keep.ALL else jax.checkpoint(run, policy=_saveable(span.keep, part, of_weights))


def _loop_that_keeps(equation: jex.JaxprEqn, keep: Keep) -> jex.JaxprEqn:
    """A scan whose body is checkpointed in place of what is checkpointed in it. A body is apart from the backward pass,
    which cannot share it."""
    body = _opened_body(equation.params["jaxpr"])
    if keep is not Keep.ALL:
        num_consts, num_carry = scan_counts(equation)
        others = [*body.jaxpr.invars[:num_consts], *body.jaxpr.invars[num_consts + num_carry :]]
        policy = _saveable(keep, body.jaxpr, _made_of(body.jaxpr, others))
        run = jax.checkpoint(jex.jaxpr_as_fun(body), prevent_cse=False, policy=policy)
        body = jax.make_jaxpr(run)(*map(_shape, body.jaxpr.invars))
    return equation.replace(params={**equation.params, "jaxpr": body})


def _opened_body(body: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A body without checkpoints; as it is, where it would need constants of its own."""
    opened_body = inlined(body, opens_checkpoints=True)
    return opened_body if len(opened_body.consts) == len(body.consts) else body


def _made_of(jaxpr: jex.Jaxpr, sources: Sequence[Any]) -> set[Any]:
    """What is made of some inputs alone, such as a cast of a weight, and those inputs."""
    found = set(sources)
    for equation in jaxpr.eqns:
        read = variables(equation.invars)
        if read and found.issuperset(read):
            found.update(variables(equation.outvars))
    return found


def _shape(v: Any) -> jax.ShapeDtypeStruct:
    """The type of a variable of a program, or of an argument, as a shape."""
    aval: Any = v.aval if isinstance(v, jex.Var) else jax.typeof(v)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


# ---- what may be saved, as `jax.checkpoint` asks


def _saveable(keep: Keep, layer: jex.Jaxpr, of_weights: Collection[Any]) -> Callable[..., bool] | None:
    """The policy of `jax.checkpoint`: of an equation, whether its results may be kept.

    Complex numbers, as of a Fourier transform, never are: JAX rounds what it keeps to the precision that it has, and
    refuses to do so with these (jax 0.10 to 0.12, `reduce_precision does not accept dtype complex64`). Nor are products
    that sum nothing, which the compiler multiplies inside their readers (`trace/outer_products.py`): kept, they
    would be stored.

    Args:
      keep: What is to be kept. layer: The equations. of_weights: Variables that are made of weights alone.
    """
    match keep:
        case Keep.PRODUCTS:
            return _saves_products
        case Keep.WEIGHT_PRODUCTS:
            return _saves_weight_products
        case Keep.ALL_BUT_LARGEST:
            made = (v for e in layer.eqns for v in variables(e.outvars) if v not in of_weights)
            return SavesSmaller(max(map(_elements, (v.aval for v in made)), default=0))
        case _:
            return None


def _saves_products(primitive: Any, *operands: Any, **params: Any) -> bool:
    is_outer = primitive.name == "dot_general" and sums_nothing(operands[0].shape, params["dimension_numbers"])
    return primitive.name in PRODUCTS and not is_outer and not any(map(_is_complex, operands))


def _saves_weight_products(primitive: Any, *operands: Any, **params: Any) -> bool:
    return _saves_products(primitive, *operands, **params) and primitive.name not in FUSED and not _has_batch(params)


@dataclasses.dataclass(frozen=True)  # no slots: JAX refers to it weakly
class SavesSmaller:
    """Keeps what has fewer than `limit` elements."""

    limit: int

    def __call__(self, primitive: Any, *operands: Any, **params: Any) -> bool:
        nested = [open_jaxpr(p) for p in params.values() if isinstance(p, jex.Jaxpr | jex.ClosedJaxpr)]
        if nested:
            return self._keeps([v.aval for n in nested for v in n.outvars])
        try:
            results = _results(primitive, operands, tuple(params.items()))
        except TypeError:  # a parameter that cannot be hashed
            results = _results.__wrapped__(primitive, operands, tuple(params.items()))
        return self._keeps(results)

    def _keeps(self, results: Sequence[Any]) -> bool:
        return max(map(_elements, results), default=0) < self.limit and not any(map(_is_complex, results))


@functools.lru_cache(maxsize=4096)
def _results(primitive: Any, operands: tuple[Any, ...], params: tuple[tuple[str, Any], ...]) -> tuple[Any, ...]:
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in operands]
    made = jax.eval_shape(lambda *arrays: primitive.bind(*arrays, **dict(params)), *shapes)
    return tuple(jax.tree.leaves(made))


def _elements(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _is_complex(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)


def _has_batch(params: Any) -> bool:
    dimensions = params.get("dimension_numbers")
    is_product = isinstance(dimensions, tuple) and not hasattr(dimensions, "_fields") and len(dimensions) == 2
    return is_product and bool(dimensions[1][0])


def _is_batched(equation: jex.JaxprEqn) -> bool:
    name = equation.primitive.name
    return name in FUSED or name == "dot_general" and _has_batch(equation.params)


def _is_loop_of_products(equation: jex.JaxprEqn) -> bool:
    return kind_of(equation) in (EquationKind.SCAN, EquationKind.WHILE) and is_heavy(equation)


def _holds(equation: jex.JaxprEqn, test: Callable[[jex.JaxprEqn], bool]) -> bool:
    return test(equation) or any(_any(open_jaxpr(n), test) for n in nested_programs(equation))


def _any(jaxpr: jex.Jaxpr, test: Callable[[jex.JaxprEqn], bool]) -> bool:
    return any(_holds(e, test) for e in jaxpr.eqns)
