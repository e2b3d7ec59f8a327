"""`autoshard.plan` as users call it: meshes, budgets, reports, and refusals in words."""

import dataclasses
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard import PlanOptions
from autoshard.errors import ClusterError, FileFormatError, MemoryBudgetError, MeshError, PlanMismatchError

MESH = {"data": 2, "tensor": 4}


def settled(plan):
    """A plan without what the clock decides."""
    return dataclasses.replace(plan, certificate=dataclasses.replace(plan.certificate, solve_s=0.0))


def test_the_best_mesh_wins(plan, train, shapes, cluster):
    assert len(plan.candidates) >= 2
    alone = [
        autoshard.plan(train, *shapes(), cluster=cluster, donate_argnums=0, mesh=dict(c.axes)).estimate.step_s
        for c in plan.candidates
    ]
    assert plan.estimate.step_s <= min(alone) * (1 + 2 * PlanOptions().relative_gap)
    assert plan.certificate.bound <= min(alone) * (1 + 1e-9)
    assert plan.certificate.objective == pytest.approx(plan.estimate.step_s)


def test_equal_inputs_give_equal_plans(train, shapes, cluster):
    first, second = (autoshard.plan(train, *shapes(), cluster=cluster, mesh=MESH) for _ in range(2))
    assert settled(first) == settled(second)


def test_budgets_are_obeyed_and_cost_time(train, shapes, cluster):
    make = lambda budget: autoshard.plan(
        train, *shapes(512), cluster=cluster, mesh=MESH, donate_argnums=0, memory_budget_bytes=budget
    )
    free = make(math.inf)
    assert free.budget_bytes is None
    with pytest.raises(MemoryBudgetError) as caught:
        make(1000.0)
    least = int(re.search(r"memory_budget_bytes=(\d+)", str(caught.value)).group(1))
    assert 1000 < least <= math.ceil(free.estimate.peak_bytes)
    assert "The peak is at" in str(caught.value) and "data=2, tensor=4" in str(caught.value)
    before = free.estimate.step_s
    for budget in (0.5 * (least + free.estimate.peak_bytes), least):
        limited = make(budget)
        assert limited.estimate.peak_bytes <= budget * (1 + 1e-9)
        assert limited.estimate.step_s >= before * (1 - PlanOptions().relative_gap)
        before = limited.estimate.step_s
    with pytest.raises(MemoryBudgetError):
        make(0.9 * least)


def test_donation_saves_memory(cluster):
    """The new version of a donated array takes over its buffer: 4 kB on each of 8 devices instead of 8."""
    w = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    kept, donated = (
        autoshard.plan(lambda w: w * 2, w, cluster=cluster, mesh={"data": 8}, donate_argnums=d) for d in ((), 0)
    )
    assert (kept.estimate.peak_bytes, donated.estimate.peak_bytes) == (8192, 4096)
    assert (kept.donate_argnums, donated.donate_argnums) == ((), (0,))


@pytest.mark.parametrize("budget", [0, -1.0, math.nan])
def test_budgets_that_mean_nothing_are_refused(budget, train, shapes, cluster):
    with pytest.raises(MemoryBudgetError, match="positive number of bytes"):
        autoshard.plan(train, *shapes(), cluster=cluster, mesh=MESH, memory_budget_bytes=budget)


def test_a_budget_in_gigabytes_is_told_how_many_bytes_it_is(train, shapes, cluster):
    with pytest.raises(MemoryBudgetError, match=r"counts bytes: for 24 GB, give 24e9"):
        autoshard.plan(train, *shapes(), cluster=cluster, mesh=MESH, memory_budget_bytes=24)


@pytest.mark.parametrize("mesh", [{"data": 4}, {"data": 3, "tensor": 3}, {}, {"data": 8, "tensor": 0}])
def test_meshes_that_do_not_fit_are_refused(mesh, train, shapes, cluster):
    with pytest.raises(MeshError):
        autoshard.plan(train, *shapes(), cluster=cluster, mesh=mesh)


def test_one_axis_may_have_one_device(train, shapes, cluster):
    wide = autoshard.plan(train, *shapes(), cluster=cluster, mesh={"data": 8, "tensor": 1})
    narrow = autoshard.plan(train, *shapes(), cluster=cluster, mesh={"data": 8})
    assert wide.estimate.step_s == pytest.approx(narrow.estimate.step_s, rel=2 * PlanOptions().relative_gap)


