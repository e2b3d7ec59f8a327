"""`autoshard.plan` with tables in host memory: the decision, the run, what is told, and files."""

import dataclasses
import json
import math
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from typer.testing import CliRunner

import autoshard
from autoshard.cli import app
from autoshard.cluster import Cluster
from autoshard.errors import ConfigError, ExportError, FileFormatError, MemoryBudgetError, PlanMismatchError
from autoshard.offloading.situation import HostRates
from autoshard.printing import seconds

CLUSTERS = pathlib.Path(__file__).parents[2] / "configs" / "clusters"
CLUSTER = Cluster.from_file(CLUSTERS / "h100x8_cpu.yaml")
USERS, ITEMS, EXAMPLES = 200_000, 500, 64
BUDGET_BYTES = 35e6
"""Eight devices need 36.8 MB each: 33.6 MB of scratch memory for products, and their part of 25.6 MB."""


class Clicks(nn.Module):
    """Two tables and two layers, as anyone would write them."""

    users: int = USERS
    width: int = 16

    @nn.compact
    def __call__(self, batch):
        user = nn.Embed(self.users, self.width, name="users")(batch["user"])
        item = nn.Embed(ITEMS, self.width, name="items")(batch["item"])
        return nn.Dense(1)(nn.relu(nn.Dense(32)(jnp.concatenate([user, item], -1))))[:, 0]


def program_of(optimizer=None, model=None, batch_size=EXAMPLES):
    """A step, a function that makes its state, and the shapes of both arguments."""
    model = model or Clicks()

    def loss_fn(params, batch, _):
        return optax.sigmoid_binary_cross_entropy(model.apply(params, batch), batch["y"]).mean(), None

    step = autoshard.TrainStep(loss_fn, optimizer or optax.adagrad(0.1))
    ids = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
    batch = {"user": ids, "item": ids, "y": jax.ShapeDtypeStruct((batch_size,), jnp.float32)}
    make_state = lambda: step.init(model.init(jax.random.key(0), jax.tree.map(jnp.zeros_like, batch)))
    return step, make_state, (jax.eval_shape(make_state), batch)


def batches(count, size=EXAMPLES):
    rng = np.random.default_rng(1)
    draw = lambda rows: np.minimum(rng.zipf(1.3, size) - 1, rows - 1).astype(np.int32)
    return [
        {"user": draw(USERS), "item": draw(ITEMS), "y": rng.integers(0, 2, size).astype(np.float32)}
        for _ in range(count)
    ]


AS_WRITTEN = autoshard.PlanOptions(cache=False, least_memory_s=5, remat="as_written", micro_batches="as_written")
"""No other forms of a step are searched, and no stages: where tables live does not depend on them."""


def planned(program, cluster=CLUSTER, budget_bytes=BUDGET_BYTES, **settings):
    """On one mesh, unless told otherwise."""
    step, _, arguments = program
    settings = {"memory_budget_bytes": budget_bytes, "donate_argnums": 0, "mesh": {"data": 8}, **settings}
    return autoshard.plan(step, *arguments, cluster=cluster, **{"options": AS_WRITTEN, **settings})


def one_node(cluster, num_devices):
    """A node like that of a cluster, with so many devices."""
    (group,) = cluster.groups
    return Cluster("one node", (dataclasses.replace(group, devices_per_node=num_devices),))


@pytest.fixture(scope="module")
def program():
    return program_of()


@pytest.fixture(scope="module")
def hosted(program):
    """Of a step that no search finds to fit the devices: neither on any mesh, nor in any form, but in micro-batches of
    one example for each device, whose products sum nothing and take no scratch memory."""
    options = autoshard.PlanOptions(cache=False, least_memory_s=5, micro_batches="as_written")
    return planned(program, mesh=None, options=options)


# ---- the decision


def test_tables_that_fit_stay_on_the_devices(program):
    assert type(planned(program, budget_bytes=100e6)) is autoshard.Plan


def test_tables_that_do_not_fit_go_to_host_memory(hosted):
    assert hosted.tables == ("params.users.embedding",) and hosted.execution.mode in ("sync", "pipelined")
    assert hosted.num_devices == 8 and hosted.over_rows.estimate.peak_bytes <= BUDGET_BYTES
    rows = {a.name: a.shape for a in hosted.over_rows.arguments}
    assert rows["state.params.params.users.embedding"] == (EXAMPLES, 16)
    assert rows["state.params.params.items.embedding"] == (ITEMS, 16)


