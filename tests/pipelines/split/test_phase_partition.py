"""A joint program in parts: together they are the program, and little is held between them."""

from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.pipelines.split.forward import trace_forward
from autoshard.pipelines.split.joint_function import joint_arguments, joint_function
from autoshard.pipelines.split.layer_boundaries import LayerBoundaries, find_layers
from autoshard.pipelines.split.phase_partition import PhaseEquations, PhasePartition, is_cheap, partition_phases
from autoshard.pipelines.split.stage_program import StageSplitter
from autoshard.trace.walk import size_bytes, variables
from autoshard.train_step import TrainStep

WIDTH, HIDDEN, ROWS = 8, 32, 4


def jaxpr_and_parts(loss: Any, params: Any, batch: Any, stage: int, num_stages: int, splits: bool) -> Any:
    """The joint program of a stage, its parts, and zeros, ones and so on to call it with."""
    step = TrainStep(loss, optax.sgd(0.1))
    forward = trace_forward(step, jax.eval_shape(step.init, params), batch, ROWS)
    cuts = find_layers(forward)
    ends = [round(k * cuts.num_layers / num_stages) for k in range(num_stages + 1)]
    program = StageSplitter(forward, cuts).program(ends[stage], ends[stage + 1])
    function, arguments = joint_function(forward, program), joint_arguments(forward, program)
    closed, (sums, outputs, back, mutable, metrics) = jax.make_jaxpr(function, return_shape=True)(*arguments)
    ends = np.cumsum([0, *(len(jax.tree.leaves(x)) for x in (sums, outputs, back, mutable, metrics))]).tolist()
    new_sums, outs, backs, *others = (list(range(a, b)) for a, b in zip(ends, ends[1:], strict=False))
    first = sum(len(jax.tree.leaves(x)) for x in arguments[:5])
    inputs = range(first, first + len(arguments[5]))
    partition = partition_phases(
        closed.jaxpr,
        forward_outs=[*outs, *sum(others, [])],
        input_outs=backs,
        sum_outs=new_sums,
        saved_inputs=inputs,
        splits_backward=splits,
    )
    return closed, partition, arguments


def run_part(closed: Any, part: PhaseEquations, known: dict[Any, Any], wanted: list[Any]) -> list[Any]:
    """What the equations of a part make, from no more than it says that it reads."""
    jaxpr = closed.jaxpr
    given = {jaxpr.invars[n] for n in part.given} | {v for v in known if v not in jaxpr.invars} | {*jaxpr.constvars}
    env = {v: x for v, x in known.items() if v in given} | dict(zip(jaxpr.constvars, closed.consts, strict=True))
    made = jaxpr.replace(
        constvars=[], invars=list(env), outvars=wanted, eqns=[jaxpr.eqns[i] for i in part.equations]
    )  # fmt: skip
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(made, []))(*env.values())


def run_parts(closed: Any, parts: PhasePartition, flat: list[Any]) -> list[Any]:
    """All results of a program, part by part; each part knows the inputs and what earlier ones hold for it."""
    jaxpr, results = closed.jaxpr, {}
    inputs = dict(zip(jaxpr.invars, flat, strict=True))
    steps = [(parts.forward, (), parts.residuals)]
    if parts.weight is None:
        steps.append((parts.backward, parts.residuals, ()))
    else:
        steps.append((parts.backward, parts.residuals, parts.weight_residuals))
        steps.append((parts.weight, (*parts.kept_residuals, *parts.weight_residuals), ()))
    held: dict[Any, Any] = {}
    for part, before, after in steps:
        outs = [jaxpr.outvars[n] for n in part.results]
        made = run_part(closed, part, inputs | {v: held[v] for v in before}, [*outs, *after])
        results |= dict(zip(part.results, made, strict=False))
        held |= dict(zip(after, made[len(outs) :], strict=True))
    return [results[n] for n in range(len(jaxpr.outvars))]


