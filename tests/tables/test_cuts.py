"""Where a loss can be cut: against every value of small random programs, and by hand."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import autoshard
from autoshard.tables import find_cuts
from autoshard.tables.cuts import cuts_in
from autoshard.tables.find import found_in
from autoshard.tables.traced_loss import trace_loss

DIM, EXAMPLES = 4, 6
TABLES, DENSE = ("t0", "t1"), ("w0", "w1", "w2")
KINDS = ("add", "concatenate", "project", "shift", "sum", "by random", "by state")


def random_loss(drawn):
    """A loss of up to eight operations, each on one or two earlier values; those that nobody reads are added up."""

    def loss_fn(params, state, batch, rng):
        values = [params[name][batch["ids"]] for name in TABLES] + [params["top"][None] * batch["x"][:, None]]
        read = set()
        for kind, first, second, dense in drawn:
            a, b = first % len(values), second % len(values)
            x, y = values[a], values[b]
            read.add(a)
            if kind == "add":
                read.add(b)
                width = min(x.shape[-1], y.shape[-1])
                made = x.reshape(-1, x.shape[-1])[:EXAMPLES, :width] + y.reshape(-1, y.shape[-1])[:EXAMPLES, :width]
            elif kind == "concatenate":
                read.add(b)
                flat = [v.reshape(-1, v.shape[-1])[:EXAMPLES] for v in (x, y)]
                made = jnp.concatenate(flat, -1)
            elif kind == "project":
                made = x @ params[DENSE[dense]][: x.shape[-1]]
            elif kind == "shift":
                made = x + params[DENSE[dense]][0, 0]
            elif kind == "sum":
                made = x.sum(1) if x.ndim == 3 else x
            elif kind == "by random":
                made = x * jax.random.normal(rng, ())
            else:
                made = x * state["scale"]
            values.append(made)
        ends = [v.sum() for i, v in enumerate(values) if i not in read]
        return sum(ends) + params["top"].sum(), (state, None)

    step = autoshard.TrainStep(loss_fn, optax.sgd(0.1), has_mutable=True)
    params = {name: jnp.ones((9, DIM)) for name in TABLES} | {name: jnp.ones((64 * DIM, 2)) for name in DENSE}
    state = step.init(params | {"top": jnp.ones(DIM)}, mutable={"scale": jnp.ones(())})
    return step, state, {"ids": jnp.zeros((EXAMPLES, 3), jnp.int32), "x": jnp.ones(EXAMPLES)}


def reached(jaxpr, start, without=None):
    """Values that depend on some, not by way of one of them."""
    found = set(start)
    for equation in jaxpr.eqns:
        if any(not hasattr(v, "val") and v in found for v in equation.invars):
            found.update(v for v in equation.outvars if v is not without)
    return found


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 20), st.integers(0, 20), st.integers(0, 2)), max_size=8
)


@settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.generate])
@given(drawn=OPERATIONS)
def test_cuts_are_the_smallest_values_through_which_all_passes(drawn):
    """By brute force: without a cut nothing of its parameters reaches the end, and no such value is better."""
    step, state, batch = random_loss(drawn)
    loss = trace_loss(step, state.params, state.mutable, batch, step.key(state))
    jaxpr = loss.closed.jaxpr
    names = dict(zip(loss.params, loss.paths, strict=True))
    ends = {v for v in jaxpr.outvars if not hasattr(v, "val")}
    never = set(jaxpr.invars) - set(loss.params) - set(loss.batch)
    all_values = [v for e in jaxpr.eqns for v in e.outvars if not isinstance(v, jax.extend.core.DropVar)]
    separating = {}
    for v in all_values:
        made_of = {u for u in (*loss.params, *never) if v in reached(jaxpr, [u])}
        own = made_of & set(loss.params)
        if made_of & never or not own or reached(jaxpr, own, without=v) & ends or v not in upstream(jaxpr, ends):
            continue
        separating.setdefault(frozenset(names[u] for u in own), []).append(v)
    found = {frozenset((*at.cut.names[0], *at.cut.names[1])): at for at in cuts_in(loss, found_in(loss).readings)}
    for own, at in found.items():
        assert at.value in separating[own]
        assert at.cut.size_bytes == min(v.aval.size * v.aval.dtype.itemsize for v in separating[own] if v.aval.shape)
        assert at.cut.size_bytes < at.cut.read_bytes
    for (a, x), (b, y) in itertools.combinations(found.items(), 2):
        assert not a & b or a < b or b < a
        if a < b:
            assert y.cut.size_bytes <= x.cut.size_bytes + sum(t.num_ids * t.row_bytes for t in y.cut.tables)
    smallest = lambda own: min(v.aval.size * v.aval.dtype.itemsize for v in separating[own] if v.aval.shape)
    for own in separating:
        tables = [t for t in found_in(loss).tables.tables if t.path in own]
        if len(tables) == 1 and len(own) == 1 and any(v.aval.shape for v in separating[own]):
            assert (own in found) == (smallest(own) < tables[0].num_ids * tables[0].row_bytes)


def upstream(jaxpr, ends):
    """Values that the end is made of."""
    found = set(ends)
    for equation in reversed(jaxpr.eqns):
        if found.intersection(equation.outvars):
            found.update(v for v in equation.invars if not hasattr(v, "val"))
    return found


def tower(params, batch, _):
    wide = jnp.take(params["wide"], batch["ids"], axis=0, mode="clip").sum(1)
    joined = jnp.concatenate([wide, params["other"][batch["ids"][:, 0]]], -1)
    narrow = jax.nn.relu(joined @ params["kernel"] + params["bias"])
    return jnp.mean(narrow @ params["top"]), None


def tower_step(**more):
    step = autoshard.TrainStep(tower, optax.sgd(0.1))
    params = {"wide": jnp.ones((100, 16)), "other": jnp.ones((100, 8)), "kernel": jnp.ones((24, 5))}
    state = step.init(params | {"bias": jnp.ones(5), "top": jnp.ones((5, 1))})
    return step, state, {"ids": np.zeros((10, 7), np.int32)} | more


def test_the_chain_of_a_tower_by_hand():
    """Seven rows of 16 numbers an example are summed, joined with one of 8, and projected to 5."""
    cuts = find_cuts(*tower_step())
    assert [cut.names for cut in cuts.cuts] == [
        (("wide",), ()),
        (("other", "wide"), ("kernel",)),
        (("other", "wide"), ("bias", "kernel")),
    ]
    assert [cut.size_bytes for cut in cuts.cuts] == [10 * 16 * 4, 10 * 5 * 4, 10 * 5 * 4]
    assert [cut.read_bytes for cut in cuts.cuts] == [10 * 7 * 16 * 4, *[10 * 7 * 16 * 4 + 10 * 8 * 4] * 2]
    assert [cut.param_bytes for cut in cuts.cuts] == [0, 24 * 5 * 4, 24 * 5 * 4 + 5 * 4]
    summed, projected, shifted = cuts.cuts
    assert projected.flops - summed.flops == pytest.approx(2 * 10 * 24 * 5, rel=0.05)  # ids are few operations besides
    assert shifted.flops - projected.flops == 10 * 5
    assert cuts.chain("other") == cuts.cuts[1:] and cuts.chain("wide") == cuts.cuts
    assert "`dot_general` at" in str(cuts) and "480 B of parameters: `kernel`" in str(cuts)


def test_what_is_read_elsewhere_or_is_random_is_in_no_cut():
    step, state, batch = tower_step()

    def tied(params, batch, rng):
        return tower(params, batch, rng)[0] + params["kernel"].sum(), None

    def noisy(params, batch, rng):
        return tower(params | {"bias": params["bias"] * jax.random.normal(rng, (5,))}, batch, rng)

    def last(params, batch, rng):
        return tower(params | {"top": jnp.ones((5, 1))}, batch, rng)

    paths = lambda fn: [cut.names[1] for cut in find_cuts(autoshard.TrainStep(fn, optax.sgd(0.1)), state, batch).cuts]
    assert paths(tied) == [()]  # the kernel stays, where it is read again
    assert paths(noisy) == [(), ("kernel",)]
    assert paths(last) == [(), ("kernel",)]  # behind the bias nothing is left for the devices
