"""What each baseline shards and sends, against figures derived by hand."""

import collections
import math

import pytest
from baseline_programs import BATCH, EMBED, H100X8, HIDDEN, LAYERS, PARAMETER_BYTES, SEQUENCE, WIDTH, gpt, mlp

import autoshard
from autoshard import baselines
from autoshard.baselines import ALL, DataRule, Spread, Strategy, TensorRule
from autoshard.errors import LayoutError, MemoryBudgetError, MeshError

N = 8
SCALAR_BYTES = 4
BATCH_BYTES = 2 * BATCH * WIDTH * 4


@pytest.fixture(scope="module")
def mlp_subject():
    step = mlp()
    return baselines.prepare_subject(step.fn, *step.shapes(), cluster=H100X8, donate_argnums=0)


@pytest.fixture(scope="module")
def gpt_subject():
    step = gpt("plain")
    return baselines.prepare_subject(step.fn, *step.shapes(), cluster=H100X8, donate_argnums=0)


def sent(plan, kind):
    """Wire bytes of each collective of a kind, by the shape that it moves; scalars apart."""
    items = collections.defaultdict(float)
    for c in plan.estimate.communication:
        if c.kind == kind and math.prod(c.shape) > 1:
            items[c.shape] += c.wire_bytes
    return dict(items)


def local_bytes(plan, part):
    """Bytes of one device's pieces of the argument tensors whose path contains `part`."""
    sizes = plan.mesh_axes
    return sum(4 * math.prod(a.shape) / math.prod(sizes[x] for e in a.entries for x in e)
               for a in plan.arguments if part in a.name and a.shape)  # fmt: skip


def expected(factor):
    shapes = {"in": (WIDTH, HIDDEN), "in_bias": (HIDDEN,), "out": (HIDDEN, WIDTH), "out_bias": (WIDTH,)}
    return {shapes[n]: pytest.approx(factor * b) for n, b in PARAMETER_BYTES.items()}


STATE_BYTES = sum(PARAMETER_BYTES.values())
RING = (N - 1) / N


@pytest.mark.parametrize("strategy", [Strategy(rule) for rule in DataRule], ids=lambda s: s.name)
def test_data_parallelism_of_the_mlp(mlp_subject, strategy):
    options = autoshard.PlanOptions(schedule=autoshard.Schedule.LEAST_MEMORY)  # else joined all-reduces hide for less
    plan = baselines.plan_baseline(strategy, mlp_subject, options=options)
    assert plan.axes == (("data", N),)
    rule = strategy.data
    assert local_bytes(plan, "batch.") == BATCH_BYTES / N
    assert local_bytes(plan, ".params.") == STATE_BYTES / (N if rule is DataRule.ZERO3 else 1)
    assert local_bytes(plan, ".momentum.") == STATE_BYTES / (1 if rule is DataRule.DDP else N)
    # gradients: an all-reduce sends 2 (n-1)/n of the tensor, a reduce-scatter or an all-gather (n-1)/n; ZeRO-1 slices
    # what it all-reduces at once, of which the compiler makes reduce-scatters
    assert sent(plan, "all-reduce") == (expected(2 * RING) if rule is DataRule.DDP else {})
    assert sent(plan, "reduce-scatter") == ({} if rule is DataRule.DDP else expected(RING))
    gathered = sent(plan, "all-gather")
    if rule in (DataRule.ZERO1, DataRule.ZERO2):
        assert gathered == expected(RING)  # the new parameters
    elif rule is DataRule.DDP:
        assert not gathered
    else:  # each parameter where it is used: the second layer's weight forward and backward
        uses = {(WIDTH, HIDDEN): 1, (HIDDEN,): 1, (HIDDEN, WIDTH): 2, (WIDTH,): 1}
        sizes = {s: 4 * math.prod(s) for s in uses}
        for shape, bytes_sent in gathered.items():
            assert bytes_sent <= uses[shape] * RING * sizes[shape] * (1 + 1e-9)
        assert gathered.keys() == uses.keys()
    scalars = [c for c in plan.estimate.communication if math.prod(c.shape) == 1]
    assert [(c.kind, c.wire_bytes) for c in scalars] == [("all-reduce", 2 * RING * SCALAR_BYTES)]  # the loss


def test_megatron_splits_the_mlp_by_columns_then_rows(mlp_subject):
    plan = baselines.plan_baseline(Strategy(None, TensorRule.MEGATRON), mlp_subject)
    entries = {a.name: a.entries for a in plan.arguments}
    assert entries["state.params.in"] == ((), ("tensor",))
    assert entries["state.params.in_bias"] == (("tensor",),)
    assert entries["state.params.out"] == (("tensor",), ())
    assert entries["batch.x"] == ((), ())
    # one all-reduce, of the second layer's output: the first layer needs no gradient of its input
    assert sent(plan, "all-reduce") == {(BATCH, WIDTH): pytest.approx(2 * RING * BATCH * WIDTH * 4)}


def test_megatron_all_reduces_four_activations_a_layer(gpt_subject):
    """Shoeybi et al. 2019, section 3: two forward and two backward; the head, by columns or by rows, may add one."""
    plan = baselines.plan_baseline(Strategy(None, TensorRule.MEGATRON), gpt_subject)
    activation = (16, SEQUENCE, EMBED)
    reduced = [c for c in plan.estimate.communication if c.kind == "all-reduce" and c.shape == activation]
    assert sum(c.count for c in reduced if "layers.py" in c.source) == 4 * LAYERS
    assert sum(c.count for c in reduced) <= 4 * LAYERS + 1
    by_name = {a.name.removeprefix("state.params."): a.entries for a in plan.arguments if ".params." in a.name}
    for layer in range(LAYERS):
        block = f"blocks.{layer}."
        for projection in ("query", "key", "value"):
            assert by_name[f"{block}attention.{projection}.kernel"] == ((), ("tensor",), ())  # by heads
        assert by_name[block + "attention.output.kernel"] == (("tensor",), (), ())
        assert by_name[block + "mlp.up.kernel"] == ((), ("tensor",))
        assert by_name[block + "mlp.down.kernel"] == (("tensor",), ())


