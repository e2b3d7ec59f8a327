"""Steps one of whose ranks is slow, by a trace of times: what is said, what is done, and what stays as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from slow_rank import FROM, RANKS, SLOW, UNTIL, Trace

from autoshard import Balance, Plan, baselines
from autoshard.errors import ConfigError
from autoshard.plans.apply import check
from autoshard.plans.balanced import units_of
from autoshard.train.config import StragglersSection
from autoshard.train.metrics import StragglerReport
from autoshard.train.stragglers import Stragglers
from autoshard.train.unit_scores import UnitScores

STEPS = 50
WIDTH, HIDDEN = 16, 128


OPTIMIZER = optax.adam(1e-2)


def init(seed):
    up, down = jax.random.split(jax.random.key(seed))
    params = {
        "up": jax.random.normal(up, (WIDTH, HIDDEN)) / 4,
        "down": jax.random.normal(down, (HIDDEN, WIDTH)) / 11,
    }
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


def step(state, x):
    loss = lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2)
    value, gradients = jax.value_and_grad(loss)(state["params"])
    updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value


X = np.random.default_rng(0).standard_normal((32, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def plan() -> Plan:
    shapes = jax.eval_shape(init, 0), jax.ShapeDtypeStruct(X.shape, X.dtype)
    made = baselines.megatron(step, *shapes, mesh={"tensor": RANKS})
    assert isinstance(made, Plan)
    return made


def watched_run(plan: Plan, section: StragglersSection):
    """(states by units, shares, reports) of steps that are watched."""
    balance = Balance(
        mode=section.mode, priority=section.priority, absorbs=4.0, tile=1, max_loss_share=section.max_loss_share
    )
    run = plan.jit(step, balance=balance)
    reports: list[StragglerReport] = []
    state, shapes = init(0), (jax.eval_shape(init, 0), X)
    watched = Stragglers(section, plan, run, step, shapes, reports.append, times=Trace())
    states, shares = [], []
    for number in range(1, STEPS + 1):
        state, _ = run(state, X)
        watched.after_step(number, 0.1, state)
        states.append(jax.tree.map(np.asarray, run.balance.by_units(state)["params"]))
        shares.append(run.balance.shares())
    return states, shares, reports


def test_a_slow_rank_is_named_gives_work_away_and_gets_it_back(plan):
    states, shares, reports = watched_run(plan, StragglersSection(mode="migrate"))
    named = next(r for r in reports if r.slow)
    assert [rank for rank, _ in named.slow] == [SLOW] and named.slow[0][1] == pytest.approx(4.0, rel=0.1)
    assert FROM + 3 <= named.step <= FROM + 4
    assert "moved" in named.done and named.after_s < named.before_s
    assert (
        f"rank {SLOW} of `tensor` is {named.slow[0][1]:.1f} times slower" in named.line()
        and named.record()["kind"] == "straggler"
    )
    assert shares[FROM - 2] == shares[-1] == pytest.approx((1 / RANKS,) * RANKS)
    during = shares[UNTIL - 1]
    assert during[SLOW] < 0.05 and sum(during) == pytest.approx(1.0)
    assert any("measured since" in r.done for r in reports)
    state, run = init(0), jax.jit(step)
    for own in states:
        state, _ = run(state, X)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), state["params"], own)


def test_units_left_out_stay_as_they_are_and_every_one_is_visited(plan):
    states, shares, reports = watched_run(plan, StragglersSection(mode="resize", priority="change", max_loss_share=0.5))
    assert any("left out" in r.done for r in reports) and not any("moved" in r.done for r in reports)
    assert shares[UNTIL - 1][SLOW] == pytest.approx(0.5 / RANKS) and sum(shares[-1]) == pytest.approx(1.0)
    own = slice(SLOW * HIDDEN // RANKS, (SLOW + 1) * HIDDEN // RANKS)
    moved = [
        np.any(new["down"] != old["down"], axis=1) & np.any(new["up"] != old["up"], axis=0)
        for old, new in zip(states, states[1:], strict=False)
    ]
    during = np.asarray(moved[FROM + 5 : UNTIL - 1])
    assert (during[:, own].sum(axis=1) == HIDDEN // RANKS // 2).all()
    assert np.delete(during, np.r_[own], axis=1).all()


def test_scores_are_sums_over_all_that_a_unit_has(plan):
    run = plan.jit(step, balance=Balance(mode="migrate"))
    state = init(0)
    shapes = jax.eval_shape(init, 0), X
    graph = check(plan, step, shapes).graph
    assert len(units_of(plan, graph).found) == 1
    scores = UnitScores("change", run.balance.rooms, graph, run.mesh)
    assert scores.of(state) == [None]
    new = jax.tree.map(lambda x: x, step(state, X)[0])
    (found,) = scores.of(new)
    change = {k: np.abs(new["params"][k] - state["params"][k]) for k in ("up", "down")}
    np.testing.assert_allclose(found, change["up"].sum(axis=0) + change["down"].sum(axis=1), rtol=1e-4)
    (found,) = UnitScores("gradient", run.balance.rooms, graph, run.mesh).of(new)
    mean = {k: np.abs(new["opt_state"][0].mu[k]) for k in ("up", "down")}
    np.testing.assert_allclose(found, mean["up"].sum(axis=0) + mean["down"].sum(axis=1), rtol=1e-4)


def test_a_rank_that_is_not_there_cannot_be_slowed(plan):
    """Which is told before the first step, and not when the emulation begins."""
    section = StragglersSection(mode="migrate", emulate={RANKS: 2.0}, emulate_from=50)
    run = plan.jit(step, balance=Balance(mode="migrate", can_be_slowed=True))
    with pytest.raises(ConfigError, match="0 to 7"):
        Stragglers(section, plan, run, step, (jax.eval_shape(init, 0), X), print, times=Trace())
