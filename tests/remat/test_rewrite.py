"""A loss that keeps less has the same value and gradients, and computes again what was counted by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.errors import PlanMismatchError
from autoshard.remat.policy import Keep, LayerRun, RematPolicy, RunPolicy, first_layers, uniform
from autoshard.remat.rewrite import layers_of, rematerialised
from autoshard.trace.walk import nested_programs, open_jaxpr
from autoshard.train_step import TrainStep

NUM_LAYERS, BATCH, WIDTH, HIDDEN = 4, 16, 8, 32
DATA = {"x": jnp.sin(jnp.arange(BATCH * WIDTH * 1.0)).reshape(BATCH, WIDTH)}


def params(scanned=False):
    keys = jax.random.split(jax.random.key(0), NUM_LAYERS)
    one = lambda k: {"up": jax.random.normal(k, (WIDTH, HIDDEN)) / 3, "down": jax.random.normal(k, (HIDDEN, WIDTH)) / 6}
    layers = [one(k) for k in keys]
    return jax.tree.map(lambda *xs: jnp.stack(xs), *layers) if scanned else layers


def block(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def stacked(ws, batch, key):
    x = batch["x"]
    for w in ws:
        x = block(x, w)
    return jnp.mean(x**2), {"largest": x.max()}


def through(layer, ws, batch):
    """The loss of layers one after another."""
    x = batch["x"]
    for w in ws:
        x = layer(x, w)
    return jnp.mean(x**2), {}


def checkpointed(ws, batch, key):
    return through(jax.checkpoint(block), ws, batch)


def with_dropout(ws, batch, key):
    x = batch["x"]
    for n, w in enumerate(ws):
        kept = jax.random.bernoulli(jax.random.fold_in(key, n), 0.5, x.shape)
        x = x + jnp.where(kept, block(x, w), 0.0)
    return jnp.mean(x**2), {}


def with_attention(ws, batch, key):
    """Self-attention of 16 positions with itself: its weights, 4 x 16 x 16, are the largest values."""
    x = batch["x"]
    for w in ws:
        q = (x @ w["up"]).reshape(BATCH, 4, HIDDEN // 4)
        weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, q))
        x = x + jnp.einsum("hqk,khd->qhd", weights, q).reshape(BATCH, HIDDEN) @ w["down"]
    return jnp.mean(x**2), {}


def scanned(ws, batch, key):
    x = jax.lax.scan(lambda x, w: (block(x, w), None), batch["x"], ws)[0]
    return jnp.mean(x**2), {}


def scanned_checkpointed(ws, batch, key):
    x = jax.lax.scan(jax.checkpoint(lambda x, w: (block(x, w), None)), batch["x"], ws)[0]
    return jnp.mean(x**2), {}


def in_blocks(x, w):
    """Self-attention of four blocks of four positions, whose scores are made again for the backward pass."""
    q = (x @ w["up"]).reshape(BATCH, 4, HIDDEN // 4)

    @jax.checkpoint
    def attend(_, block):
        weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", block, q))
        return None, jnp.einsum("hqk,khd->qhd", weights, q)

    attended = jax.lax.scan(attend, None, q.reshape(4, BATCH // 4, *q.shape[1:]))[1]
    return x + attended.reshape(BATCH, HIDDEN) @ w["down"]


def with_blocks(ws, batch, key):
    return through(in_blocks, ws, batch)


def with_checkpointed_blocks(ws, batch, key):
    return through(jax.checkpoint(in_blocks), ws, batch)


def with_scanned_blocks(ws, batch, key):
    x = jax.lax.scan(jax.checkpoint(lambda x, w: (in_blocks(x, w), None)), batch["x"], ws)[0]
    return jnp.mean(x**2), {}


def with_custom_gradient(ws, batch, key):
    @jax.custom_vjp
    def doubled(x):
        return x

    doubled.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))
    x = batch["x"]
    for w in ws:
        x = block(doubled(x), w)
    return jnp.mean(x**2), {}


LOSSES = [stacked, checkpointed, with_dropout, with_attention, scanned, scanned_checkpointed, with_custom_gradient]
LOSSES += [with_blocks, with_checkpointed_blocks, with_scanned_blocks]


def step_of(loss_fn):
    step = TrainStep(loss_fn, optax.adam(1e-2))
    return step, step.init(params("scanned" in loss_fn.__name__))


def same(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, expected)


@functools.cache
def as_written(loss_fn):
    """A step, its state, and what the step makes of it."""
    step, state = step_of(loss_fn)
    return step, state, jax.jit(step)(state, DATA)


CASES = [
    pytest.param(loss_fn, keep, marks=[] if keep is Keep.INPUTS or n % len(Keep) == k else pytest.mark.exhaustive)
    for n, loss_fn in enumerate(LOSSES)
    for k, keep in enumerate(Keep)
]
"""In every run the policy that computes most again, of each loss, and one other; every policy of two losses or more."""


@pytest.mark.parametrize(("loss_fn", "keep"), CASES)
def test_every_policy_takes_the_step_that_was_written(loss_fn, keep):
    step, state, (expected, metrics) = as_written(loss_fn)
    runs = layers_of(step, state, DATA).runs
    assert sum(r.count for r in runs) == NUM_LAYERS
    found, found_metrics = jax.jit(rematerialised(step, uniform(runs, keep)))(state, DATA)
    same((found.params, found.opt_state, found_metrics), (expected.params, expected.opt_state, metrics))


def with_transforms(ws, batch, key):
    """Long convolutions by Fourier transforms, and a product of complex numbers."""

    def convolved(x, w):
        spectrum = jnp.fft.rfft(x @ w["up"])
        turned = spectrum * spectrum.conj() @ jnp.fft.rfft(jnp.eye(spectrum.shape[-1]), 2 * HIDDEN - 1, norm="ortho")
        return x + jnp.tanh(jnp.fft.irfft(turned, HIDDEN)) @ w["down"]

    return through(convolved, ws, batch)


@pytest.mark.parametrize("keep", Keep)
def test_complex_numbers_are_never_kept_which_jax_refuses(keep):
    step, state, (expected, _) = as_written(with_transforms)
    runs = layers_of(step, state, DATA).runs
    found, _ = jax.jit(rematerialised(step, uniform(runs, keep)))(state, DATA)
    same(found.params, expected.params)


@pytest.mark.parametrize("keep", [Keep.PRODUCTS, Keep.WEIGHT_PRODUCTS])
def test_products_that_sum_nothing_are_multiplications_and_not_kept(keep):
    """As of a state-space layer, with as many states for each element: they would be the largest of all."""

    def with_states(ws, batch, key):
        def layer(x, w):
            states = jnp.einsum("bh,bn->bhn", x @ w["up"], x)
            return x + jnp.tanh(states).sum(-1) @ w["down"]

        return through(layer, ws, batch)

    step, state = step_of(with_states)
    loss = rematerialised(step, uniform(layers_of(step, state, DATA).runs, keep)).loss_fn
    linear = jax.eval_shape(lambda ws: jax.vjp(lambda ws: loss(ws, DATA, None)[0], ws)[1], state.params)
    assert (BATCH, HIDDEN, WIDTH) not in [x.shape for x in jax.tree.leaves(linear)]
    assert (BATCH, HIDDEN) in [x.shape for x in jax.tree.leaves(linear)]


def test_mixtures_and_micro_batches_take_the_step_that_was_written():
    step, state = step_of(with_dropout)
    step = step.in_parts((8, 8))
    runs = layers_of(step, state, DATA).runs
    expected, _ = step(state, DATA)
    for count in (1, 3):
        policy = first_layers(runs, Keep.INPUTS, Keep.ALL, count)
        assert policy.num_layers == NUM_LAYERS and policy.runs[0].kept == ((Keep.INPUTS, count), (Keep.ALL, 4 - count))
        found, _ = rematerialised(step, policy)(state, DATA)
        same(found.params, expected.params)


def products(step, state):
    """How many products a step has, those in checkpointed functions included."""

    def count(jaxpr):
        nested = [open_jaxpr(n) for e in jaxpr.eqns for n in nested_programs(e)]
        return sum(e.primitive.name == "dot_general" for e in jaxpr.eqns) + sum(map(count, nested))

    return count(jax.make_jaxpr(step)(state, DATA).jaxpr)


@pytest.mark.parametrize(
    ("loss_fn", "keep", "again"),
    [
        (stacked, Keep.ALL, 0),
        (stacked, Keep.PRODUCTS, 0),
        (stacked, Keep.WEIGHT_PRODUCTS, 0),
        # the hidden layer is made again; the second product nobody needs for gradients
        (stacked, Keep.ALL_BUT_LARGEST, 1),
        (stacked, Keep.INPUTS, 1),
        # the scores are made again, of what is kept: q, and what attention gives
        (with_attention, Keep.ALL_BUT_LARGEST, 1),
        (with_attention, Keep.PRODUCTS, 0),
        (with_attention, Keep.WEIGHT_PRODUCTS, 2),  # scores, and what attention gives, which the last product reads
        (with_attention, Keep.INPUTS, 3),
    ],
)
def test_as_many_products_are_made_again_as_by_hand(loss_fn, keep, again):
    step, state = step_of(loss_fn)
    runs = layers_of(step, state, DATA).runs
    kept = products(rematerialised(step, uniform(runs, Keep.ALL)), state)
    assert products(rematerialised(step, uniform(runs, keep)), state) - kept == again * NUM_LAYERS


def test_a_loop_within_a_layer_keeps_its_checkpoint():
    """Only that of the layer, which would make three products again, gives way: those of the blocks stay."""
    step, state = step_of(with_blocks)
    as_written = products(step, state)
    for loss_fn in (with_blocks, with_checkpointed_blocks, with_scanned_blocks):
        step, state = step_of(loss_fn)
        found = layers_of(step, state, DATA)
        is_scanned = loss_fn is with_scanned_blocks
        assert [r.is_loop for r in found.runs] == [is_scanned] and found.has_checkpoints == (loss_fn is not with_blocks)
        kept = products(rematerialised(step, uniform(found.runs, Keep.ALL)), state)
        of_a_layer = (as_written + 1) // NUM_LAYERS  # the first one's input has no gradient, unless a loop makes it
        assert kept == (of_a_layer if is_scanned else as_written)


def test_only_the_first_layers_of_a_mixture_make_products_again():
    step, state = step_of(stacked)
    runs = layers_of(step, state, DATA).runs
    kept = products(rematerialised(step, uniform(runs, Keep.ALL)), state)
    mixed = rematerialised(step, first_layers(runs, Keep.INPUTS, Keep.ALL, 3))
    assert products(mixed, state) - kept == 3


def test_checkpoints_and_batched_products_are_noticed():
    assert layers_of(*step_of(checkpointed), DATA).has_checkpoints
    assert layers_of(*step_of(scanned_checkpointed), DATA).has_checkpoints
    found = layers_of(*step_of(with_attention), DATA)
    assert (found.has_checkpoints, found.has_batched_products) == (False, True)
    assert not layers_of(*step_of(stacked), DATA).has_batched_products


def test_a_loss_without_the_layers_of_a_policy_is_refused():
    step, state = step_of(stacked)
    run = LayerRun(0, 50, 2)
    policy = RematPolicy((RunPolicy(run, ((Keep.INPUTS, 2),)),))
    with pytest.raises(PlanMismatchError, match="up to equation 100 of the loss"):
        rematerialised(step, policy)(state, DATA)


def test_mutable_state_passes_through():
    step, _ = step_of(stacked)

    def loss_fn(ws, mutable, batch, key):
        loss, metrics = stacked(ws, batch, key)
        return loss, ({"mean": 0.9 * mutable["mean"] + loss}, metrics)

    step = dataclasses.replace(step, loss_fn=loss_fn, has_mutable=True)
    state = step.init(params(), mutable={"mean": jnp.float32(1.0)})
    runs = layers_of(step, state, DATA).runs
    expected, _ = step(state, DATA)
    found, _ = rematerialised(step, uniform(runs, Keep.INPUTS))(state, DATA)
    same((found.params, found.mutable), (expected.params, expected.mutable))
