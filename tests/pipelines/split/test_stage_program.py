"""Stages put together are the whole loss, with its gradients, metrics and mutable state, whatever crosses the cuts."""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.pipelines.split.forward import Forward, trace_forward
from autoshard.pipelines.split.joint_function import joint_arguments, joint_function
from autoshard.pipelines.split.layer_boundaries import LayerBoundaries, find_layers
from autoshard.pipelines.split.stage_program import StageProgram, StageSplitter
from autoshard.train_step import TrainStep

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "models"))
from autoshard_models.zoo import FAMILIES  # noqa: E402
from zoo_programs import PROGRAMS  # noqa: E402

FACTOR = 0.5
KEY = jax.random.key(3)


def programs_of(forward: Forward, cuts: LayerBoundaries, num_stages: int) -> list[StageProgram]:
    """The model in stages of about equally many layers."""
    ends = [round(k * cuts.num_layers / num_stages) for k in range(num_stages + 1)]
    stages = StageSplitter(forward, cuts)
    return [stages.program(a, b) for a, b in zip(ends, ends[1:], strict=False)]


def cut_behind(forward: Forward, *ends: tuple[str, int]) -> LayerBoundaries:
    """Layers that end with the equations given as (primitive, number among the main ones of that primitive)."""
    names = [forward.jaxpr.eqns[i].primitive.name for i in forward.main]
    starts = (0, *([k for k, n in enumerate(names) if n == primitive][number] + 1 for primitive, number in ends))
    return LayerBoundaries(starts, len(forward.main), tuple(map(str, starts)))


def composed(forward: Forward, programs: list[StageProgram], params: Any, mutable: Any, batch: Any, key: Any) -> Any:
    """(gradients of FACTOR times the loss, new mutable state, metrics) by name, of stages run one after another."""
    joint = [joint_function(forward, p, rematerialise=p.start == 0) for p in programs]
    weights = dict(zip(forward.params.names, jax.tree.leaves(params), strict=True))
    state = dict(zip(forward.mutable.names, jax.tree.leaves(mutable), strict=True))
    data = dict(zip(forward.batch.names, jax.tree.leaves(batch), strict=True))
    values, metrics, gradients, back = {}, {}, {}, {}
    new_state = dict(state)

    def run(p: StageProgram, function: Any, back: dict[str, Any]) -> Any:
        names = function.names
        own = {n: weights[n] for n in names.params}
        return function(
            jax.tree.map(jnp.zeros_like, own),
            own,
            {n: state[n] for n in names.mutable_in},
            {n: data[n] for n in names.batch},
            {"key": key} if p.interface.reads_key else {},
            {s.key: values[s.key] for s in p.interface.inputs},
            jnp.float32(FACTOR),
            {s.key: back[s.key] for s in p.interface.outputs if s.has_gradient},
        )

    for p, function in zip(programs, joint, strict=True):
        none = {s.key: jnp.zeros(s.shape, s.dtype) for s in p.interface.outputs if s.has_gradient}
        _, outputs, _, mutable_out, made = run(p, function, none)
        values |= outputs
        new_state |= mutable_out
        assert not metrics.keys() & made.keys()
        metrics |= made
    for p, function in reversed(list(zip(programs, joint, strict=True))):
        sums, _, sent_back, _, _ = run(p, function, back)
        for total, more in ((gradients, sums), (back, sent_back)):
            total |= {n: total[n] + g if n in total else g for n, g in more.items()}
    return gradients, new_state, metrics


def assert_composes(
    loss: Any, params: Any, batch: Any, ends: Sequence[tuple[str, int]] | int, mutable: Any = None
) -> list[StageProgram]:
    """The stages of a model make what the whole makes; returns them.

    Args:
      ends: Where stages end, as for `cut_behind`; or how many to make of the layers that are found.
      mutable: The model's own state, if the loss has any.
    """
    step = TrainStep(loss, optax.sgd(0.1), has_mutable=mutable is not None)
    state = step.init(params, KEY, mutable)
    forward = trace_forward(step, state, batch, jax.tree.leaves(batch)[0].shape[0])
    is_found = isinstance(ends, int)
    cuts = find_layers(forward) if is_found else cut_behind(forward, *ends)
    programs = programs_of(forward, cuts, ends if is_found else len(ends) + 1)

    @jax.jit
    def both(params: Any, mutable: Any, batch: Any, key: Any) -> Any:
        whole = step.gradients(params, mutable, batch, key, FACTOR)
        return whole, composed(forward, programs, params, mutable, batch, key)

    (gradients, new_mutable, metrics), found = both(params, state.mutable, batch, KEY)
    expected = dict(zip(forward.params.names, jax.tree.leaves(gradients), strict=True))
    largest = max(float(jnp.abs(g).max()) for g in expected.values())
    assert largest > 0
    for name, g in expected.items():  # a parameter that no stage reads has no gradient
        scale = max(float(jnp.abs(g).max()), 1e-2 * largest)
        np.testing.assert_allclose(found[0].get(name, 0.0), g, rtol=0, atol=1e-5 * scale, err_msg=name)
    for name, x in zip(forward.mutable.names, jax.tree.leaves(new_mutable), strict=True):
        np.testing.assert_allclose(numbers(found[1][name]), numbers(x), rtol=1e-5, atol=1e-6, err_msg=name)
    assert found[2].keys() == metrics.keys()
    for name, x in metrics.items():
        assert found[2][name].dtype == x.dtype, name
        np.testing.assert_allclose(found[2][name], x, rtol=1e-5, err_msg=name)
    return programs


