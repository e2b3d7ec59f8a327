"""Shares of a planned step: moved units change no result, units left out are masks, and refusals say why."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import autoshard
from autoshard import Balance, TrainStep, baselines
from autoshard.errors import AutoshardError, ConfigError

MESH = {"data": 2, "tensor": 4}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))
HEADS, HIDDEN = 8, 32
DIM_OF = {"query": (1, HEADS), "output": (0, HEADS), "up": (1, HIDDEN), "bias": (0, HIDDEN), "down": (0, HIDDEN)}
"""Of each parameter the dimension that is made of units, and how many units there are."""


def init(seed):
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    shapes = {"query": (16, HEADS, 4), "output": (HEADS, 4, 16), "up": (16, HIDDEN), "down": (HIDDEN, 16)}
    params = {name: jax.random.normal(next(keys), shape) / 4 for name, shape in shapes.items()}
    params |= {"bias": jnp.ones(HIDDEN), "scale": jnp.ones(16)}
    return params, OPTIMIZER.init(params)


def loss_of(params, x, heads, hidden):
    """Something like attention, and a layer of two products with a bias, whose activation is not 0 at 0."""
    mixed = jax.nn.softmax(jnp.einsum("bd,dhk->bhk", x, params["query"])) * heads[:, None]
    x = x + jnp.einsum("bhk,hkd->bd", mixed, params["output"])
    after = jnp.cos(x @ params["up"] + params["bias"]) * hidden
    return jnp.mean((params["scale"] * (after @ params["down"]) - x) ** 2)


def stepped(state, x, heads, hidden):
    params, before = state
    value, gradients = jax.value_and_grad(loss_of)(params, x, heads, hidden)
    updates, after = OPTIMIZER.update(gradients, before, params)
    return (optax.apply_updates(params, updates), after), value


def step(state, x):
    return stepped(state, x, jnp.ones(HEADS), jnp.ones(HIDDEN))


@jax.jit
def masked_step(state, x, heads, hidden):
    """The step with masks, of which nothing changes that belongs to a unit with a mask of 0."""
    (params, after), value = stepped(state, x, heads, hidden)

    def kept(path, new, old):
        name = path[-1].key if hasattr(path[-1], "key") else ""
        if name not in DIM_OF:
            return new
        dim, units = DIM_OF[name]
        mask = heads if units == HEADS else hidden
        return jnp.where(mask.reshape((-1,) + (1,) * (new.ndim - dim - 1)) > 0, new, old)

    return jax.tree_util.tree_map_with_path(kept, (params, after), state), value


@pytest.fixture(scope="module")
def plan():
    shapes = jax.eval_shape(init, 0), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    return baselines.mixed(step, *shapes, data="ddp", donate_argnums=0, mesh=MESH)


@pytest.fixture(scope="module")
def run(plan):
    """A step for which all is allowed."""
    return plan.jit(step, balance=Balance(mode="semi", absorbs=100, max_loss_share=1.0, can_be_slowed=True))


@pytest.fixture(scope="module")
def batches():
    return [jax.random.normal(jax.random.key(n), (8, 16)) for n in range(4)]


def assert_close(ours, theirs):
    for own, their in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(np.asarray(own), np.asarray(their), rtol=2e-4, atol=2e-6)


def masks_of(placings, rooms, unbiased):
    """For each unit 0 if it is left out; otherwise 1, or how many units it counts for."""
    masks = []
    for placing, room in zip(placings, rooms, strict=True):
        mask = np.zeros(room.unit.size, np.float32)
        for units, active in zip(placing.units, placing.active, strict=True):
            mask[list(units[:active])] = len(units) / active if unbiased and active else 1
        masks.append(mask)
    return masks


@pytest.mark.parametrize(
    ("sizes", "unbiased"), [("loop", False), pytest.param("loop", True, marks=pytest.mark.exhaustive), ("switch", True)]
)
def test_units_left_out_are_masks(plan, run, batches, sizes, unbiased):
    """Also where units have moved: loss, parameters and the state of the optimizer, also of what is left out."""
    if unbiased:
        own = Balance(mode="semi", max_loss_share=1.0, sizes=sizes, most_buckets=2, unbiased=True)
        run = plan.jit(step, balance=own)
    state, expected, rng = plan.init(init, 0), init(0), np.random.default_rng(0)
    assert [room.unit.size for room in run.balance.rooms] == [HEADS, HIDDEN]
    dropped = 0
    for x in batches:
        run.balance.set(rng.random(4), kept=rng.random(4))
        placings, rooms = run.balance.placings, run.balance.rooms
        dropped += sum(p.dropped for p in placings)
        state, value = run(state, x)
        expected, value_expected = masked_step(expected, x, *masks_of(placings, rooms, unbiased))
        assert_close((run.balance.by_units(state), value), (expected, value_expected))
    assert dropped > HIDDEN


def test_even_shares_run_as_planned(plan, run, batches):
    """After others, too: units come back to where the plan has them, and results are those of the planned step."""
    planned = plan.jit(step)
    state, expected = plan.init(init, 0), plan.init(init, 0)
    for shares, x in zip(([1, 1, 1, 1], [0, 3, 1, 2], [1, 1, 1, 1], [1, 1, 1, 1]), batches, strict=True):
        run.balance.set(shares)
        state, _ = run(state, x)
        expected, _ = planned(expected, x)
    assert [x.shape for x in jax.tree.leaves(state)] == [x.shape for x in jax.tree.leaves(expected)]
    assert_close(state, expected)


def test_all_work_can_leave_a_rank(plan, run, batches):
    """Also a slowed one, whose results are the same."""
    state, expected = plan.init(init, 0), init(0)
    run.balance.slow({0: 3, 1: 2})
    for shares, x in zip(([1, 1, 1, 1], [0, 1, 1, 1]), batches, strict=False):
        run.balance.set(shares)
        state, _ = run(state, x)
        expected, _ = masked_step(expected, x, jnp.ones(HEADS), jnp.ones(HIDDEN))
    assert [p.counts[0] for p in run.balance.placings] == [0, 0]
    assert run.balance.shares()[0] == 0 and sum(run.balance.shares()) == pytest.approx(1)
    assert_close(run.balance.by_units(state), expected)
    assert "32 units as 0 11 11 10" in str(run.balance)
    run.balance.slow({})


def test_refusals_say_why(plan):
    shapes = jax.eval_shape(init, 0), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    parallel = baselines.data_parallel(step, *shapes, donate_argnums=0)
    with pytest.raises(ConfigError, match="a tensor axis.*Ask for one with the annotation autoshard.split"):
        parallel.jit(step, balance=Balance()).prepare(*shapes)
    exact = plan.jit(step, balance=Balance(mode="migrate")).balance
    with pytest.raises(ConfigError, match="No unit may be left out in mode `migrate`"):
        exact.set([1, 1, 1, 1], kept=[0.5, 1, 1, 1])
    with pytest.raises(ConfigError, match="4 ranks of axis `tensor`"):
        exact.set([1, 1])
    with pytest.raises(ConfigError, match="can_be_slowed=True"):
        exact.slow({0: 2})
    with pytest.raises(ConfigError, match="along `tensor`; received axis='data'"):
        exact.shares("data")
    lossy = plan.jit(step, balance=Balance(mode="resize")).balance
    with pytest.raises(ConfigError, match="Units do not move in mode `resize`"):
        lossy.set([1, 2, 1, 1])
    lossy.set([1, 1, 1, 1], kept=[0.5, 1, 1, 1])
    assert lossy.placings[1].active == (4, 8, 8, 8)
    with pytest.raises(ConfigError, match=r"mode is one of off, resize, migrate, semi, auto; received 'fast'"):
        Balance(mode="fast")  # pyright: ignore[reportArgumentType]


def test_channels_of_a_convolution_do_not_move_and_that_is_told():
    def convolved(weights, x):
        loss = lambda w: jnp.mean(jnp.tanh(jax.lax.conv(x, w, (1, 1), "SAME")) ** 2)
        return weights - 0.1 * jax.grad(loss)(weights)

    shapes = jax.ShapeDtypeStruct((32, 8, 3, 3), jnp.float32), jax.ShapeDtypeStruct((8, 8, 8, 8), jnp.float32)
    split = autoshard.plan(convolved, *shapes, mesh={"tensor": 8}, pins={"weights": PartitionSpec("tensor")})
    with pytest.raises(ConfigError, match="`weights` over tensor.*is a convolution, whose channels cannot move"):
        split.jit(convolved, balance=Balance()).prepare(*shapes)


def test_a_state_by_places_must_be_known(plan, run, batches):
    run.balance.set([1, 2, 1, 1])
    state, _ = run(plan.init(init, 0), batches[0])
    with pytest.raises(AutoshardError, match="run.balance.by_units"):
        run(jax.tree.map(jnp.copy, state), batches[0])


class Drawing(nnx.Module):
    """A hidden layer with running averages of its units, and random numbers that are theirs."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, 16, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(HIDDEN, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        after = self.norm(self.up(x))
        noise = jax.random.normal(self.dropout.rngs(), after.shape)
        return self.down(self.dropout(jnp.cos(after + noise)))


