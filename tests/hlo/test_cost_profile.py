"""Cost profiles of programs written by hand, whose costs follow from the cost model's formulas by arithmetic."""

import dataclasses
import pathlib

import pytest

from autoshard.cluster import Cluster, DeviceType
from autoshard.hlo.cost_profile import cost_profile, instruction_costs
from autoshard.hlo.module import parse

H100X8 = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x8.yaml"
RATES = (("bfloat16", 8e12), ("float32", 1e12))
DEVICE = DeviceType("simple", RATES, 80 * 10**9, 1e12, 1e-6, "made for this test")
MESH = dataclasses.replace(Cluster.from_file(H100X8).slices()[0].logical_mesh({"data": 8}), device_type=DEVICE)
LINK = MESH.axes[0].levels[0].link
GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}"
PROGRAM = f"""HloModule test, is_scheduled=true

%sum (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}}

%wrapped (q: f32[1024,1024]) -> f32[128,1024] {{
  %q = f32[1024,1024]{{1,0}} parameter(0)
  ROOT %scattered = f32[128,1024]{{1,0}} reduce-scatter(%q), channel_id=2, {GROUPS}, dimensions={{0}}, to_apply=%sum
}}

%body (t: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {{
  %t = (s32[], bf16[1024,1024]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %b = bf16[1024,1024]{{1,0}} get-tuple-element(%t), index=1
  %inner = bf16[1024,1024]{{1,0}} dot(%b, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %o = (s32[], bf16[1024,1024]{{1,0}}) tuple(%i, %inner)
}}

%condition (u: (s32[], bf16[1024,1024])) -> pred[] {{
  %u = (s32[], bf16[1024,1024]{{1,0}}) parameter(0)
  ROOT %c = pred[] constant(true)
}}

ENTRY %main (p: f32[1024,1024]) -> f32[128,1024] {{
  %p = f32[1024,1024]{{1,0}} parameter(0)
  %gather.1 = (f32[1024,1024]{{1,0}}, f32[8192,1024]{{1,0}}) all-gather-start(%p), channel_id=1, {GROUPS}, \
dimensions={{0}}, use_global_device_ids=true, metadata={{op_name="a" scheduling_name="gather"}}
  %product = f32[1024,1024]{{1,0}} dot(%p, %p), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %narrow = bf16[1024,1024]{{1,0}} convert(%product)
  %z = s32[] constant(0)
  %first = (s32[], bf16[1024,1024]{{1,0}}) tuple(%z, %narrow)
  %loop = (s32[], bf16[1024,1024]{{1,0}}) while(%first), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"5"}}}}
  %gathered = f32[8192,1024]{{1,0}} all-gather-done(%gather.1)
  %scatter = ((f32[1024,1024]{{1,0}}), f32[128,1024]{{1,0}}) async-start(%product), calls=%wrapped
  ROOT %done = f32[128,1024]{{1,0}} async-done(%scatter)
}}
""".replace("\\\n", "")


def ring_s(whole_bytes: float) -> float:
    """Seven hops in a node, seven eighths of the bytes, and a launch."""
    return 1e-6 + 7 * LINK.latency_s + 7 / 8 * whole_bytes / LINK.bandwidth_bytes_per_s


def test_each_instruction_costs_what_the_cost_model_says():
    """Kernels by the rate of their type or by their bytes, collectives by their rings, a loop as all its kernels."""
    costs = instruction_costs(parse(PROGRAM), MESH)
    inner_s = 1e-6 + 2 * 1024**3 / 8e12
    assert {c.name: c.time_s for c in costs} == {
        "gather": pytest.approx(ring_s(8 * 4 * 1024**2)),
        "product": pytest.approx(1e-6 + 2 * 1024**3 / 1e12),
        "narrow": pytest.approx(1e-6 + (4 + 2) * 1024**2 / 1e12),
        "inner": pytest.approx(inner_s),
        "loop": pytest.approx(5 * inner_s),
        "scatter": pytest.approx(ring_s(4 * 1024**2)),
    }
    assert len(costs) == 6


def test_the_profile_is_a_text_proto_in_microseconds():
    lines = cost_profile(instruction_costs(parse(PROGRAM), MESH)).splitlines()
    assert lines[0] == f'costs {{ name: "gather" cost_us: {1e6 * ring_s(8 * 4 * 1024**2):.3f} }}'
    assert f'costs {{ name: "product" cost_us: {1 + 2 * 1024**3 / 1e6:.3f} }}' in lines and len(lines) == 6


def test_collectives_that_queue_take_longer_and_nothing_else_does():
    alone, queued = (
        {c.name: c.time_s for c in instruction_costs(parse(PROGRAM), MESH, factor)} for factor in (1.0, 1.5)
    )
    sent = {"gather", "scatter"}
    assert queued == {name: pytest.approx(s * (1.5 if name in sent else 1)) for name, s in alone.items()}