def test_clusters_are_taken_in_every_form(train, shapes, cluster, tmp_path):
    path = tmp_path / "cluster.yaml"
    cluster.to_file(path)
    plans = [autoshard.plan(train, *shapes(), cluster=c, mesh=MESH) for c in (cluster, path, str(path), None)]
    assert [p.device for p in plans[:3]] == [plans[0].device] * 3
    assert settled(plans[0]) == settled(plans[1]) == settled(plans[2])
    assert plans[3].num_devices == 8, "the live devices"
    with pytest.raises((FileFormatError, ClusterError), match="nowhere"):
        autoshard.plan(train, *shapes(), cluster=tmp_path / "nowhere.yaml")


def test_unlike_devices_are_refused(train, shapes):
    mixed = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "a100x8_h100x8.yaml"
    with pytest.raises(ClusterError, match="devices of one kind"):
        autoshard.plan(train, *shapes(), cluster=mixed)


def test_progress_is_told_in_order(train, shapes, cluster):
    told = []
    autoshard.plan(train, *shapes(), cluster=cluster, options=PlanOptions(on_progress=told.append))
    stages = list(dict.fromkeys(p.stage.split()[0] for p in told))
    assert stages == ["trace", "group", "solve", "decode"]
    times = [p.elapsed_s for p in told]
    assert times == sorted(times)
    for p in told:
        if p.objective_s is not None and p.bound_s is not None:
            assert p.bound_s <= p.objective_s * (1 + 1e-9)


def test_what_cannot_be_split_is_reported(cluster):
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    mystery = jax.extend.core.Primitive("mystery")
    mystery.def_abstract_eval(lambda x: x)
    fn = lambda x: mystery.bind(jnp.sin(x)) * 2
    plan = autoshard.plan(fn, f32(8, 8), cluster=cluster, mesh=MESH)
    assert any("mystery at" in w and "kept whole" in w for w in plan.warnings)


def test_dimensions_that_no_axis_divides_are_reported(cluster):
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    odd = autoshard.plan(lambda w: w * 2, f32(999, 333), cluster=cluster, mesh=MESH)
    (kept,) = odd.warnings
    assert kept.startswith("`w` with shape (999, 333), read at ")
    assert "dimension 0 (size 999) and 1 (size 333)" in kept and "such as 1000 and 336" in kept
    assert "warning: `w`" in odd.explain()

    def step(state, batch):  # a vocabulary, its moment, and a batch that is no input's successor
        loss = lambda table: (table[batch] ** 2).sum()
        moment = state["moment"] + jax.grad(loss)(state["table"])
        return {"table": state["table"] - moment, "moment": moment, "short": state["short"] + 1}

    state = {"table": f32(2053, 128), "moment": f32(2053, 128), "short": f32(197, 2048)}
    plan = autoshard.plan(step, state, jax.ShapeDtypeStruct((9,), jnp.int32), cluster=cluster, mesh=MESH)
    tables, batch = sorted(plan.warnings, reverse=True)
    assert "and 1 more with shape (2053, 128)" in tables and "0 (size 2053)" in tables and "such as 2056" in tables
    assert "`batch` with shape (9,)" in batch

    beside = lambda rows: {"table": f32(2053, 128), "rest": f32(rows, 128)}
    doubled = lambda state: jax.tree.map(lambda w: w * 2, state)
    one, other = (autoshard.plan(doubled, beside(2**n), cluster=cluster, mesh=MESH).warnings for n in (20, 23))
    assert len(one) == 1 and not other, "a table of less than a two-thousandth of the state is not worth the padding"


@pytest.mark.parametrize(
    ("kind", "examples", "is_told"), [("int32", 64, False), ("int32", 63, True), ("float32", 64, True)]
)
def test_positions_of_tokens_need_not_be_split_where_examples_are(kind, examples, is_told, cluster):
    """Tokens have one position more than a model reads; padding them would help nobody."""
    tokens = jax.ShapeDtypeStruct((4, examples, 8193), kind)
    fn = lambda tokens: (tokens[:, :, :-1] * tokens[:, :, 1:]).sum()
    assert bool(autoshard.plan(fn, tokens, cluster=cluster, mesh=MESH).warnings) == is_told


