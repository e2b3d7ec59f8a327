"""The replay of scheduled programs, on programs written by hand whose times follow from the rules by arithmetic."""

import dataclasses
import pathlib
import textwrap

import pytest

from autoshard.cluster import Cluster, DeviceType
from autoshard.hlo.compiled_schedule import ScheduledStep, replay
from autoshard.hlo.module import parse

H100X8 = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x8.yaml"
DEVICE = DeviceType("simple", (("float32", 1e12),), 80 * 10**9, 1e9, 1e-6, "made for this test")
MESH = dataclasses.replace(Cluster.from_file(H100X8).slices()[0].logical_mesh({"data": 8}), device_type=DEVICE)
LINK = MESH.axes[0].levels[0].link
PRODUCT_S = 1e-6 + 2 * 1024**3 / 1e12
"""The arithmetic of a product of two matrices of 1024 x 1024: 2.15 ms."""
GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, use_global_device_ids=true"
KERNEL_S = 1e-6 + 3 * 4 * 1024 * 1024 / 1e9
"""The bytes of such a product, which take longer: 12.6 ms."""


def gather_s(whole_bytes: float) -> float:
    """A ring over eight devices of a node, and a launch."""
    launch_s = MESH.device_type.launch_overhead_s
    return launch_s + 7 * LINK.latency_s + 7 / 8 * whole_bytes / LINK.bandwidth_bytes_per_s


def step(body: str, others: str = "") -> ScheduledStep:
    entry = (
        "ENTRY %main (p: f32[1024,1024]) -> f32[1024,1024] {\n" + textwrap.indent(textwrap.dedent(body), "  ") + "}\n"
    )
    return replay(parse(f"HloModule test, is_scheduled=true\n\n{textwrap.dedent(others)}\n{entry}"), MESH)


DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def test_a_kernel_takes_the_longer_of_arithmetic_and_memory():
    done = step(f"""\
        %p = f32[1024,1024]{{1,0}} parameter(0)
        ROOT %d = f32[1024,1024]{{1,0}} dot(%p, %p), {DOT}
    """)
    assert KERNEL_S > PRODUCT_S
    assert done.step_s == pytest.approx(1e-6 + 3 * 4 * 1024**2 / 1e9)
    assert done.kernel_s == done.step_s and not done.collectives


def test_the_workspace_of_a_library_s_product_is_not_written():
    """1024 x 1024 floats are read twice and written once; 32 MiB that cuBLAS may use do not count."""
    done = step("""\
        %p = f32[1024,1024]{1,0} parameter(0)
        %c = (f32[1024,1024]{1,0}, s8[33554432]{0}) custom-call(%p, %p), custom_call_target="__cublas$lt$matmul"
        ROOT %d = f32[1024,1024]{1,0} get-tuple-element(%c), index=0
    """)
    assert done.step_s == pytest.approx(KERNEL_S)


def test_a_collective_hides_behind_kernels_and_what_is_left_is_exposed():
    body = f"""\
        %p = f32[1024,1024]{{1,0}} parameter(0)
        %g = (f32[1024,1024]{{1,0}}, f32[8192,1024]{{1,0}}) all-gather-start(%p), channel_id=1, {GROUPS}
        %d = f32[1024,1024]{{1,0}} dot(%p, %p), {DOT}
        %e = f32[8192,1024]{{1,0}} all-gather-done(%g)
        ROOT %s = f32[1024,1024]{{1,0}} slice(%e), slice={{[0:1024], [0:1024]}}
    """
    slice_s, sent_s = 1e-6 + 2 * 4 * 1024**2 / 1e9, gather_s(8 * 4 * 1024**2)
    done = step(body)
    assert sent_s < KERNEL_S  # wholly hidden
    assert done.step_s == pytest.approx(KERNEL_S + slice_s)
    assert done.collective_s == pytest.approx(sent_s) and done.exposed_s == 0
    late = step(body.replace("%d = f32[1024,1024]{1,0} dot", "%d = f32[1024,1024]{1,0} add").replace(f", {DOT}", ""))
    assert late.step_s == pytest.approx(done.step_s)  # bytes decide, of a sum as of a product
    now = step(body.replace("(%p), channel_id=1,", '(%p), channel_id=1, backend_config={"is_sync": true},'))
    assert now.step_s == pytest.approx(KERNEL_S + slice_s + sent_s) and now.exposed_s == pytest.approx(sent_s)


def test_collectives_go_one_after_another_and_each_is_told_what_was_waited_for_it():
    done = step(f"""\
        %p = f32[1024,1024]{{1,0}} parameter(0)
        %q = f32[1,1024]{{1,0}} slice(%p), slice={{[0:1], [0:1024]}}
        %a = (f32[1024,1024]{{1,0}}, f32[8192,1024]{{1,0}}) all-gather-start(%p), channel_id=1, {GROUPS}
        %b = (f32[1,1024]{{1,0}}, f32[8,1024]{{1,0}}) all-gather-start(%q), channel_id=2, {GROUPS}
        %r = f32[8,1024]{{1,0}} all-gather-done(%b)
        %e = f32[8192,1024]{{1,0}} all-gather-done(%a)
        ROOT %s = f32[1024,1024]{{1,0}} slice(%e), slice={{[0:1024], [0:1024]}}
    """)
    large_s, small_s = gather_s(8 * 4 * 1024**2), gather_s(8 * 4 * 1024)
    exposed = {c.collective.name: c.exposed_s for c in done.collectives}
    assert exposed == {"a": pytest.approx(large_s), "b": pytest.approx(small_s)}
    assert done.exposed_s == pytest.approx(done.collective_s)


