"""Durations of an arrangement, derived by hand."""

import dataclasses
import importlib.util
import pathlib

import pytest

from autoshard.pipelines.cost.interval_costs import IntervalCostTable
from autoshard.pipelines.cost.layers import Activation, Layers, SharedWeight
from autoshard.pipelines.cost.table import CostTable
from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.arrangement import Arrangement, Pipeline, Stage, Submesh
from autoshard.pipelines.search.step_durations import step_durations
from autoshard.pipelines.search.topology import Topology

_spec = importlib.util.spec_from_file_location("case", pathlib.Path(__file__).with_name("case.py"))
case = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(case)

INSIDE_S, BETWEEN_S = 1e-6, 5e-6
INSIDE, BETWEEN = 1e11, 1e10


def durations(layers, table, cluster, *pipelines):
    return step_durations(IntervalCostTable(layers, table), Topology(cluster, table), Arrangement(pipelines)).pipelines


def test_a_stage_is_the_sum_of_its_layers_and_may_be_computed_again():
    cluster = case.cluster(1)
    layers = case.chain([0, 1, 0])
    table = case.plain_table(cluster, 2, (2,), weight=100.0, residual=10.0, inputs=3.0)
    for again, backward_s, held, working in ((False, 4e-3, 30.0, 0.0), (True, 8e-3, 3.0, 30.0)):
        pipeline = Pipeline((Submesh(0, 0, 0),), (Stage(0, 3, again),), 2, 4, ScheduleKind.GPIPE)
        (found,) = durations(layers, table, cluster, pipeline)
        (stage,) = found.stages
        # kinds 0, 1, 0 take 1 + 2 + 1 ms forward for two examples at 2 TFLOP/s
        assert (stage.forward_s, stage.backward_s, stage.weight_s) == pytest.approx((4e-3, backward_s, 4e-3))
        assert (stage.residual_bytes, stage.working_bytes) == (held, working)
        assert stage.fixed_bytes == 3 * (100 + 100 + 200)  # weights, gradient sums, optimizer state
        assert found.weights_s == found.gradients_s == (0.0,)


def test_transfers_go_to_each_reader_and_use_the_smaller_side():
    cluster = case.cluster(4, 4)
    layers = Layers(
        (0, 0, 0),
        ("a", "b", "c"),
        (Activation(0, (1, 2), 1e6), Activation(0, (2,), 7e6, is_shared=True, has_gradient=False)),
    )
    table = case.plain_table(cluster, 1, (3,), counts=(1, 2))
    submeshes = (
        Submesh(0, 0, 1),
        Submesh(0, 2, 0),
        Submesh(1, 0, 3),
    )  # two devices, one beside them, two in the other node
    stages = (Stage(0, 1), Stage(1, 2), Stage(2, 3))
    (found,) = durations(layers, table, cluster, Pipeline(submeshes, stages, 3, 2, ScheduleKind.ONE_F_ONE_B))
    near, far = found.transfers
    assert (near.source, near.target, far.source, far.target) == (0, 1, 0, 2)
    assert near.forward_s == near.backward_s == pytest.approx(INSIDE_S + 3e6 / INSIDE)
    assert far.forward_s == pytest.approx(BETWEEN_S + (3e6 + 7e6) / (2 * BETWEEN))
    assert far.backward_s == pytest.approx(BETWEEN_S + 3e6 / (2 * BETWEEN))


