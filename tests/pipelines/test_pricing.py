"""What layers cost: equal ones once, and as the plans of them say."""

import itertools
import math
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest

from autoshard import PlanOptions, TrainStep
from autoshard.cluster import Cluster, DeviceType, Link, NodeGroup
from autoshard.errors import StageError
from autoshard.pipelines.cost.pricing import PricedLayers, layer_cost, optimizer_ratio, price_layers
from autoshard.pipelines.cost.stage import StageCost, plan_stage, stage_cost, trace_stage
from autoshard.pipelines.cost.stage_meshes import stage_meshes, sub_slice
from autoshard.pipelines.cost.table import CostKey
from autoshard.pipelines.cost.traced_model import trace_model

WIDTH, HIDDEN, WORDS, LENGTH, BATCH = 16, 32, 64, 8, 8
OPTIONS = PlanOptions(cache=False)


def loss_fn(params, batch, key):
    """Three blocks between tied embeddings; the first also makes whole numbers, which are read behind the last."""
    x = params["table"][batch["words"]]
    numbers = jnp.int32(x[..., 0])
    for block in params["blocks"]:
        x = x + jnp.tanh(x @ block["up"]) @ block["down"]
    logits = x @ params["table"].T + numbers[..., None]
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch["next"], WORDS)).mean(), {}


def arguments() -> tuple[TrainStep, object, object]:
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    block = {"up": shape(WIDTH, HIDDEN), "down": shape(HIDDEN, WIDTH)}
    step = TrainStep(loss_fn, optax.adam(1e-3))
    state = jax.eval_shape(step.init, {"table": shape(WORDS, WIDTH), "blocks": [block] * 3})
    words = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    return step, state, {"words": words, "next": words}


def cluster() -> Cluster:
    """Two devices, and one that is half as fast."""
    made_up = "made up for this test"
    device = lambda name, flops: DeviceType(name, {"float32": flops}, 10**9, 1e9, 0.0, made_up)
    group = lambda name, flops, n: NodeGroup(name, device(name, flops), 1, n, Link(1e-6, 1e9, 0, made_up))
    return Cluster("mixed", (group("fast", 1e9, 2), group("slow", 5e8, 1)), Link(1e-6, 1e9, 1, made_up))


@pytest.fixture(scope="module")
def priced() -> PricedLayers:
    return price_layers(*arguments(), cluster(), (2, 4), OPTIONS)


def test_equal_layers_are_one_kind(priced):
    layers = priced.layers
    assert layers.names == ("table (1)", "blocks.0", "blocks.1", "blocks.2", "table (2)")
    assert layers.kinds == (0, 1, 2, 2, 3) and priced.warnings == ()


def test_what_layers_share_and_send(priced):
    layers = priced.layers
    (table,) = layers.shared_weights
    assert table.readers == (0, 4) and table.size_bytes == 4 * WORDS * WIDTH
    stream = 4 * LENGTH * WIDTH
    found = [(c.source, c.readers, c.example_bytes, c.has_gradient) for c in layers.activations]
    assert [f for f in found if f[3]] == [(k, (k + 1,), stream, True) for k in range(4)]
    assert [f for f in found if not f[3]] == [(1, (4,), 4 * LENGTH, False)]
    assert not any(c.is_shared for c in layers.activations)


def test_every_kind_has_a_cost_for_every_mesh_and_size(priced):
    table = priced.table
    assert [o.num_devices for o in table.options] == [1, 2, 1, 2] and [o.shards_weights for o in table.options][-1]
    for kind, size in itertools.product(range(4), (2, 4)):
        costs = [table.costs[CostKey(kind, option, size)] for option in range(4)]
        for cost in costs:
            assert min(cost.forward_s, cost.backward_s + cost.weight_s, cost.update_s) > 0
            assert min(cost.weight_bytes, cost.gradient_bytes, cost.working_bytes) > 0
            assert (cost.residual_bytes > 0) == (kind > 0)  # an embedding holds words alone, which are an argument
            assert cost.optimizer_bytes == pytest.approx(2 * cost.gradient_bytes, rel=0.01)  # two moments
        fast, slow = costs[0], costs[2]
        assert (fast.forward_s < slow.forward_s) == (kind > 0)  # memory is what an embedding waits for
        assert fast.residual_bytes == slow.residual_bytes
        assert costs[3].weight_bytes <= costs[1].weight_bytes  # lean: split over both devices
    assert priced.models.keys() == {2, 4}


def test_residuals_grow_with_the_micro_batch_and_weights_do_not(priced):
    small, large = (priced.table.costs[CostKey(2, 0, size)] for size in (2, 4))
    assert large.residual_bytes == 2 * small.residual_bytes
    assert large.weight_bytes == small.weight_bytes == small.weight_total_bytes == 4 * 2 * WIDTH * HIDDEN
    # a block holds what it reads and what comes out of its first product
    assert small.residual_bytes == 4 * 2 * LENGTH * (WIDTH + HIDDEN)
    assert small.input_bytes == 4 * 2 * LENGTH * WIDTH


@pytest.mark.parametrize("rematerialise", [False, True])
def test_phases_add_up_to_the_step_of_the_plan(rematerialise):
    model = trace_model(*arguments(), 4)
    stage = trace_stage(model.forward, model.stages.program(1, 3), rematerialise)
    mesh = cluster().slices()[0].logical_mesh({"data": 2})
    plan = plan_stage(stage, mesh, "mixed", math.inf, OPTIONS)
    cost = stage_cost(stage, plan)
    assert cost.forward_s + cost.backward_s + cost.weight_s == pytest.approx(plan.estimate.step_s, rel=1e-6)
    assert min(cost.forward_s, cost.backward_s) > 0
    assert (cost.weight_s > 0) != rematerialise  # one equation makes all gradients of what is computed again


def test_the_update_of_a_layer():
    """By hand: it reads sums (10 bytes), state (20) and weights and writes state and weights, which lie like the sums,
    at 1e9 bytes a second; then it gathers the 30 bytes of weights that the sums do not have, after 1e-6 s.
    """
    cost = StageCost(1.0, 2.0, 3.0, 40.0, 10.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    made = layer_cost(cost, cluster().slices()[0].logical_mesh({"data": 2}), 2.0, 40.0)
    assert made.optimizer_bytes == 20.0
    assert made.update_s == pytest.approx((3 * 10 + 2 * 20) / 1e9 + 30 / 1e9 + 1e-6)
    assert layer_cost(cost, cluster().slices()[1].logical_mesh({"data": 1}), 2.0, 0.0).update_s == 0.0  # no weights
    _, state, _ = arguments()
    assert optimizer_ratio(state) == pytest.approx(2.0, rel=1e-3)


def test_meshes_are_parts_of_a_node_or_whole_nodes():
    part = Cluster.from_file(pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x16.yaml").slices()[0]
    found = [dict((axis.name, axis.size) for axis in mesh.axes) for mesh in stage_meshes(part, 16)]
    assert found == [{"data": n} for n in (1, 2, 4, 8, 16)] + [{"data": 2, "tensor": 8}]
    assert [m.num_devices for m in stage_meshes(part, 4)] == [1, 2, 4]
    assert sub_slice(part, 12) is None and sub_slice(part, 3) is None and sub_slice(part, 32) is None
    assert sub_slice(part, 16) == part


def test_micro_batches_that_cannot_be_planned_are_told():
    step, state, batch = arguments()
    with pytest.raises(StageError, match="No layer of the model can be planned for micro-batches of"):
        price_layers(step, state, batch, cluster(), (), OPTIONS)