def test_a_loop_repeats_its_body_and_a_call_runs_in_place():
    others = f"""\
        %body (t: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {{
          %t = (s32[], f32[1024,1024]{{1,0}}) parameter(0)
          %i = s32[] get-tuple-element(%t), index=0
          %x = f32[1024,1024]{{1,0}} get-tuple-element(%t), index=1
          %g = (f32[1024,1024]{{1,0}}, f32[8192,1024]{{1,0}}) all-gather-start(%x), channel_id=1, {GROUPS}
          %h = f32[8192,1024]{{1,0}} all-gather-done(%g)
          %d = f32[1024,1024]{{1,0}} dot(%x, %x), {DOT}
          ROOT %o = (s32[], f32[1024,1024]{{1,0}}) tuple(%i, %d)
        }}

        %condition (t: (s32[], f32[1024,1024])) -> pred[] {{
          %t = (s32[], f32[1024,1024]{{1,0}}) parameter(0)
          ROOT %c = pred[] constant(true)
        }}
    """
    done = step(
        """\
        %p = f32[1024,1024]{1,0} parameter(0)
        %z = s32[] constant(0)
        %t = (s32[], f32[1024,1024]{1,0}) tuple(%z, %p)
        %w = (s32[], f32[1024,1024]) while(%t), condition=%condition, body=%body, backend_config={TRIPS}
        ROOT %o = f32[1024,1024]{1,0} get-tuple-element(%w), index=1
        """.replace("{TRIPS}", '{"known_trip_count":{"n":"10"}}'),
        others,
    )
    sent_s = gather_s(8 * 4 * 1024**2)
    assert done.step_s == pytest.approx(10 * (KERNEL_S + sent_s))
    assert done.kernel_s == pytest.approx(10 * KERNEL_S)
    (one,) = done.collectives
    assert one.time_s == pytest.approx(10 * sent_s) and one.exposed_s == pytest.approx(10 * sent_s)


@pytest.mark.parametrize("trips", [1, 3, 10, 100])
def test_what_is_in_flight_goes_on_through_all_iterations_of_a_loop(trips):
    """A gather of 0.55 s begins before a loop of short kernels, and is waited for behind it."""
    others = f"""\
        %body (t: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {{
          %t = (s32[], f32[1024,1024]{{1,0}}) parameter(0)
          %i = s32[] get-tuple-element(%t), index=0
          %x = f32[1024,1024]{{1,0}} get-tuple-element(%t), index=1
          %d = f32[1024,1024]{{1,0}} dot(%x, %x), {DOT}
          ROOT %o = (s32[], f32[1024,1024]{{1,0}}) tuple(%i, %d)
        }}

        %condition (t: (s32[], f32[1024,1024])) -> pred[] {{
          %t = (s32[], f32[1024,1024]{{1,0}}) parameter(0)
          ROOT %c = pred[] constant(true)
        }}
    """
    rows = 2**26 // 8
    done = step(
        """\
        %p = f32[1024,1024]{1,0} parameter(0)
        %q = f32[ROWS,1024]{1,0} parameter(1)
        %z = s32[] constant(0)
        %g = (f32[ROWS,1024]{1,0}, f32[ALL,1024]{1,0}) all-gather-start(%q), channel_id=1, GROUPS
        %t = (s32[], f32[1024,1024]{1,0}) tuple(%z, %p)
        %w = (s32[], f32[1024,1024]) while(%t), condition=%condition, body=%body, backend_config={TRIPS}
        %e = f32[ALL,1024]{1,0} all-gather-done(%g)
        ROOT %o = f32[1024,1024]{1,0} get-tuple-element(%w), index=1
        """.replace("{TRIPS}", f'{{"known_trip_count":{{"n":"{trips}"}}}}')
        .replace("ROWS", str(rows))
        .replace("ALL", str(8 * rows))
        .replace("GROUPS", GROUPS),
        others,
    )
    sent_s, computed_s = gather_s(8 * rows * 4 * 1024), trips * KERNEL_S
    assert 10 * KERNEL_S < sent_s < 100 * KERNEL_S
    assert done.step_s == pytest.approx(max(sent_s, computed_s))
    assert done.exposed_s == pytest.approx(max(sent_s - computed_s, 0))


def test_a_fusion_reads_slices_and_updates_in_place():
    others = """\
        %fused (a: f32[1024,1024], b: f32[1024,1024], i: s32[]) -> f32[1024,1024] {
          %a = f32[1024,1024]{1,0} parameter(0)
          %b = f32[1024,1024]{1,0} parameter(1)
          %i = s32[] parameter(2)
          %s = f32[1,1024]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,1024}
          ROOT %u = f32[1024,1024]{1,0} dynamic-update-slice(%b, %s, %i, %i)
        }
    """
    done = step(
        """\
        %p = f32[1024,1024]{1,0} parameter(0)
        %i = s32[] constant(3)
        ROOT %f = f32[1024,1024]{1,0} fusion(%p, %p, %i), kind=kLoop, calls=%fused
        """,
        others,
    )
    assert done.step_s == pytest.approx(1e-6 + (2 * 4 * 1024 + 4) / 1e9)  # a row read, a row written, and the index