def numbers(x: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


@pytest.mark.parametrize(
    ("family", "num_stages"),
    [
        pytest.param("llama", 3, marks=pytest.mark.exhaustive),
        pytest.param("encoder", 2, marks=pytest.mark.exhaustive),
        ("encoder_decoder", 4),
        pytest.param("moe", 3, marks=pytest.mark.exhaustive),
        ("wide_resnet", 3),
        ("dlrm", 3),
        pytest.param("recurrent", 3, marks=pytest.mark.exhaustive),
        pytest.param("graph_network", 3, marks=pytest.mark.exhaustive),
    ],
)
def test_stages_of_a_model_are_the_whole(family, num_stages):
    """In every run those with values that cross several cuts, with mutable state, and with tables; the families that
    benchmarks/staged_equality.py adds are slow to compile (unet), or like one of these."""
    program = PROGRAMS[family]
    objective = FAMILIES[family].objective(program.config)
    loss = lambda p, m, b, k: objective.loss(p, m, b, k if objective.is_random else None)
    params, mutable = objective.init(jax.random.key(0))
    batch = jax.tree.map(lambda x: x[:2], program.batch())
    assert_composes(loss, params, batch, num_stages, mutable)


WIDTH = 128
"""So that values that cross are above the size that finding layers neglects."""


def weights_of(*names: str) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(names))
    return {n: jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for n, k in zip(names, keys, strict=True)}


def rows(count: int = 4) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (count, WIDTH))


def test_skips_cross_several_stages_and_their_gradients_are_added_up():
    """Down and up again, as a U-Net: each half's values are read on the other side."""

    def loss(params, batch, key):
        x, skips = batch, []
        for n in "abc":
            x = jnp.tanh(x @ params[n])
            skips.append(x)
        for n in "def":
            x = jnp.tanh(x @ params[n] + skips.pop())
        return jnp.mean(x**2), {}

    programs = assert_composes(loss, weights_of(*"abcdef"), rows(), [("tanh", 1), ("tanh", 3)])
    names = [{s.number for s in p.interface.inputs} for p in programs]
    assert names[0] == set() and names[1] & names[2]  # one value goes to both later stages
    assert [p.interface.params for p in programs] == [(0, 1), (2, 3), (4, 5)]


def test_tied_weights_are_read_by_two_stages_which_both_have_a_gradient():
    def loss(params, batch, key):
        x = params["table"][batch["words"]]
        for n in "ab":
            x = x + jnp.tanh(x @ params[n])
        logits = x @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean(), {}

    words = jax.random.randint(jax.random.key(2), (4, 5), 0, WIDTH)
    batch = {"words": words[:, :-1], "next": words[:, 1:]}
    params = weights_of("table", *"ab")
    programs = assert_composes(loss, params, batch, [("tanh", 0), ("tanh", 1)])
    assert [p.interface.params for p in programs] == [(0, 2), (1,), (2,)]  # of a, b and table
    assert [p.interface.batch for p in programs] == [(1,), (), (0,)]  # of `next` and `words`


def test_values_without_gradient_cross_too():
    """Indices are sent on, but nothing comes back for them; what is only looked at has a gradient of zero."""

    def loss(params, batch, key):
        x = jnp.tanh(batch @ params["a"])
        chosen = jnp.argmax(x, axis=1)
        x = jnp.tanh(x @ params["b"])
        x = jnp.tanh(x @ params["c"])
        scores = x @ params["d"]
        return jnp.mean(jnp.take_along_axis(scores, chosen[:, None], 1)), {"chosen": jnp.mean(chosen)}

    programs = assert_composes(loss, weights_of(*"abcd"), rows(), [("tanh", 1)])
    kinds = {str(s.dtype): s.has_gradient for s in programs[1].interface.inputs}
    assert kinds == {"float32": True, "int32": False}


def test_a_stage_whose_inputs_have_no_gradient_and_one_without_weights():
    """The first stage only picks indices, so that it learns nothing; the last one compares examples."""

    def loss(params, batch, key):
        chosen = jnp.argmax(jnp.tanh(batch @ params["a"]) @ params["b"], axis=1)
        x = jnp.tanh(params["c"][chosen] @ params["d"])
        alike = x @ x.T
        return jnp.mean(jnp.tanh(alike @ alike)), {}

    programs = assert_composes(loss, weights_of(*"abcd"), rows(), [("argmax", 0), ("tanh", 1)])
    assert [p.interface.params for p in programs] == [(0, 1), (2, 3), ()]
    assert [[s.has_gradient for s in p.interface.inputs] for p in programs] == [[], [False], [True]]