@pytest.mark.parametrize("sizes", ["loop", "switch"])
def test_units_keep_their_random_numbers_and_averages_where_they_move(batches, sizes):
    drawing = TrainStep(lambda module, x: jnp.mean((module(x) - x) ** 2), optax.sgd(0.1, momentum=0.9))
    start = lambda seed: drawing.init(Drawing(nnx.Rngs(jax.random.key(seed))))
    shapes = jax.eval_shape(start, 0), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    drawn = baselines.mixed(drawing, *shapes, data="ddp", donate_argnums=0, mesh=MESH)
    run = drawn.jit(drawing, balance=Balance(mode="migrate", sizes=sizes, most_buckets=2))
    state, expected, alone = drawn.init(start, 0), start(0), jax.jit(drawing)
    assert [room.unit.size for room in run.balance.rooms] == [HIDDEN]
    for shares, x in zip(([1, 1, 1, 1], [1, 2, 1, 1], [2, 1, 1, 1], [1, 1, 1, 1]), batches, strict=True):
        run.balance.set(shares)
        state, _ = run(state, x)
        expected, _ = alone(expected, x)
        ours, theirs = run.balance.by_units(state), expected
        assert_close((ours.params, ours.opt_state), (theirs.params, theirs.opt_state))
        assert_close(*(nnx.to_pure_dict(nnx.state(own.module, nnx.BatchStat)) for own in (ours, theirs)))
        assert ours.module.dropout.rngs.count[...] == theirs.module.dropout.rngs.count[...]
