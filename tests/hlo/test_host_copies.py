"""Copies between a device and its host in compiled programs: what they take when a schedule is replayed."""

import dataclasses
import pathlib

import pytest

from autoshard.cluster import Cluster
from autoshard.hlo.compiled_schedule import replay
from autoshard.hlo.cost_profile import instruction_costs
from autoshard.hlo.module import parse

CLUSTER = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x8_cpu.yaml"


def one_copy(num_elements: int) -> str:
    """A program that copies so many float32 from the host."""
    here, there = f"f32[{num_elements}]{{0}}", f"f32[{num_elements}]{{0:S(5)}}"
    return f"""HloModule m, is_scheduled=true, entry_computation_layout={{({there})->{here}}}

ENTRY %main (p: f32[{num_elements}]) -> f32[{num_elements}] {{
  %p = {there} parameter(0)
  %copy-start = ({here}, {there}, u32[]) copy-start(%p)
  ROOT %copy-done = {here} copy-done(%copy-start)
}}
"""


@pytest.fixture
def mesh():
    return Cluster.from_file(CLUSTER).slices()[0].logical_mesh({"data": 8})


@pytest.mark.parametrize("num_elements", [1024, 2**28])
def test_kernels_wait_for_copies_from_the_host(mesh, num_elements):
    """By hand, on a program of one copy: latency and bytes over the link; no time where nothing is told of the host."""
    link, program = mesh.host_link, parse(one_copy(num_elements))
    assert link is not None
    step = replay(program, mesh)
    copied_s = link.latency_s + 4 * num_elements / link.bandwidth_bytes_per_s
    assert step.host_s == step.step_s == pytest.approx(copied_s)
    assert replay(program, dataclasses.replace(mesh, host=None)).step_s == 0


def test_the_scheduler_is_told_of_copies_that_take_longer_than_it_believes(mesh):
    """1 GiB takes 17 ms over PCIe 5, more than the 5 ms that XLA takes for granted; 4 KiB and 256 MiB (4.2 ms) less."""
    (cost,) = instruction_costs(parse(one_copy(2**28)), mesh)
    assert cost.time_s == replay(parse(one_copy(2**28)), mesh).host_s
    assert instruction_costs(parse(one_copy(1024)), mesh) == ()
    assert instruction_costs(parse(one_copy(2**26)), mesh) == ()