def language_loss(params, batch, key):
    """Attention and an MLP with norms and dropout between tied embeddings."""
    x = params["table"][batch["words"]]
    for name in ("first", "second"):
        own = params[name]
        normed = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        weights = jax.nn.softmax((normed @ own["query"]) @ jnp.swapaxes(normed, 1, 2))
        x = x + weights @ normed
        hidden = jax.nn.gelu(x @ own["up"])
        kept = jax.random.bernoulli(jax.random.fold_in(key, len(name)), 0.8, hidden.shape)
        x = x + jnp.where(kept, hidden, 0.0) @ own["down"]
    logits = x @ params["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean(), {"size": jnp.mean(x**2)}


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


BLOCK = {"query": shape(WIDTH, WIDTH), "up": shape(WIDTH, HIDDEN), "down": shape(HIDDEN, WIDTH)}
LANGUAGE = {"table": shape(16, WIDTH), "first": BLOCK, "second": BLOCK}
WORDS = {"words": shape(ROWS, 3, dtype=jnp.int32), "next": shape(ROWS, 3, dtype=jnp.int32)}


def filled(arguments: Any) -> list[Any]:
    """Arrays of these shapes with random numbers."""
    leaves = []
    for k, x in enumerate(jax.tree.leaves(arguments)):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            leaves.append(jax.random.key(5))
        elif jnp.issubdtype(x.dtype, jnp.integer):
            leaves.append(jax.random.randint(jax.random.key(k), x.shape, 0, 16))
        else:
            leaves.append(jax.random.normal(jax.random.key(k), x.shape, x.dtype))
    return leaves


@pytest.mark.parametrize(("stage", "splits"), [(0, True), (1, False), (1, True), (2, True)])
def test_parts_make_what_the_whole_makes(stage, splits):
    closed, parts, arguments = jaxpr_and_parts(language_loss, LANGUAGE, WORDS, stage, 3, splits)
    flat = filled(arguments)
    expected, found = jax.jit(lambda *xs: (jex.jaxpr_as_fun(closed)(*xs), run_parts(closed, parts, xs)))(*flat)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert (parts.weight is not None) == (splits and stage > 0)  # the first stage has no gradients of inputs to make


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_no_more_is_held_than_what_is_read_and_nothing_dear_is_made_twice(stage):
    closed, parts, _ = jaxpr_and_parts(language_loss, LANGUAGE, WORDS, stage, 3, True)
    jaxpr = closed.jaxpr
    forward = set(parts.forward.equations)
    made = {v for i in forward for v in variables(jaxpr.eqns[i].outvars)}
    later = set(parts.backward.equations) | set(parts.weight.equations if parts.weight else ())
    read = {v for i in later - forward for v in variables(jaxpr.eqns[i].invars)} & made
    assert sum(map(size_bytes, parts.residuals)) < sum(map(size_bytes, read))  # here some of it is indeed made again
    again = forward & later
    assert again and all(is_cheap(jaxpr.eqns[i]) for i in again)
    if parts.weight is not None:
        twice = set(parts.backward.equations) & set(parts.weight.equations)
        assert all(is_cheap(jaxpr.eqns[i]) for i in twice)
        assert set(parts.kept_residuals) <= set(parts.residuals)
        assert set(parts.weight_residuals) <= {
            v for i in parts.backward.equations for v in variables(jaxpr.eqns[i].outvars)
        }


def test_of_two_layers_with_a_gelu_between_them_the_products_alone_are_held():
    """x -> h = x a -> g = gelu(h) -> y = g b -> mean y^2. The gradients need x, g, gelu'(h) and y. x is an argument; g
    and gelu' are made of h again; h and y are products. y and what follows it have one size; y is nearest the source.
    """

    def loss(params, batch, key):
        return jnp.mean((jax.nn.gelu(batch @ params["a"]) @ params["b"]) ** 2), {}

    params = {"a": shape(WIDTH, HIDDEN), "b": shape(HIDDEN, WIDTH)}
    closed, parts, _ = jaxpr_and_parts(loss, params, shape(ROWS, WIDTH), 0, 1, False)
    made_by = {v: e for e in closed.jaxpr.eqns for v in variables(e.outvars)}
    assert [made_by[v].primitive.name for v in parts.residuals] == ["dot_general", "dot_general"]
    assert [v.aval.shape for v in parts.residuals] == [(ROWS, HIDDEN), (ROWS, WIDTH)]
    assert "tanh" in {closed.jaxpr.eqns[i].primitive.name for i in parts.backward.equations}


def test_random_numbers_are_not_drawn_again():
    """What is held of dropout is its mask, one byte a number; the numbers have four."""

    def loss(params, batch, key):
        kept = jax.random.bernoulli(key, 0.5, (ROWS, HIDDEN))
        return jnp.mean(jnp.where(kept, batch @ params["a"], 0.0) @ params["b"]), {}

    params = {"a": shape(WIDTH, HIDDEN), "b": shape(HIDDEN, WIDTH)}
    closed, parts, _ = jaxpr_and_parts(loss, params, shape(ROWS, WIDTH), 0, 1, False)
    names = {closed.jaxpr.eqns[i].primitive.name for i in parts.backward.equations}
    assert not {n for n in names if n.startswith(("random", "threefry"))}
    assert [(v.aval.shape, v.aval.dtype) for v in parts.residuals if v.aval.dtype == bool] == [((ROWS, HIDDEN), bool)]


def test_a_stage_that_nobody_learns_from_has_an_empty_backward_pass():
    """It has neither weights nor inputs with gradients."""

    def loss(params, batch, key):
        x = jnp.argmax(batch @ params["a"], 1)
        return jnp.mean(params["b"][x] @ params["a"]), {}

    step = TrainStep(loss, optax.sgd(0.1))
    params = {"a": shape(WIDTH, HIDDEN), "b": shape(HIDDEN, WIDTH)}
    forward = trace_forward(step, jax.eval_shape(step.init, params), shape(ROWS, WIDTH), ROWS)
    names = [forward.jaxpr.eqns[i].primitive.name for i in forward.main]
    cuts = LayerBoundaries((0, 1, names.index("argmax") + 1), len(names), ("a", "b", "c"))
    program = StageSplitter(forward, cuts).program(1, 2)
    closed = jax.make_jaxpr(joint_function(forward, program))(*joint_arguments(forward, program))
    found = partition_phases(
        closed.jaxpr, forward_outs=[0], input_outs=[1], sum_outs=[], saved_inputs=[0], splits_backward=True
    )
    assert found.weight is None and found.residuals == ()
    # the product in front of it has a gradient, which is zero
    assert {closed.jaxpr.eqns[i].primitive.name for i in found.backward.equations} <= {"broadcast_in_dim", "mul"}
