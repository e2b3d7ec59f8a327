"""Steps over the rows of a batch: they equal steps over whole tables."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import autoshard
from autoshard.errors import PlanMismatchError, TraceError
from autoshard.tables import find_tables, row_updates, sparse_step

EXACT = {
    "sgd": optax.sgd(0.5),
    "adagrad": optax.adagrad(0.5),
    "by the global norm": optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(optax.linear_schedule(0.5, 0.1, 3))),
    "clipped": optax.chain(optax.clip(0.01), optax.adagrad(0.5)),
}
LAZY = {
    "adam": optax.adam(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "rmsprop": optax.rmsprop(0.1),
    "lion": optax.lion(0.1),
}


def loss_fn(params, batch, _):
    """Bags of ids summed (an id of -99 is none), a table of scalars, a table read twice and in another precision."""
    bags = jnp.take(params["bags"], batch["bags"], axis=0, mode="fill", fill_value=0).sum(1)
    hashed = (batch["numbers"] * 1e3).astype(jnp.int32) % params["hashed"].shape[0]
    vectors = bags + 3 * params["hashed"].astype(jnp.bfloat16)[hashed].astype(jnp.float32)
    vectors *= 1 + jnp.take(params["bias"], batch["bags"][:, 0], mode="clip")[:, None]
    vectors += params["bags"][batch["more"]]  # negative ones count from the end
    out = jnp.tanh(vectors) @ params["dense"]
    return jnp.mean((out[:, 0] - batch["numbers"]) ** 2), {"first": out[0, 0]}


def params_of(rows=11, dim=3, seed=0):
    key = jax.random.key(seed)
    normal = lambda n, *shape: jax.random.normal(jax.random.fold_in(key, n), shape)
    return {
        "bags": normal(0, rows, dim),
        "hashed": normal(1, 5, dim),
        "bias": normal(2, rows),
        "dense": normal(3, dim, 1),
    }


def batch_of(rng, size=6, rows=11, ids=None):
    ids = rng.integers(-3, rows + 3, (size, 4)) if ids is None else np.broadcast_to(ids, (size, 4))
    bags = np.where(rng.random((size, 4)) < 0.4, -99, ids)
    return {
        "bags": bags.astype(np.int32),
        "more": rng.integers(-rows, rows, size).astype(np.int16),
        "numbers": rng.random(size, np.float32),
    }


def largest_difference(a, b):
    same = lambda x, y: float(jnp.abs(x - y).max()) if jnp.issubdtype(x.dtype, jnp.inexact) else float((x != y).any())
    leave_keys = lambda state: dataclasses.replace(state, rng=jnp.zeros(()))
    return max(jax.tree.leaves(jax.tree.map(same, leave_keys(a), leave_keys(b))))


@pytest.mark.parametrize(
    ("name", "rows", "one_row"),
    [("sgd", 11, False), ("adagrad", 2, False), ("by the global norm", 11, True), ("clipped", 2, True)],
)
def test_three_steps_over_rows_equal_those_over_whole_tables(name, rows, one_row):
    check_three_steps(rows, name, rows, one_row)


@pytest.mark.exhaustive
@settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(st.integers(0, 2**16), st.sampled_from(sorted(EXACT)), st.sampled_from((2, 11)), st.booleans())
def test_three_steps_over_any_rows_equal_those_over_whole_tables(seed, name, rows, one_row):
    check_three_steps(seed, name, rows, one_row)


def check_three_steps(seed, name, rows, one_row):
    rng = np.random.default_rng(seed)
    step = autoshard.TrainStep(loss_fn, EXACT[name])
    whole = over_rows = step.init(params_of(rows, seed=seed))
    make = lambda: batch_of(rng, 5, rows, ids=rng.integers(rows) if one_row else None)
    sparse = sparse_step(step, whole, make())
    assert [t.path for t in sparse.tables] == ["bags", "bias", "hashed"]
    for _ in range(3):
        batch = make()
        whole, metrics = step(whole, batch)
        over_rows, its = sparse(over_rows, batch)
        assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-5, atol=1e-6), metrics, its))
    assert largest_difference(whole, over_rows) < 1e-5


def test_a_loss_without_rng_and_aux_is_cut_too():
    step = autoshard.TrainStep(lambda params, batch: loss_fn(params, batch, None)[0], EXACT["adagrad"])
    state, batch = step.init(params_of()), batch_of(np.random.default_rng(0))
    (whole, _), (over_rows, metrics) = step(state, batch), sparse_step(step, state, batch)(state, batch)
    assert largest_difference(whole, over_rows) < 1e-5 and list(metrics) == ["loss"]


@pytest.mark.parametrize("name", sorted(LAZY))
def test_a_lazy_update_is_that_of_whole_tables_where_rows_are_read_and_nothing_elsewhere(name):
    rows = 6
    step = autoshard.TrainStep(lambda p, b, _: (jnp.mean((p["t"][b["ids"]] - b["y"]) ** 2), None), LAZY[name])
    state = step.init({"t": jnp.arange(2.0 * rows).reshape(rows, 2) / rows})
    batch = {"ids": np.array([1, 4, 1], np.int32), "y": np.ones((3, 2), np.float32)}
    with pytest.raises(TraceError, match="lazy=True"):
        sparse_step(step, state, batch)
    sparse = sparse_step(step, state, batch, lazy=True)
    whole, over_rows = state, state
    for _ in range(3):
        whole, over_rows = step(whole, batch)[0], sparse(over_rows, batch)[0]
    read, others = np.array([1, 4]), np.array([0, 2, 3, 5])
    np.testing.assert_allclose(over_rows.params["t"][read], whole.params["t"][read], rtol=1e-6)
    np.testing.assert_array_equal(over_rows.params["t"][others], state.params["t"][others])
    assert int(over_rows.step) == 3


@pytest.mark.parametrize("name", sorted(EXACT | LAZY))
def test_what_is_proven_of_rows_without_a_gradient_is_what_happens_to_them(name):
    step = autoshard.TrainStep(loss_fn, (EXACT | LAZY)[name])
    state = step.init(params_of())
    rng = np.random.default_rng(0)
    some = lambda x: x + jnp.asarray(rng.random(x.shape), x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    state = dataclasses.replace(state, opt_state=jax.tree.map(some, state.opt_state))
    batch = {"bags": np.full((2, 4), 7, np.int32), "more": np.full(2, 7, np.int16), "numbers": np.ones(2, np.float32)}
    tables = find_tables(step, state, batch).tables
    update = row_updates(step, state, tables, is_lazy=True)
    before, after = jax.tree.leaves(state), jax.tree.leaves(step(state, batch)[0])
    moved = {
        x.path for x in update.leaves if (before[x.index][:3] != after[x.index][:3]).any() and "hashed" not in x.path
    }
    assert moved == {path for path in update.changes_untouched if "hashed" not in path}


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (optax.adafactor(0.1, min_dim_size_to_factor=2), "brings all of them together"),
        (optax.lamb(0.1), "brings all of them together"),
        (optax.noisy_sgd(0.1, key=0), "random numbers"),
        (optax.apply_if_finite(optax.sgd(0.1), 3), "inside a `cond`"),
        (
            optax.chain(optax.stateless(lambda u, _: jax.tree.map(lambda g: g - g.mean(0), u)), optax.sgd(0.1)),
            "number of",
        ),
        (optax.chain(optax.stateless(lambda u, _: jax.tree.map(lambda g: g[::-1], u)), optax.sgd(0.1)), "rows"),
    ],
    ids=["adafactor", "lamb", "noise", "cond", "mean", "reversed"],
)
def test_an_update_that_couples_rows_is_refused_with_its_line(optimizer, why):
    step = autoshard.TrainStep(loss_fn, optimizer)
    state = step.init(params_of())
    with pytest.raises(TraceError, match=why) as caught:
        sparse_step(step, state, batch_of(np.random.default_rng(0)), lazy=True)
    assert ".py:" in str(caught.value) or "adafactor" not in str(caught.value)


def test_a_module_with_state_of_its_own_is_cut_too():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed, self.norm = nnx.Embed(20, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, ids):
            return self.norm(self.embed(ids))

    step = autoshard.TrainStep(lambda m, b, _: (jnp.mean((m(b["ids"]) - b["y"]) ** 2), None), optax.adagrad(0.1))
    whole = over_rows = step.init(Model(nnx.Rngs(0)))
    batch = {"ids": np.array([3, 3, 19, 0], np.int32), "y": np.ones((4, 4), np.float32)}
    sparse = sparse_step(step, whole, batch)
    for _ in range(2):
        whole, over_rows = step(whole, batch)[0], sparse(over_rows, batch)[0]
    assert largest_difference(whole, over_rows) < 1e-6
    assert "20 rows of float32[4]" in str(sparse) and "test_sparse_step.py" in str(sparse)


def test_what_looks_like_a_table_and_is_none_is_told_with_the_reason():
    def loss(params, batch, rng):
        x = params["tied"][batch["ids"]] + params["noisy"][jax.random.randint(rng, (4,), 0, 8)]
        x += params["own"][jnp.argmax(params["own"], axis=0)[:2].sum() + batch["ids"]]
        x += params["columns"][batch["ids"], batch["ids"] % 2][:, None] + params["fine"][batch["ids"]]
        return jnp.mean(x @ params["tied"].T), None

    step = autoshard.TrainStep(loss, optax.sgd(0.1))
    names = ("tied", "noisy", "own", "columns", "fine", "unread")
    state = step.init({name: jnp.ones((8, 2)) for name in names})
    batch = {"ids": np.zeros(4, np.int32)}
    found = find_tables(step, state, batch)
    assert [t.path for t in found.tables] == ["fine"]
    why = {r.path: r.why for r in found.refused}
    assert "tied output weights" in why["tied"] and "test_sparse_step.py" in why["tied"]
    assert "random numbers" in why["noisy"] and "parameters" in why["own"] and "whole rows" in why["columns"]
    with pytest.raises(TraceError, match="tied output weights"):
        sparse_step(step, state, batch, tables=["tied"])


def test_a_loss_that_looks_up_otherwise_than_it_did_is_refused():
    fits = [True]
    loss = lambda p, b, _: (p["t"][b["ids"]].sum() + (0 if fits[0] else p["t"].sum()), None)
    step = autoshard.TrainStep(loss, optax.sgd(0.1))
    state, batch = step.init({"t": jnp.ones((8, 2))}), {"ids": np.zeros(4, np.int32)}
    sparse = sparse_step(step, state, batch)
    fits[0] = False
    with pytest.raises(PlanMismatchError, match="`t`"):
        sparse(state, batch)


POOLS = {
    "sum": lambda rows, ids, _: jnp.where((ids >= 0)[..., None], rows, 0).sum(1),
    "mean": lambda rows, ids, _: jnp.where((ids >= 0)[..., None], rows, 0).sum(1) / ((ids >= 0).sum(1)[:, None] + 1),
    "weighted": lambda rows, ids, weights: jnp.einsum("bl,bld->bd", weights, rows),
    "of squares": lambda rows, ids, weights: (jnp.square(rows) * weights[..., None]).sum(1),
    "largest": lambda rows, ids, weights: jnp.tanh(rows).max(1),
    "sum and first": lambda rows, ids, weights: rows.sum(1) + rows[:, 0],
}
BY_TABLE = {
    "adagrad": optax.adagrad(optax.linear_schedule(0.5, 0.1, 3)),
    "clipped": optax.chain(optax.clip(0.01), optax.sgd(0.5)),
    "adam": optax.adam(0.1),
}
PER_PARAMETER = BY_TABLE | {
    "lamb": optax.multi_transform(
        {"dense": optax.lamb(0.1), "rows": optax.adagrad(0.1)},
        lambda params: {name: "rows" if name in ("bags", "other") else "dense" for name in params},
    )
}


def pooled_step(pool, optimizer):
    """A loss that pools one table, and reads a row of another; its state; and what draws batches, some bags empty."""

    def loss_fn(params, batch, _):
        sums = pool(params["bags"][jnp.maximum(batch["ids"], 0)], batch["ids"], batch["weights"])
        out = jnp.tanh(sums * params["other"][batch["ids"][:, 0] % 5]) @ params["dense"]
        return jnp.mean((out[:, 0] - batch["weights"][:, 0]) ** 2), None

    def draw(rng, one_row=False):
        ids = np.full((6, 4), 3) if one_row else rng.integers(0, 11, (6, 4))
        ids = np.where(rng.random((6, 4)) < 0.4, -1, ids)
        ids[0] = -1
        return {"ids": ids.astype(np.int32), "weights": rng.random((6, 4), np.float32)}

    params = params_of()
    step = autoshard.TrainStep(loss_fn, optimizer)
    return step, step.init({"bags": params["bags"], "other": params["hashed"], "dense": params["dense"]}), draw


def crossed(optimizers, others):
    """Every optimizer with all others; in every run each of the longer ones once, with all of the shorter in turn."""
    count = max(len(optimizers), len(others))
    often = {(n % len(optimizers), n % len(others)) for n in range(count)}
    return [
        pytest.param(optimizer, other, marks=[] if (a, b) in often else pytest.mark.exhaustive)
        for a, optimizer in enumerate(optimizers)
        for b, other in enumerate(others)
    ]


@pytest.mark.parametrize(("optimizer", "pool"), crossed(BY_TABLE, POOLS))
def test_three_steps_with_sums_of_the_host_equal_those_over_rows(pool, optimizer):
    rng = np.random.default_rng(0)
    step, state, draw = pooled_step(POOLS[pool], BY_TABLE[optimizer])
    over_rows, over_sums = (sparse_step(step, state, draw(rng), lazy=True, pooled=p) for p in ((), ("bags",)))
    assert over_sums.batch["values"][0].shape == (6, 3) and len(over_sums.batch["positions"]) == 1
    one, other = state, state
    for number in range(3):
        batch = draw(rng, one_row=number == 1)
        one, metrics = over_rows(one, batch)
        other, its = over_sums(other, batch)
        np.testing.assert_allclose(metrics["loss"], its["loss"], rtol=1e-5)
    assert largest_difference(one, other) < 1e-5


def projected_step(optimizer):
    """A loss that projects sums of one table beside rows of another; its state; and what draws batches."""

    def loss_fn(params, batch, _):
        sums = jnp.where((batch["ids"] >= 0)[..., None], params["bags"][jnp.maximum(batch["ids"], 0)], 0).sum(1)
        joined = jnp.concatenate([sums, params["other"][batch["ids"][:, 0] % 5]], -1)
        narrow = jnp.tanh(joined @ params["project"] + params["shift"]) @ params["more"]
        return jnp.mean(((narrow @ params["dense"])[:, 0] - batch["weights"][:, 0]) ** 2), None

    _, state, draw = pooled_step(POOLS["sum"], optimizer)
    normal = lambda n, *shape: jax.random.normal(jax.random.key(n), shape)
    # no wide weights: where tanh is saturated a gradient is a rounding error, of which Adam makes a whole step
    project, dense = normal(0, 6, 4) / 4, normal(3, 2, 1) / 2
    more = {"project": project, "shift": normal(1, 4), "more": normal(2, 4, 2), "dense": dense}
    step = autoshard.TrainStep(loss_fn, optimizer)
    return step, step.init(state.params | more), draw


CUTS = ("project",), ("project", "shift"), ("project", "shift", "more")


@pytest.mark.parametrize(("optimizer", "layers"), crossed(PER_PARAMETER, CUTS), ids=str)
def test_three_steps_with_layers_at_the_host_equal_those_over_rows(layers, optimizer):
    rng = np.random.default_rng(0)
    step, state, draw = projected_step(PER_PARAMETER[optimizer])
    over_rows, at_host = (sparse_step(step, state, draw(rng), lazy=True, host_layers=own) for own in ((), layers))
    assert [x.shape for x in at_host.batch["values"]] == [(6, 2 if "more" in layers else 4)]
    assert all(jax.tree.leaves(at_host.state.params[name])[0].size == 1 for name in layers)
    one, other = state, state
    for number in range(3):
        batch = draw(rng, one_row=number == 1)
        one, metrics = over_rows(one, batch)
        other, its = at_host(other, batch)
        np.testing.assert_allclose(metrics["loss"], its["loss"], rtol=1e-5)
    assert largest_difference(one, other) < 1e-5


def test_pooling_is_refused_where_rows_or_gradients_are_needed_elsewhere():
    def joined_before(params, batch, _):
        rows = params["bags"][batch["ids"]] * params["other"][batch["ids"] % 5]
        return jnp.mean((rows.sum(1) @ params["dense"]) ** 2), None

    def read_twice(params, batch, _):
        rows = params["bags"][batch["ids"]]
        return jnp.mean((rows.sum(1) @ params["dense"]) ** 2) + jnp.mean(rows[:, 0] * params["dense"][:, 0]), None

    def not_less(params, batch, _):
        return jnp.mean((jnp.tanh(params["bags"][batch["ids"]]) @ params["dense"]) ** 2), None

    step, state, draw = pooled_step(POOLS["sum"], optax.sgd(0.1))
    batch = draw(np.random.default_rng(0))
    for loss in (joined_before, read_twice, not_less):
        with pytest.raises(TraceError, match=r"`bags`, .*`(mul|dot_general)` at .*test_sparse_step.py"):
            sparse_step(dataclasses.replace(step, loss_fn=loss), state, batch, pooled=["bags"])
    of = lambda name, by: lambda grads, params=None: grads | {name: grads[name] * jnp.abs(grads[by]).max()}
    for name, by, told in (
        ("bags", "dense", "of `params.bags` needs gradients of other parameters"),
        ("dense", "project", "of `params.dense` needs what the host has"),
    ):
        coupled = optax.chain(optax.stateless(of(name, by)), optax.sgd(0.1))
        with pytest.raises(TraceError, match=told):
            projected, own, draw = projected_step(coupled)
            sparse_step(projected, own, draw(np.random.default_rng(0)), host_layers=["project"])