@pytest.mark.parametrize(
    ("steps", "examples", "told"), [(3, 64, ()), (30, 64, ()), (30, 63, ("dimension 1 (size 63)",))]
)
def test_steps_of_a_scan_are_no_batch(steps, examples, told, cluster):
    """Several updates in one call, each with a batch of its own: padding their number would be another program."""

    def update(w, x):
        value, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
        return w - 0.1 * gradient, value

    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((steps, examples, 64), jnp.float32)
    plan = autoshard.plan(lambda w, xs: jax.lax.scan(update, w, xs), *shapes, cluster=cluster, mesh=MESH)
    assert len(plan.warnings) == len(told)
    assert all(t in w and "`xs`" in w for t, w in zip(told, plan.warnings, strict=True))


@pytest.mark.parametrize(("donated", "returns_state"), [((0,), True), ((), True), ((), False)])
def test_a_state_that_is_donated_is_not_told_to_be(donated, returns_state, cluster):
    fn = lambda w, x: (w - (x @ w).mean(), None)[: 1 if returns_state else 0] or (x @ w).mean()
    shapes = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((8, 512), jnp.float32)
    with pytest.raises(MemoryBudgetError) as told:
        autoshard.plan(fn, *shapes, cluster=cluster, mesh=MESH, donate_argnums=donated, memory_budget_bytes=1e4)
    assert ("donate" in str(told.value)) == (returns_state and not donated)


def test_the_next_step_of_a_warning_is_on_the_first_screen(cluster):
    state = {"embedding_of_the_vocabulary": jax.ShapeDtypeStruct((50257, 128), jnp.float32)}
    fn = lambda state: jax.tree.map(lambda w: w * 2, state)
    plan = autoshard.plan(fn, state, cluster=cluster, mesh=MESH, donate_argnums=0)
    assert "such as 50260, to have it split." in " ".join(plan.explain().split())


def test_large_arrays_that_a_function_closes_over_are_reported():
    cluster = autoshard.Cluster.from_file("configs/clusters/h100x8.yaml")
    warnings_with = lambda positions: (
        autoshard.plan(lambda x: (x * positions[:8]).sum(), jnp.ones((8, 4096)), cluster=cluster, mesh=MESH).warnings
    )
    assert not warnings_with(jnp.ones((2**14, 4096)))  # 0.3 of 80 GB
    (warning,) = warnings_with(jnp.ones((2**16, 4096)))
    assert "closes over take 1.07 GB on every device" in warning
    assert "the largest is float32 (65536, 4096), read at " in warning


def changed_shapes(state, batch):
    return {
        **state,
        "params": {**state["params"], "down": {"kernel": jax.ShapeDtypeStruct((64, 8), jnp.float32)}},
    }, batch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed_shapes, "leaf 0 is planned as `state.params.down.kernel` float32\\[64, 16\\].*float32\\[64, 8\\]"),
        (lambda state, batch: (state, {**batch, "z": batch["x"]}), "leaf 6 is planned as nothing"),
        (
            lambda state, batch: ({"params": state["params"], "step": jax.ShapeDtypeStruct((), jnp.int16)}, batch),
            "leaf 3 is planned as `state.step` int32\\[\\].*int16",
        ),
    ],
)
def test_other_arguments_are_refused(change, message, plan, shapes):
    with pytest.raises(PlanMismatchError, match=message):
        plan.jit(lambda state, batch: (state, jnp.float32(0))).lower(*change(*shapes()))


def test_other_functions_are_refused(plan, train, shapes):
    def altered(state, batch):
        state, loss = train(state, batch)
        return state, jnp.sin(loss)

    with pytest.raises(
        PlanMismatchError, match=f"equation {len(plan.equations)} of {len(plan.equations)} was `nothing`.*`sin"
    ):
        plan.jit(altered).lower(*shapes())
    with pytest.raises(PlanMismatchError, match="equation 0 of .*was `.*now `cos.*test_make.py"):
        plan.jit(lambda state, batch: train(jax.tree.map(jnp.cos, state), batch)).lower(*shapes())
