"""Experts and tables that devices share out, and split sequences: where they are found, what is sent, by hand."""

import dataclasses
import math

import jax
import pytest
from autoshard_models import dlrm, moe
from autoshard_models.optimizers import adafactor, sgd
from autoshard_models.train_step import build
from baseline_programs import EMBED, H100X8, LAYERS, SEQUENCE, gpt

import autoshard
from autoshard import baselines
from autoshard.baselines import ALL, DataRule, Spread, Strategy, TensorRule
from autoshard.errors import LayoutError

MOE = dataclasses.replace(
    moe.PRESETS["tiny"], vocab_size=32, context_length=16, num_layers=1, embed_dim=32, hidden_dim=64
)
DLRM = dlrm.PRESETS["tiny"]
BATCH = 16


def subject_of(config, optimizer, shapes, cluster=H100X8):
    functions = build(config, optimizer)
    return baselines.prepare_subject(
        functions.step, jax.eval_shape(functions.init, 0), shapes, cluster=cluster, donate_argnums=0
    )


def moe_subject_of(config):
    tokens = jax.ShapeDtypeStruct((BATCH, config.context_length), "int32")
    return subject_of(config, adafactor(min_dim_size_to_factor=8), {"inputs": tokens, "targets": tokens})


@pytest.fixture(scope="module")
def moe_subject():
    return moe_subject_of(MOE)


@pytest.fixture(scope="module")
def dlrm_subject():
    return subject_of(DLRM, sgd(0.1), dlrm.batch_shapes(DLRM, 2 * BATCH))


def layouts(plan, part):
    return {a.name.removeprefix("state."): a.entries for a in plan.arguments if part in a.name and len(a.shape) > 1}


def sent(plan, kind, shape):
    return sum(c.count for c in plan.estimate.communication if c.kind == kind and c.shape == shape)


def test_each_device_has_its_experts_and_the_rest_whole(moe_subject):
    plan = baselines.plan_baseline(Strategy(DataRule.DDP, spread=Spread.EXPERTS), moe_subject)
    for name, entries in layouts(plan, ".params.").items():
        is_expert = name.endswith((".up", ".down"))
        assert entries == ((("data",) if is_expert else ()), *[()] * (len(entries) - 1)), name
    factored = layouts(plan, ".opt_state.")
    sums = {name: entries for name, entries in factored.items() if name.endswith(("experts.up", "experts.down"))}
    assert len(sums) == 4 and set(sums.values()) == {(("data",), ())}  # Adafactor's, by expert and row or column
    assert all(not any(entries) for name, entries in factored.items() if name not in sums)


def test_tokens_go_to_their_experts_and_back(moe_subject):
    """GShard: two all-to-alls forward, two backward; the answers are read once more for the routing's gradient."""
    plan = baselines.plan_baseline(Strategy(DataRule.DDP, spread=Spread.EXPERTS), moe_subject)
    places = MOE.num_experts * MOE.capacity(MOE.context_length) * BATCH * MOE.embed_dim
    exchanged = [c for c in plan.estimate.communication if c.kind == "all-to-all"]
    assert {math.prod(c.shape) for c in exchanged} == {places}
    assert 4 <= sum(c.count for c in exchanged) <= 5
    weights = {(MOE.num_experts, MOE.embed_dim, MOE.hidden_dim), (MOE.num_experts, MOE.hidden_dim, MOE.embed_dim)}
    assert not weights & {c.shape for c in plan.estimate.communication}  # neither gathered nor reduced


def test_experts_mix_with_zero_and_megatron(moe_subject):
    strategy = Strategy(DataRule.ZERO3, TensorRule.MEGATRON, Spread.EXPERTS)
    assert strategy.name == "zero3+experts+megatron"
    plan = baselines.plan_baseline(strategy, moe_subject, mesh={"data": 4, "tensor": 2})
    found = layouts(plan, ".params.")
    assert found["params.blocks.0.experts.up"][0] == found["params.blocks.0.experts.down"][0] == ("data",)
    for name, entries in found.items():
        used = {axis for entry in entries for axis in entry}
        if not name.endswith(".bias"):  # the heads' biases are whole where their norms cost more than they take
            assert used == ({"data"} if name.endswith("position_embed") else {"data", "tensor"}), name


def test_experts_that_do_not_divide_are_reported():
    subject = moe_subject_of(dataclasses.replace(MOE, num_experts=6))
    told = r"`state.params.blocks.0.experts.\w+` with shape \(6, .* dimension 0, which is no multiple of 8"
    with pytest.raises(LayoutError, match=told):
        baselines.plan_baseline(Strategy(DataRule.DDP, spread=Spread.EXPERTS), subject)