def test_a_state_that_exceeds_all_devices_is_not_searched_for(program):
    """Of a terabyte, by shape: eight devices have half of it, and their default budget is nine tenths of that."""
    stages = []
    options = dataclasses.replace(AS_WRITTEN, on_progress=lambda progress: stages.append(progress.stage))
    plan = planned(program_of(model=Clicks(10**9, 128)), budget_bytes=None, options=options)
    assert plan.tables == ("params.users.embedding",) and plan.placed.best.host_bytes > 1e12
    assert stages.count("trace") == 2  # the rest of the step to price it, and the step over rows


def test_the_mode_is_asked_for(program):
    mode = lambda **fixed: planned(program, tables=autoshard.TableOptions(**fixed)).execution
    assert mode(mode="sync").mode == "sync"
    stale = mode(mode="async", max_staleness=2)
    assert stale.mode == "async" and 1 <= stale.max_staleness <= 2
    with pytest.raises(ConfigError, match="max_staleness"):
        autoshard.TableOptions(mode="async")
    with pytest.raises(ConfigError, match="received 'lazy'"):
        autoshard.TableOptions(mode="lazy")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="least_gain is a share of the step, 0 or more; received -1"):
        autoshard.TableOptions(least_gain=-1)


def test_without_hosts_the_error_says_so(program):
    with pytest.raises(MemoryBudgetError, match=r"would do.*lacks host\. Add it, as in configs/clusters/h100x8_cpu"):
        planned(program, cluster=CLUSTERS / "h100x8.yaml")


def test_host_memory_is_forbidden(program):
    with pytest.raises(MemoryBudgetError, match=r"would do.*autoshard\.HostTables\. That is .* of the hosts\.$"):
        planned(program, tables=autoshard.TableOptions(on_hosts=False))


@pytest.fixture(scope="module")
def large():
    """51 GB fit eight devices, but to update all rows of a table in every step takes longer than to look rows up."""
    return program_of(model=Clicks(10**8, 64), batch_size=4096)


def test_tables_leave_devices_that_have_room_for_them_where_the_step_is_faster_so(large, tmp_path):
    """By hand: on the devices a row's state of 2 x 64 numbers is read and written in each step, whoever looks it up."""
    plan = planned(large, budget_bytes=None)
    assert isinstance(plan, autoshard.HostTablesPlan) and plan.tables == ("params.users.embedding",)
    least_on_devices_s = 10**8 / 8 * 2 * 512 / (0.9 * 3.35e12)
    assert plan.step_s < 0.95 * least_on_devices_s < 0.95 * plan.on_devices_s
    stages, patched_s = plan.predicted.stages, sum(c.patched_s for c in plan.placed.best.choices)
    slots = plan.execution.num_slots
    assert plan.execution.mode == "pipelined"
    assert stages.accelerator_s == pytest.approx(plan.over_rows.estimate.step_s + (slots - 1) * patched_s)
    assert plan.step_s == pytest.approx(max(*stages.all_s, sum(stages.all_s) / slots))
    assert f"devices: {seconds(plan.on_devices_s)}, {plan.on_devices_s / plan.step_s:.2f} times as long." in str(plan)
    plan.save(tmp_path / "plan.json")
    assert autoshard.load(tmp_path / "plan.json") == plan
    kept = planned(large, budget_bytes=None, tables=autoshard.TableOptions(least_gain=math.inf))
    assert isinstance(kept, autoshard.Plan) and kept.estimate.step_s == plan.on_devices_s and not kept.on_hosts
    asked = planned(large, budget_bytes=None, tables=autoshard.TableOptions(least_gain=0.9))
    assert isinstance(asked, autoshard.Plan)
    assert asked.on_hosts.endswith("a step with 1 in host memory, not 90% less") and asked.on_hosts in str(asked)
    asked.save(tmp_path / "asked.json")
    assert autoshard.load(tmp_path / "asked.json") == asked


def test_tables_that_are_no_faster_in_host_memory_stay_and_the_plan_says_why(program, large):
    """Of a step of 0.2 ms nothing is gained by handing batches to processes; of 0.9 ms neither, by the prices."""
    stages = []
    options = dataclasses.replace(AS_WRITTEN, on_progress=lambda progress: stages.append(progress.stage))
    lazy = program_of(optax.adam(0.1), Clicks(10**8, 64), 4096)
    assert "lazy=True" in planned(lazy, budget_bytes=None).on_hosts
    small = planned(program_of(model=Clicks(10**6, 16)), budget_bytes=None, options=options)
    assert isinstance(small, autoshard.Plan) and small.on_hosts.startswith("tables stay on the devices: ")
    stages.clear()
    tiny = planned(program_of(model=Clicks(1000, 16)), budget_bytes=None, options=options)
    assert "without them a step would be at most" in tiny.on_hosts and stages.count("trace") == 1


