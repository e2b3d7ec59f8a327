"""Copies between a device and its host in compiled programs: what they take when a schedule is replayed."""

import dataclasses
import pathlib

import pytest

from autoshard.cluster import Cluster
from autoshard.hlo.compiled_schedule import replay
from autoshard.hlo.cost_profile import instruction_costs
from autoshard.hlo.module import parse

CLUSTER = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x8_cpu.yaml"


def test_kernels_wait_for_copies_from_the_host():
    """By hand, on a program of one copy: latency and bytes over the link; no time where nothing is told of the host."""
    text = """HloModule m, is_scheduled=true, entry_computation_layout={(f32[1024]{0:S(5)})->f32[1024]{0}}

ENTRY %main (p: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0:S(5)} parameter(0)
  %copy-start = (f32[1024]{0}, f32[1024]{0:S(5)}, u32[]) copy-start(%p)
  ROOT %copy-done = f32[1024]{0} copy-done(%copy-start)
}
"""
    mesh = Cluster.from_file(CLUSTER).slices()[0].logical_mesh({"data": 8})
    link = mesh.host_link
    assert link is not None
    step = replay(parse(text), mesh)
    assert step.host_s == step.step_s == pytest.approx(link.latency_s + 4096 / link.bandwidth_bytes_per_s)
    told_nothing = dataclasses.replace(mesh, host=None)
    assert replay(parse(text), told_nothing).step_s == 0
    (cost,) = instruction_costs(parse(text), mesh)
    assert cost.time_s == step.host_s