def test_tables_are_split_and_the_rest_whole(dlrm_subject):
    plan = baselines.plan_baseline(Strategy(DataRule.DDP, spread=Spread.TABLES), dlrm_subject)
    for name, entries in layouts(plan, "state.").items():
        used = {axis for entry in entries for axis in entry}
        assert used == ({"data"} if ".tables." in name or name.startswith("params.tables.") else set()), name
    tables = {(rows, DLRM.embed_dim) for rows in DLRM.table_rows}
    assert not tables & {c.shape for c in plan.estimate.communication}  # neither gathered nor reduced
    found = {c.shape for c in plan.estimate.communication if c.kind in ("all-to-all", "reduce-scatter", "all-gather")}
    assert (2 * BATCH, DLRM.embed_dim) in found  # what is looked up travels


def test_tables_are_split_alike_by_rows_or_by_columns():
    """Sparse tables, where all that is large lies alike; by rows, ids are exchanged."""
    config = dataclasses.replace(DLRM, table_rows=(1 << 20, 1 << 19, 10), embed_dim=64)
    subject = subject_of(config, sgd(0.1), dlrm.batch_shapes(config, 1 << 18))
    for spread, layout in ((Spread.ROWS, (("data",), ())), (Spread.COLUMNS, ((), ("data",)))):
        plan = baselines.plan_baseline(Strategy(DataRule.DDP, spread=spread), subject)
        tables = [v for name, v in layouts(plan, "state.").items() if "tables.0." in name or "tables.1." in name]
        assert tables and set(tables) == {layout}
        found = [e.exchange for _, e in plan.shardings if e.exchange is not None]
        assert all(e.axes == ("data",) for e in found) and bool(found) == (spread is Spread.ROWS)


def test_a_split_sequence_scatters_where_megatron_reduces():
    """Korthikanti et al. 2022, figure 5: all-reduces of activations become reduce-scatters and all-gathers."""
    step = gpt("plain")
    subject = baselines.prepare_subject(step.fn, *step.shapes(), cluster=H100X8, donate_argnums=0)
    activation = (BATCH, SEQUENCE, EMBED)
    plan = baselines.plan_baseline(Strategy(None, TensorRule.SEQUENCE), subject)
    assert sent(plan, "all-reduce", activation) == 0
    # two a layer and pass; the look-up by rows and the head by columns may add one each
    assert 4 * LAYERS <= sent(plan, "reduce-scatter", activation) <= 4 * LAYERS + 2
    assert sent(plan, "all-gather", activation) >= 4 * LAYERS


def test_strategies_that_do_not_apply_say_so(moe_subject, dlrm_subject):
    names = lambda subject: {s.name for s in ALL} - {s.name for s in baselines.suited(subject)}
    with_experts = {s.name for s in ALL if s.spread is Spread.EXPERTS}
    with_sequences = {s.name for s in ALL if s.tensor is TensorRule.SEQUENCE}
    tables = {"ddp+tables", "ddp+rows", "ddp+columns"}
    assert names(moe_subject) == tables  # its table is also the output layer
    assert names(dlrm_subject) == with_experts | with_sequences
    for strategy in ALL:
        if strategy.name in names(dlrm_subject):
            outcome = baselines.try_baseline(strategy, dlrm_subject)
            assert outcome.plan is None and f"`{strategy.name}` does not apply" in outcome.reason
    with pytest.raises(LayoutError, match="spread"):
        Strategy(None, TensorRule.MEGATRON, Spread.EXPERTS)


@pytest.mark.parametrize("family", ["moe", "dlrm"])
def test_no_strategy_that_spreads_is_predicted_better_than_the_plan(family, request):
    """The others, and plans with overlap, are compared in test_predictions.py."""
    subject = request.getfixturevalue(f"{family}_subject")
    options = autoshard.PlanOptions(mesh_limit_s=30, schedule=autoshard.Schedule.LEAST_MEMORY)
    mesh = {"data": 2, "tensor": 4}
    plan = autoshard.plans.make.plan_program(
        subject.traced, subject.program, subject.cluster, mesh=mesh, donate_argnums=(0,), options=options
    )
    spreading = [strategy for strategy in baselines.suited(subject) if strategy.spread is not None]
    assert spreading
    for strategy in spreading:
        other = baselines.plan_baseline(strategy, subject, mesh=mesh, options=options)
        assert plan.certificate.bound <= other.certificate.objective * (1 + 1e-9), strategy.name
        assert plan.certificate.objective <= other.certificate.objective * (1 + options.relative_gap), strategy.name