MESH = {"data": 2, "tensor": 4}


@pytest.fixture(scope="module")
def outcomes():
    step = gpt("plain", layers=1)
    args = step.shapes()
    settings = {"cluster": H100X8, "mesh": MESH, "donate_argnums": 0}
    return autoshard.plan(step.fn, *args, **settings), baselines.all_baselines(step.fn, *args, **settings)


@pytest.mark.slow
def test_the_plan_costs_no_more_than_any_baseline(outcomes):
    plan, found = outcomes
    assert [o.strategy for o in found] == [
        s for s in ALL if s.spread in (None, Spread.TABLES)
    ]  # no experts, no sparse table
    slack = 1 + autoshard.PlanOptions().relative_gap
    for outcome in found:
        assert outcome.fits and outcome.plan.name == outcome.strategy.name
        assert plan.certificate.objective <= outcome.plan.certificate.objective * slack
        assert plan.certificate.bound <= outcome.plan.certificate.objective


def test_argument_layouts_obey_the_strategy(outcomes):
    for outcome in outcomes[1]:
        strategy = outcome.strategy
        data = (
            {"data", "tensor"} - ({"tensor"} if strategy.data else {"data", "tensor"}) if strategy.tensor else {*MESH}
        )
        for argument in outcome.plan.arguments:
            used = {x for e in argument.entries for x in e}
            is_spread = strategy.spread is Spread.TABLES and "token_embed" in argument.name
            if argument.name.startswith("batch"):
                assert used == data and set(argument.entries[0]) == data
            elif ".params." in argument.name:
                is_matrix = argument.name.endswith(("kernel", "embedding"))
                assert (used & data == data) == (strategy.data is DataRule.ZERO3 or is_spread) or not data
                assert used - data == {*MESH} - data or not is_matrix
            elif argument.shape:  # the optimizer's moments; every tensor of this model divides
                assert (used & data == data) == (strategy.data is not DataRule.DDP or is_spread) or not data


def test_scanned_layers_stay_sharded_in_zero3():
    """The stacked weights are gathered a layer at a time, never whole."""
    step = gpt("scan")
    plan = baselines.zero(step.fn, *step.shapes(), stage=3, cluster=H100X8, donate_argnums=0)
    stacked = {a.shape for a in plan.arguments if ".params." in a.name and len(a.shape) > 1 and a.shape[0] == LAYERS}
    gathers = [c for c in plan.estimate.communication if c.kind == "all-gather"]
    assert stacked and gathers
    assert not stacked & {c.shape for c in gathers}


def test_what_nothing_divides_stays_whole():
    step = gpt("plain", layers=1, batch_size=12)
    plan = baselines.zero(step.fn, *step.shapes(), stage=3, mesh={"data": 12}, cluster=_cluster_of(12))
    for argument in plan.arguments:
        divides = any(d % 12 == 0 for d in argument.shape)
        assert any(argument.entries) == divides


def _cluster_of(devices):
    import dataclasses

    cluster = autoshard.Cluster.from_file(H100X8)
    group = dataclasses.replace(cluster.groups[0], devices_per_node=devices)
    return dataclasses.replace(cluster, groups=(group,))


def test_a_batch_that_does_not_divide_is_reported(mlp_subject):
    step = gpt("plain", layers=1, batch_size=6)
    args, settings = step.shapes(), {"cluster": H100X8, "donate_argnums": 0}
    with pytest.raises(LayoutError, match=r"dimension 0 of `batch.inputs` with shape \(6, 16\) is no multiple of 8"):
        baselines.data_parallel(step.fn, *args, **settings)
    ddp, mix = baselines.all_baselines(step.fn, *args, strategies=(ALL[0], ALL[5]), **settings)
    assert ddp.plan is None and "no multiple of 8" in ddp.reason
    assert mix.plan.axes == (("data", 2), ("tensor", 4))  # the only mix of these devices whose data axis divides 6


def test_wrong_requests_are_refused(mlp_subject):
    step = mlp()
    args = step.shapes()
    with pytest.raises(LayoutError, match="stages 1, 2 and 3"):
        baselines.zero(step.fn, *args, stage=4, cluster=H100X8)
    with pytest.raises(MeshError, match="tensor_axis="):
        baselines.mixed(step.fn, *args, mesh={"data": 2, "model": 4}, cluster=H100X8)
    with pytest.raises(MemoryBudgetError):
        baselines.data_parallel(step.fn, *args, memory_budget_bytes=1e3, cluster=H100X8)


def test_a_baseline_that_does_not_fit_is_shown_with_its_need(mlp_subject):
    free = baselines.plan_baseline(ALL[0], mlp_subject, memory_budget_bytes=math.inf)
    assert free.budget_bytes is None
    need = free.estimate.peak_bytes
    tight = baselines.try_baseline(ALL[0], mlp_subject, memory_budget_bytes=need / 2)
    assert not tight.fits and tight.plan.estimate.peak_bytes == need and "GB" in tight.reason
    assert baselines.try_baseline(ALL[0], mlp_subject, memory_budget_bytes=need).fits