def test_plans_without_described_hosts_take_nothing_more(large):
    stages = []
    options = dataclasses.replace(AS_WRITTEN, on_progress=lambda progress: stages.append(progress.stage))
    plan = planned(large, CLUSTERS / "h100x8.yaml", None, options=options)
    assert isinstance(plan, autoshard.Plan) and plan.on_hosts == "" and stages.count("trace") == 1


def test_what_has_no_tables_is_refused_as_ever():
    step = autoshard.TrainStep(lambda p, b, _: (jnp.mean((b @ p["w"]) ** 2), None), optax.sgd(0.1))
    state = jax.eval_shape(lambda: step.init({"w": jnp.zeros((1 << 15, 1 << 15))}))
    with pytest.raises(MemoryBudgetError, match=r"micro-batches or jax\.checkpoint\. That is .* of the hosts\.$"):
        planned((step, None, (state, jax.ShapeDtypeStruct((8, 1 << 15), jnp.float32))))


def test_an_update_that_is_lazy_must_be_accepted():
    program = program_of(optax.adam(0.1))
    with pytest.raises(MemoryBudgetError, match="Here they do not: .*lazy=True"):
        planned(program)
    lazy = planned(program, tables=autoshard.TableOptions(lazy=True))
    assert str(lazy).startswith("Plan with tables in host memory for cluster h100x8_cpu; lazy update: rows that")


def test_where_donating_would_do_the_error_says_so():
    one, mesh = one_node(CLUSTER, 1), {"data": 1}
    program = program_of(model=Clicks(2_000_000), batch_size=1 << 16)
    tables = autoshard.TableOptions(mode="sync")
    assert type(planned(program, one, 500e6, tables=tables, mesh=mesh)) is autoshard.Plan
    with pytest.raises(MemoryBudgetError, match="Pass donate_argnums=0"):
        planned(program, one, 500e6, tables=tables, mesh=mesh, donate_argnums=())


def test_what_cannot_go_together_is_refused(program):
    with pytest.raises(MemoryBudgetError, match="pins speak of a step with all tables on the devices"):
        planned(program, pins={"state.params.params.users.embedding": PartitionSpec()})
    asked = autoshard.TableOptions()
    with pytest.raises(ConfigError, match="tables= is for a TrainStep of one program.*received <lambda> with 1"):
        autoshard.plan(lambda x: x, jnp.zeros(8), cluster=CLUSTER, tables=asked)
    with pytest.raises(ConfigError, match="tables= is for a TrainStep of one program.*and stages="):
        planned(program, tables=asked, stages=autoshard.StageOptions())


# ---- the run


def on_one_device(step, make_state, all_batches):
    """The state after steps with whole tables, and the loss of each."""
    state, run, losses = make_state(), jax.jit(step), []
    for batch in all_batches:
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize(
    ("optimizer", "is_read"),
    [(optax.sgd(0.5), True), pytest.param(optax.adagrad(0.1), False, marks=pytest.mark.exhaustive)],
)
def test_three_steps_equal_those_of_one_device(optimizer, is_read, tmp_path):
    step, make_state, _ = program = program_of(optimizer)
    plan = planned(program)
    plan.save(tmp_path / "plan.json")
    whole, losses = on_one_device(step, make_state, batches(3))
    made, batch = (autoshard.load(tmp_path / "plan.json"), batches(1)[0]) if is_read else (plan, None)
    with made.host_tables(step, make_state, batch) as tables:
        assert tables.execution == plan.execution
        done = list(tables.steps(batches(3)))
        after = tables.state()
    np.testing.assert_allclose([float(d.metrics["loss"]) for d in done], losses, rtol=1e-6)
    for own, expected in zip(jax.tree.leaves(after), jax.tree.leaves(whole), strict=True):
        if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
            continue
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_ranked", [pytest.param(True, marks=pytest.mark.exhaustive), False])
def test_hot_rows_that_the_plan_keeps_on_the_devices_make_no_difference(is_ranked):
    """Slow CPUs make them worth while; of rows in no order, those of a sample, which has fewer, are taken."""
    step, make_state, _ = program = program_of(batch_size=4096)
    options = dataclasses.replace(AS_WRITTEN, lookups=autoshard.Lookups(autoshard.IdDistribution(1.2, is_ranked)))
    slow = autoshard.TableOptions(hot_rows=True, mode="sync", rates=HostRates(id_s=1e-8, line_s=1e-6))
    plan = planned(program, budget_bytes=36.5e6, options=options, tables=slow)
    ((path, count),) = plan.placed.hot_rows.items()
    assert path == "params.users.embedding" and count > 4096
    _, losses = on_one_device(step, make_state, batches(3, 4096))
    sample = () if is_ranked else batches(1, 4096)
    with plan.host_tables(step, make_state, sample=sample) as tables:
        assert tables.sparse.hot_counts == (count,)
        done = list(tables.steps(batches(3, 4096)))
    np.testing.assert_allclose([float(d.metrics["loss"]) for d in done], losses, rtol=1e-6)


