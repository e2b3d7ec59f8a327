"""The plans that the literature teaches come out of the search, and the compiler agrees on their collectives.

Nothing runs here: programs are planned for eight H100 from shapes and compiled for eight CPU devices, and collectives
are counted in the optimised HLO. XLA:CPU makes an all-reduce (and a slice) of what is a reduce-scatter on GPUs, so
tests look at the sum of both. The counts are those of Megatron-LM and of Alpa's tests: one fused gradient reduction
for data parallelism; L - 1 activation all-reduces for an MLP of L layers split by columns and rows in turn; 4 per
transformer layer.
"""

import collections
import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from autoshard_models import presets, train_step

import autoshard
from autoshard.cluster import Cluster

CLUSTER = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x8.yaml"
DEPTH = 6


def without_workspace() -> Cluster:
    """Eight H100 whose products need no workspace, which for the last layer's would decide where memory peaks."""
    cluster = Cluster.from_file(CLUSTER)
    (group,) = cluster.groups
    device = dataclasses.replace(group.device_type, product_workspace_bytes=0)
    return dataclasses.replace(cluster, groups=(dataclasses.replace(group, device_type=device),))


def mlp(width, batch):
    """An MLP's Adam step as (step, abstract state, abstract batch)."""
    optimizer = optax.adam(1e-3)

    def loss(params, data):
        hidden = data["x"]
        for i, (kernel, bias) in enumerate(params):
            hidden = hidden @ kernel + bias
            if i < DEPTH - 1:
                hidden = jax.nn.relu(hidden)
        return jnp.mean((hidden - data["y"]) ** 2)

    def init():
        params = [(jnp.zeros((width, width)), jnp.zeros((width,))) for _ in range(DEPTH)]
        return params, optimizer.init(params)

    def step(state, data):
        params, opt_state = state
        value, gradients = jax.value_and_grad(loss)(params, data)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    data = {k: jax.ShapeDtypeStruct((batch, width), jnp.float32) for k in "xy"}
    return step, jax.eval_shape(init), data


def planned(step, *args, cluster=CLUSTER, **options):
    return autoshard.plan(step, *args, cluster=cluster, donate_argnums=0, **options)


def compiled_collectives(plan, step, *args):
    """(kind, result type) of every collective in the optimised program, with multiplicity."""
    text = plan.jit(step).lower(*args).compile().as_text()
    found = re.findall(
        r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text
    )
    return collections.Counter((kind, shape) for shape, kind in found)


def kinds(collectives):
    total = collections.Counter()
    for (kind, _), count in collectives.items():
        total[kind] += count
    return total


def layouts(plan, path):
    return {a.name: a.entries for a in plan.arguments if a.name.startswith(path) and len(a.shape) == 2}


def test_a_large_batch_is_data_parallel_with_one_fused_gradient_reduction():
    step, state, data = mlp(width=128, batch=2**20)
    plan = planned(step, state, data, mesh={"data": 8})
    assert all(entries == ((), ()) for entries in layouts(plan, "state").values())
    assert set(layouts(plan, "data").values()) == {(("data",), ())}
    assert {c.kind for c in plan.estimate.communication} == {"all-reduce"}
    assert kinds(compiled_collectives(plan, step, state, data)) == {"all-reduce": 1}


def test_wide_layers_are_split_by_columns_and_rows_in_turn():
    step, state, data = mlp(width=16384, batch=256)
    plan = planned(step, state, data, mesh={"tensor": 8})
    column, row = ((), ("tensor",)), (("tensor",), ())
    kernels = [layouts(plan, "state.0")[f"state.0.{i}.0"] for i in range(DEPTH)]
    assert kernels in ([column, row] * 3, [row, column] * 3)
    activations = [
        c for c in plan.estimate.communication if c.shape == (256, 16384) and c.kind in ("all-reduce", "reduce-scatter")
    ]
    assert len(activations) == DEPTH - 1
    assert kinds(compiled_collectives(plan, step, state, data))["all-reduce"] in (DEPTH - 1, DEPTH)  # and the loss


def test_two_axes_combine_both():
    step, state, data = mlp(width=8192, batch=8192)
    options = autoshard.PlanOptions(schedule=autoshard.Schedule.LEAST_MEMORY)
    plan = planned(step, state, data, mesh={"data": 2, "tensor": 4}, options=options)
    one_axis = planned(step, state, data, mesh={"x": 8}, options=options)
    used = {axis for c in plan.estimate.communication for axis in c.axes}
    assert used == {"data", "tensor"}
    assert plan.estimate.step_s <= 1.05 * one_axis.estimate.step_s


@pytest.mark.slow
def test_transformer_layers_reduce_activations_four_times_each():
    """Where all that is sent is waited for."""
    layers = 1
    config = presets.preset("6.7b", num_layers=layers, context_length=512, remat=False, vocab_size=1024)
    functions = train_step.build(config, train_step.adamw())
    state = jax.eval_shape(functions.init, 0)
    batch = train_step.batch_shapes(batch_size=8, sequence_length=512)
    options = autoshard.PlanOptions(schedule=autoshard.Schedule.LEAST_MEMORY)
    plan = planned(functions.step, state, batch, mesh={"tensor": 8}, options=options)
    entries = {a.name.split("blocks.0.")[-1]: a.entries for a in plan.arguments if "params.blocks.0" in a.name}
    split = ("tensor",)
    assert entries["mlp.up.kernel"] == ((), split) and entries["mlp.down.kernel"] == (split, ())
    assert entries["attention.query.kernel"] == ((), split, ()) and entries["attention.output.kernel"] == (
        split,
        (),
        (),
    )
    activations = [
        c
        for c in plan.estimate.communication
        if c.kind in ("all-reduce", "reduce-scatter") and c.shape == (8, 512, 4096)
    ]
    assert len(activations) == 4 * layers
    found = compiled_collectives(plan, functions.step, state, batch)
    large = sum(n for (kind, shape), n in found.items() if kind == "all-reduce" and "[8,512,4096]" in shape)
    assert large == 4 * layers


def test_a_tight_budget_turns_data_parallelism_into_zero_3():
    """Weights are gathered for each use, but for the first layer's in the backward pass, which needs no input
    gradient.
    """
    step, state, data = mlp(width=1024, batch=16384)
    batch_split = {"data.*": jax.sharding.PartitionSpec("data")}
    settings = {"mesh": {"data": 8}, "pins": batch_split, "cluster": without_workspace()}
    free = planned(step, state, data, **settings)
    with pytest.raises(autoshard.errors.MemoryBudgetError) as refusal:
        planned(step, state, data, **settings, memory_budget_bytes=0.5 * free.estimate.peak_bytes)
    least = float(re.search(r"memory_budget_bytes=(\d+)", str(refusal.value)).group(1))
    tight = planned(step, state, data, **settings, memory_budget_bytes=least)
    assert tight.estimate.peak_bytes <= least < free.estimate.peak_bytes
    assert tight.estimate.step_s > free.estimate.step_s
    matrices = [a for a in tight.arguments if len(a.shape) == 2]
    assert all(any(a.entries) for a in matrices)
    counts = collections.Counter(c.kind for c in tight.estimate.communication if c.shape == (1024, 1024))
    assert counts == {"all-gather": 2 * DEPTH - 1, "reduce-scatter": DEPTH}
    # XLA:CPU makes more, for want of reduce-scatters; XLA:GPU makes exactly these (6 fused into one, 5, and 1
    # reduce-scatter)
    assert kinds(compiled_collectives(tight, step, state, data))["all-gather"] >= 2 * DEPTH - 1