def test_what_belongs_to_no_layer_is_made_by_the_last_stage():
    """Metrics of data alone, of weights alone and of nothing; weights that are not read, or read in vain."""

    def loss(params, batch, key):
        x = batch
        for n in "abc":
            x = jnp.tanh(x @ params[n])
        unused = jnp.sum(params["d"] @ x.T)
        norm = sum(jnp.sum(params[n] ** 2) for n in "ab")
        value = jnp.mean(x**2) + 1e-3 * norm
        seen = {"mean": jnp.mean(batch), "norm": norm, "one": 1.0, "examples": jnp.int32(4), "same": value}
        return value, seen | {"sum of c": jnp.sum(params["c"]), "unused": 0.0 * jax.lax.stop_gradient(unused)}

    programs = assert_composes(loss, weights_of(*"abcde"), rows(), [("tanh", 0), ("tanh", 1)])
    assert [len(p.interface.metrics) for p in programs] == [0, 0, 8]
    assert programs[-1].interface.params == (0, 1, 2, 3)  # the norm of `a` and `b` is made anew where it is read


def test_rules_of_differentiation_and_calls_stay_what_they_are():
    """A `custom_vjp` whose gradient is not that of its function, nested calls, a conditional, and half precision."""

    @jax.custom_vjp
    def twice_back(x):
        return jnp.tanh(x)

    twice_back.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (2 * g * (1 - jnp.tanh(x) ** 2),))
    block = jax.jit(lambda w, x: twice_back(x @ w))

    def loss(params, batch, key):
        x = block(params["a"], block(params["b"], batch))
        x = jax.lax.cond(jnp.sum(batch) > 1e9, lambda w: x @ w, lambda w: x, params["c"])
        x = block(params["a"], x).astype(jnp.bfloat16)
        return jnp.mean(jnp.float32(x @ params["d"].astype(jnp.bfloat16)) ** 2), {}

    ends = [("custom_vjp_call", 1), ("convert_element_type", 0)]
    programs = assert_composes(loss, weights_of(*"abcd"), rows(), ends)
    assert [[str(s.dtype) for s in p.interface.inputs] for p in programs] == [[], ["float32"], ["bfloat16"]]


def test_mutable_state_with_a_counter_and_a_random_key_belongs_to_the_stage_that_changes_it():
    """The key of the state makes a key that crosses to later stages; `spare` is not changed by anybody."""

    def loss(params, mutable, batch, key):
        step_key = jax.random.fold_in(mutable["key"], mutable["count"])
        x, means = batch, {}
        for k, n in enumerate("abc"):
            x = jnp.tanh(x @ params[n])
            x = x * jax.random.bernoulli(jax.random.fold_in(step_key, k), 0.9, x.shape)
            x = x * jax.random.bernoulli(jax.random.fold_in(key, k), 0.9, x.shape)
            means[n] = 0.9 * mutable["means"][n] + 0.1 * jnp.mean(x, 0)
        new = {"key": mutable["key"], "count": mutable["count"] + 1, "means": means, "spare": mutable["spare"]}
        return jnp.mean(x**2 + mutable["spare"]), (new, {})

    means = {n: jnp.ones(WIDTH) for n in "abc"}
    mutable = {"key": jax.random.key(5), "count": jnp.int32(7), "means": means, "spare": jnp.ones(WIDTH)}
    programs = assert_composes(loss, weights_of(*"abc"), rows(), [("dot_general", 1), ("dot_general", 2)], mutable)
    # leaves: count, key, means of a, b and c, spare; key and spare stay as they are
    assert [p.interface.mutable_out for p in programs] == [(2,), (3,), (0, 4)]
    assert [p.interface.mutable_in for p in programs] == [(0, 1, 2), (3,), (0, 4, 5)]
    assert [p.interface.reads_key for p in programs] == [True, True, True]
    sent = [s for s in programs[0].interface.outputs if jnp.issubdtype(s.dtype, jax.dtypes.prng_key)]
    assert len(sent) == 1 and not sent[0].has_gradient


def test_sums_of_gradients_may_have_a_type_of_their_own():
    loss = lambda params, batch, key: (jnp.mean(jnp.float32(batch @ params)), {})
    step = TrainStep(loss, optax.sgd(0.1))
    params = jnp.ones((WIDTH, 4), jnp.bfloat16)
    forward = trace_forward(step, step.init(params), rows(), 4)
    (program,) = programs_of(forward, find_layers(forward), 1)
    arguments = ({"": jax.ShapeDtypeStruct((WIDTH, 4), jnp.float32)}, *joint_arguments(forward, program)[1:])
    sums, outputs, back, mutable, metrics = jax.eval_shape(joint_function(forward, program), *arguments)
    assert sums == arguments[0] and (outputs, back, mutable) == ({}, {}, {}) and [*metrics] == ["loss"]