def test_another_execution_may_take_the_place_of_the_planned_one(program, hosted):
    step, make_state, _ = program
    fewer = dataclasses.replace(hosted.execution, mode="sync", num_workers=2)
    with hosted.host_tables(step, make_state(), execution=fewer) as tables:
        assert tables.execution == fewer and len(tables.pool.process_ids) == 2
        assert [done.number for done in tables.steps(batches(2))] == [0, 1]


def test_the_plan_is_of_one_step_alone(program, hosted):
    other, make_state, arguments = program_of(optax.sgd(0.1))
    with pytest.raises(PlanMismatchError):
        hosted.host_tables(other, make_state, arguments[1])
    with pytest.raises(PlanMismatchError):
        hosted.check(other, arguments)
    with pytest.raises(PlanMismatchError, match="received `<lambda>`"):
        hosted.check(lambda x: x, ())
    hosted.check(program[0], program[2])


def test_what_a_function_cannot_do_shows_what_can(program, hosted):
    step, make_state, _ = program
    for refused in (lambda: hosted.jit(step), lambda: hosted.init(make_state)):
        with pytest.raises(ConfigError, match=r"with plan\.host_tables\(step, make_state\) as tables:"):
            refused()
    with pytest.raises(ExportError, match=r"plan\.over_rows\.export"):
        hosted.export("shardings")


# ---- what is told, and files


def test_the_explanation_tells_places_mode_workers_time_memory_and_how_to_run_it(hosted):
    head, outline, *_ = parts = str(hosted).split("\n\n")
    assert head == (
        "Plan with tables in host memory for cluster h100x8_cpu; the update of the rows that a batch reads equals that "
        "of whole tables"
    )
    assert outline.startswith("2 tables of 25.7 MB with the optimizer's state, on 8 x H100-SXM and 1 host of 112 CPUs")
    for line in ("places     1 in accelerators, whole; 1 in host memory", "step   ", "mode   ", "1 workers a host"):
        assert line in outline
    assert "of 35 MB on each accelerator; 25.6 MB of 1.8 TB on each host" in outline
    lives = {line.split()[0]: " ".join(line.split()) for line in parts[2].splitlines()[2:]}
    assert lives["params.users.embedding"].startswith(
        "params.users.embedding 200,000 25.6 MB 64 host memory accelerators, whole: "
    )
    assert "accelerators, whole host memory: +" in lives["params.items.embedding"]
    assert parts[3].endswith("With all tables on the devices it does not fit them.") and " a step; " in parts[3]
    assert parts[4] == "The step over the rows of a batch, on the accelerators"
    assert parts[5].startswith("Plan `autoshard` for cluster `h100x8_cpu`: 8 x H100-SXM")
    assert "with plan.host_tables(step, make_state) as tables:" in parts[7]
    assert "The best of every mode" in hosted.explain(full=True) and "<pre>Plan with" in hosted._repr_html_()


def test_plans_are_saved_and_read(hosted, tmp_path):
    from autoshard.report.reading import read_material  # half of what a process of planned_process.py would import

    path = tmp_path / "plan.json"
    hosted.save(path)
    read = autoshard.load(path)
    assert read == hosted and read == autoshard.HostTablesPlan.load(path)
    assert read.explain(full=True) == hosted.explain(full=True)
    assert read.diff(hosted).is_empty
    shown = CliRunner().invoke(app, ["explain", str(path)])
    assert shown.exit_code == 0 and shown.output.startswith("Plan with tables in host memory")
    with pytest.raises(PlanMismatchError, match="batch="):
        read.host_tables(*program_of()[:2])
    assert read_material(path)[0].material == hosted
    with pytest.raises(FileFormatError, match="is a plan with tables in host memory"):
        autoshard.Plan.load(path)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"version": 0}, "of version 0"),
        ({"format": "other"}, "is not an autoshard plan"),
        ({"lazy": 2}, "at `lazy`"),
        ({"more": 1}, "at `more`"),
    ],
)
def test_files_that_contradict_themselves_are_refused(change, what, hosted, tmp_path):
    path = tmp_path / "plan.json"
    hosted.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FileFormatError, match=what):
        autoshard.load(path)


