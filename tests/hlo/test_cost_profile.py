"""Cost profiles of programs written by hand, whose costs follow from the cost model's formulas by arithmetic."""

import dataclasses
import pathlib
import re

import pytest

from autoshard.cluster import Cluster, DeviceType
from autoshard.hlo.cost_profile import cost_profile, instruction_costs
from autoshard.hlo.instruction_pricing import collectives_s
from autoshard.hlo.module import parse
from autoshard.hlo.queued_collectives import queued_in_flight_s

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
    module = parse(PROGRAM)
    in_flight_s = {name: 1.5 * s for name, s in collectives_s(module, MESH).items()}
    alone, queued = (
        {c.name: c.time_s for c in instruction_costs(module, MESH, given_s)} for given_s in (None, in_flight_s)
    )
    sent = {"gather", "scatter"}
    assert queued == {name: pytest.approx(s * (1.5 if name in sent else 1)) for name, s in alone.items()}


CHAIN = f"""HloModule test, is_scheduled=true

%body (t: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {{
  %t = (s32[], f32[1024,1024]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %b = f32[1024,1024]{{1,0}} get-tuple-element(%t), index=1
  %early = (f32[1024,1024]{{1,0}}, f32[8192,1024]{{1,0}}) all-gather-start(%b), channel_id=5, {GROUPS}, \
dimensions={{0}}, use_global_device_ids=true
  %inner = f32[1024,1024]{{1,0}} dot(%b, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %there = f32[8192,1024]{{1,0}} all-gather-done(%early)
  %outer = f32[1024,1024]{{1,0}} dot(%inner, %there), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  ROOT %o = (s32[], f32[1024,1024]{{1,0}}) tuple(%i, %outer)
}}

%condition (u: (s32[], f32[1024,1024])) -> pred[] {{
  %u = (s32[], f32[1024,1024]{{1,0}}) parameter(0)
  ROOT %c = pred[] constant(true)
}}

ENTRY %main (p: f32[1024,1024]) -> f32[1024,1024] {{
  %p = f32[1024,1024]{{1,0}} parameter(0)
  %zero = f32[1024,1024]{{1,0}} dot(%p, %p), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %first = (f32[1024,1024]{{1,0}}, f32[8192,1024]{{1,0}}) all-gather-start(%p), channel_id=3, {GROUPS}, \
dimensions={{0}}, use_global_device_ids=true
  %gathered = f32[8192,1024]{{1,0}} all-gather-done(%first)
  %again = f32[8192,1024]{{1,0}} bitcast(%gathered)
  %second = ((f32[8192,1024]{{1,0}}), f32[1024,1024]{{1,0}}) all-to-all-start(%again), channel_id=4, {GROUPS}
  %one = f32[1024,1024]{{1,0}} dot(%zero, %p), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %moved = f32[1024,1024]{{1,0}} all-to-all-done(%second)
  %two = f32[1024,1024]{{1,0}} dot(%one, %moved), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %z = s32[] constant(0)
  %entered = (s32[], f32[1024,1024]{{1,0}}) tuple(%z, %two)
  %loop = (s32[], f32[1024,1024]{{1,0}}) while(%entered), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"5"}}}}
  ROOT %left = f32[1024,1024]{{1,0}} get-tuple-element(%loop), index=1
}}
""".replace("\\\n", "")


def test_collectives_are_in_flight_from_when_the_link_is_free():
    """A gather that nothing waits for is begun before the product, and is in flight until the end; the sum of what that
    makes, from when it is made. Of the kernels that they begin before, half may take less than was thought."""
    in_flight_s = queued_in_flight_s(parse(PROGRAM), MESH)
    product_s, narrow_s = 1e-6 + 2 * 1024**3 / 1e12, 1e-6 + (4 + 2) * 1024**2 / 1e12
    behind_s = narrow_s + 5 * (1e-6 + 2 * 1024**3 / 8e12)
    expected = {"gather.1": product_s / 2 + behind_s, "scattered": behind_s - narrow_s / 2}
    assert in_flight_s == {name: pytest.approx(s) for name, s in expected.items()}


@pytest.mark.parametrize("is_sync", [False, True])
def test_what_is_sent_on_is_in_flight_until_then_and_loops_are_queued_by_themselves(is_sync):
    """The exchange sends what is gathered, and kernel `two` reads it: one begins before `zero`, which the program has
    before it, and the other when it is there. In the loop a gather hides behind the product before its reader. That
    kernels wait for a collective at once in this schedule need not be so in the next."""
    product_s, text = 1e-6 + 2 * 1024**3 / 1e12, CHAIN
    if is_sync:
        sync = ', backend_config={"collective_backend_config":{"is_sync":true}}'
        text = re.sub("channel_id=[34], .*", lambda found: found[0] + sync, CHAIN)
        assert text.count("is_sync") == 2
    assert queued_in_flight_s(parse(text), MESH) == {
        "first": pytest.approx(product_s / 2),
        "second": pytest.approx(product_s / 2),
        "early": pytest.approx(product_s / 2),
    }


ROUNDED = f"""HloModule test, is_scheduled=true

ENTRY %main (p: f32[1024,1024], w: f32[128,1024]) -> f32[1024,1024] {{
  %p = f32[1024,1024]{{1,0}} parameter(0)
  %w = f32[128,1024]{{1,0}} parameter(1)
  %zero = f32[1024,1024]{{1,0}} dot(%p, %p), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %rounded = bf16[128,1024]{{1,0}} convert(OF)
  %gather = (bf16[128,1024]{{1,0}}, bf16[1024,1024]{{1,0}}) all-gather-start(%rounded), channel_id=1, {GROUPS}, \
dimensions={{0}}, use_global_device_ids=true
  %gathered = bf16[1024,1024]{{1,0}} all-gather-done(%gather)
  ROOT %one = f32[1024,1024]{{1,0}} dot(%zero, %gathered), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
""".replace("\\\n", "")


@pytest.mark.parametrize(("rounded", "is_early"), [("%w", True), ("%zero", False)])
def test_what_only_makes_what_is_sent_comes_as_early_as_the_collective_needs_it(rounded, is_early):
    """A weight is rounded right before it is gathered: both can come before the product. What that makes cannot. The
    gather takes far longer than the rounding."""
    link = dataclasses.replace(LINK, latency_s=1e-6, bandwidth_bytes_per_s=2e10)
    (axis,) = MESH.axes
    levels = (dataclasses.replace(axis.levels[0], link=link),)
    mesh = dataclasses.replace(MESH, axes=(dataclasses.replace(axis, levels=levels),))
    (in_flight_s,) = queued_in_flight_s(parse(ROUNDED.replace("OF", rounded)), mesh).values()
    product_s, read_bytes = 1e-6 + 2 * 1024**3 / 1e12, 4 * 1024 * (128 if is_early else 1024)
    rounding_s = 1e-6 + (read_bytes + 2 * 128 * 1024) / 1e12
    assert in_flight_s == pytest.approx(product_s / 2 + rounding_s if is_early else rounding_s / 2)