def test_replicas_own_equal_parts_of_the_weights():
    """Three replicas, two of them in one node: each sends and gets a third of 6 GB to and from both others."""
    cluster = case.cluster(2, 1)
    layers = case.chain([0, 0])
    table = case.plain_table(cluster, 1, (1,), weight=3e9)
    table = CostTable(table.options, {k: dataclasses.replace(c, update_s=0.3) for k, c in table.costs.items()})
    replicas = [
        Pipeline((submesh,), (Stage(0, 2),), 1, 2, ScheduleKind.GPIPE)
        for submesh in (Submesh(0, 0, 0), Submesh(0, 1, 0), Submesh(1, 0, 1))
    ]
    first, _, last = durations(layers, table, cluster, *replicas)
    near_s, far_s = INSIDE_S + 2e9 / INSIDE, BETWEEN_S + 2e9 / BETWEEN
    added_s = 3 * 2 * 2e9 / 1e12  # two copies of the third that it owns; reading two, writing one
    assert first.weights_s == pytest.approx((near_s + far_s,))
    assert first.gradients_s == pytest.approx((near_s + far_s + added_s,))
    assert last.weights_s == pytest.approx((2 * far_s,))
    assert first.update_s == pytest.approx((0.6 / 3,))
    assert first.stages[0].fixed_bytes == pytest.approx(6e9 + 6e9 + 12e9 / 3)


def test_replicas_that_are_cut_otherwise_send_to_those_that_hold_the_layer():
    cluster = case.cluster(3)
    layers = case.chain([0, 0])
    table = case.plain_table(cluster, 1, (1,), weight=1e9)
    whole = Pipeline((Submesh(0, 0, 0),), (Stage(0, 2),), 1, 2, ScheduleKind.GPIPE)
    halves = Pipeline((Submesh(0, 1, 0), Submesh(0, 2, 0)), (Stage(0, 1), Stage(1, 2)), 1, 2, ScheduleKind.GPIPE)
    one, two = durations(layers, table, cluster, whole, halves)
    each_s = INSIDE_S + 0.5e9 / INSIDE
    assert one.weights_s == pytest.approx((2 * each_s,))
    assert two.weights_s == pytest.approx((each_s, each_s))


def test_a_tied_weight_is_sent_from_its_first_reader_and_kept_once_on_a_stage():
    cluster = case.cluster(2)
    layers = dataclasses.replace(case.chain([0, 0, 0]), shared_weights=(SharedWeight((0, 2), 4e8),))
    table = case.plain_table(cluster, 1, (1,), weight=1e9)
    submeshes = (Submesh(0, 0, 0), Submesh(0, 1, 0))
    (cut,) = durations(
        layers, table, cluster, Pipeline(submeshes, (Stage(0, 1), Stage(1, 3)), 1, 2, ScheduleKind.GPIPE)
    )
    sent_s = INSIDE_S + 4e8 / INSIDE
    assert cut.weights_s == pytest.approx((sent_s, sent_s))
    assert cut.gradients_s == pytest.approx((sent_s + 3 * 4e8 / 1e12, sent_s))
    assert cut.stages[1].fixed_bytes == pytest.approx(2 * 2e9 + 2e9 + 0.6 * 2e9)  # of the last, the tied state is away
    (whole,) = durations(layers, table, cluster, Pipeline(submeshes[:1], (Stage(0, 3),), 1, 2, ScheduleKind.GPIPE))
    assert whole.weights_s == (0.0,)
    assert whole.stages[0].fixed_bytes == pytest.approx(2.6 * (1e9 + 1e9 + 2e9))


def test_submeshes_lie_within_the_level_that_holds_them():
    """Three devices a submesh in nodes of eight: two submeshes in each node, none across."""
    part = case.Cluster(
        "two nodes", (dataclasses.replace(case.cluster(8).groups[0], num_nodes=2, inter_node=case.BETWEEN),)
    )
    table = case.plain_table(part, 1, (1,), counts=(1, 3))
    topology = Topology(part, table)
    assert topology.num_submeshes(1) == 4
    assert [topology.submesh(1, i).first_device for i in range(4)] == [0, 3, 8, 11]
    assert topology.speed(topology.submesh(1, 0), topology.submesh(1, 1)).bandwidth_bytes_per_s == INSIDE
    assert topology.speed(topology.submesh(1, 1), topology.submesh(1, 2)).bandwidth_bytes_per_s == BETWEEN