class Bags(nn.Module):
    """The sum of eight rows of one table, and one row of another."""

    @nn.compact
    def __call__(self, batch):
        rows = nn.Embed(USERS, 16, name="users")(jnp.maximum(batch["bags"], 0))
        users = jnp.where((batch["bags"] >= 0)[..., None], rows, 0).sum(1)
        items = nn.Embed(ITEMS, 16, name="items")(jnp.maximum(batch["bags"][:, 0], 0) % ITEMS)
        return nn.Dense(1)(nn.relu(nn.Dense(32)(jnp.concatenate([users, items], -1))))[:, 0]


class Projected(nn.Module):
    """The sum of eight wide rows of one table, projected, beside one row of another."""

    @nn.compact
    def __call__(self, batch):
        rows = nn.Embed(USERS, 64, name="users")(jnp.maximum(batch["bags"], 0))
        users = nn.Dense(4, name="narrow")(jnp.where((batch["bags"] >= 0)[..., None], rows, 0).sum(1))
        items = nn.Embed(ITEMS, 16, name="items")(jnp.maximum(batch["bags"][:, 0], 0) % ITEMS)
        return nn.Dense(1)(nn.relu(nn.Dense(32)(jnp.concatenate([users, items], -1))))[:, 0]


@pytest.mark.parametrize(
    ("model", "options", "host_layers"),
    [
        pytest.param(Bags, {}, (), marks=pytest.mark.exhaustive, id="sums"),
        pytest.param(
            Projected, {"host_layers": ("params.narrow.kernel",)}, ("params.narrow.kernel",), id="sums and layers"
        ),
    ],
)
def test_a_plan_with_sums_or_layers_at_the_host_equals_one_device(model, options, host_layers, tmp_path):
    """Where the link is slow and its mode allows it; also as it was saved. Layers are those over sums."""
    shapes = {
        "bags": jax.ShapeDtypeStruct((EXAMPLES, 8), jnp.int32),
        "y": jax.ShapeDtypeStruct((EXAMPLES,), jnp.float32),
    }
    loss_fn = lambda p, b, _: (optax.sigmoid_binary_cross_entropy(model().apply(p, b), b["y"]).mean(), None)
    step = autoshard.TrainStep(loss_fn, optax.adagrad(0.1))
    make = lambda: step.init(
        model().init(jax.random.key(0), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
    )
    (group,) = CLUSTER.groups
    link = dataclasses.replace(group.host.to_device, bandwidth_bytes_per_s=1e6)
    slow = Cluster("slow", (dataclasses.replace(group, host=dataclasses.replace(group.host, to_device=link)),))
    of = lambda **more: planned(
        (step, make, (jax.eval_shape(make), shapes)), cluster=slow, tables=autoshard.TableOptions(mode="sync", **more)
    )
    rows, sums = of(), of(pooling=True, **options)
    assert (rows.part.pooled, sums.part.pooled) == ((), ("params.users.embedding",))
    assert sums.predicted.stages.down_s < rows.predicted.stages.down_s / 4
    assert sums.part.host_layers == host_layers and rows.part.host_layers == ()
    assert ("layers there" if host_layers else "pooled there") in str(sums)
    sums.save(tmp_path / "plan.json")
    rng = np.random.default_rng(0)
    draw = lambda: np.minimum(rng.zipf(1.3, (EXAMPLES, 8)) - 2, USERS - 1).astype(np.int32)  # -1: there is none
    fed = [{"bags": draw(), "y": rng.integers(0, 2, EXAMPLES).astype(np.float32)} for _ in range(3)]
    whole, run = make(), jax.jit(step)
    for batch in fed:
        whole, metrics = run(whole, batch)
    with autoshard.load(tmp_path / "plan.json").host_tables(
        step, make, shapes, execution=autoshard.Execution("sync", num_workers=2)
    ) as tables:
        done = list(tables.steps(fed))
        own = tables.state()
    np.testing.assert_allclose(done[-1].metrics["loss"], metrics["loss"], rtol=1e-5)
    for x, y in zip(jax.tree.leaves(own.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
