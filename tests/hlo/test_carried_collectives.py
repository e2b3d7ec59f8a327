"""Collectives inside the fusions of XLA:TPU, in programs written by hand: who carries them, and what is waited for."""

import dataclasses
import pathlib
import textwrap

import pytest

from autoshard.cluster import Cluster
from autoshard.hlo.carried_collectives import Carried, carried_collectives
from autoshard.hlo.compiled_schedule import replay
from autoshard.hlo.cycles import estimated_cycles
from autoshard.hlo.module import HloModule, parse

V5EX8 = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "tpu-v5e-x8.yaml"
MESH = Cluster.from_file(V5EX8).slices()[0].logical_mesh({"data": 8})
LINK, LAUNCH_S = MESH.axes[0].levels[0].link, MESH.device_type.launch_overhead_s
GATHER_S = LAUNCH_S + 7 * LINK.latency_s + 7 / 8 * 4 * 8192 * 1024 / LINK.bandwidth_bytes_per_s
"""A ring over eight chips for 8,192 x 1,024 numbers of four bytes."""
CLOCK_GHZ = 1.0


def program(fusions: str) -> HloModule:
    """`%start` and `%done` begin and end channel 1, `%beside` carries it on, `%alone` has channel 2 for itself."""
    gather = "all-gather(%q), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, use_global_device_ids=true"
    computations = "".join(
        f"%{name} (q: f32[1024,1024]) -> f32[8192,1024] {{\n"
        "  %q = f32[1024,1024] parameter(0)\n"
        f"  ROOT %{collective} = f32[8192,1024] {gather}, channel_id={channel}\n}}\n\n"
        for name, collective, channel in (("start", "a", 1), ("beside", "b", 1), ("done", "c", 1), ("alone", "d", 2))
    )
    computations += "%other (q: f32[1024,1024]) -> f32[1024,1024] {\n  ROOT %q = f32[1024,1024] parameter(0)\n}\n\n"
    body = textwrap.indent(textwrap.dedent(fusions), "  ")
    return parse(
        f"HloModule test, is_scheduled=true\n\n{computations}ENTRY %main (p: f32[1024,1024]) -> f32[8192,1024] {{\n"
        f"  %p = f32[1024,1024] parameter(0)\n{body}}}\n"
    )


def fusion(name: str, calls: str, time_s: float = 0.0) -> str:
    """A fusion that takes so long by the cycles that the compiler tells; it tells none of what takes none."""
    cycles = f', backend_config={{"window_config":{{"estimated_cycles":"{round(time_s * CLOCK_GHZ * 1e9)}"}}}}'
    return f"%{name} = f32[8192,1024] fusion(%p), kind=kCustom, calls=%{calls}{cycles if time_s else ''}\n"


def test_a_collective_is_carried_from_the_first_fusion_to_the_last():
    module = program(
        fusion("s", "start") + fusion("t", "beside") + fusion("x", "other") + fusion("u", "done") + fusion("v", "alone")
    )
    assert carried_collectives(module, module.computations["main"], {"a", "d"}) == {
        "s": (Carried("a", begins=True, ends=False),),
        "t": (Carried("a", begins=False, ends=False),),
        "u": (Carried("a", begins=False, ends=True),),
        "v": (Carried("d", begins=True, ends=True),),
    }


@pytest.mark.parametrize("others_s", [0.0, 2.0])
def test_it_goes_on_beside_the_kernels_that_carry_it_and_rests_beside_others(others_s):
    """0.4 and 0.3 of its time run beside kernels that carry it, none beside another: 0.3 of it are waited for."""
    module = program(
        fusion("s", "start")
        + fusion("t", "beside", 0.4 * GATHER_S)
        + fusion("x", "other", others_s * GATHER_S)
        + fusion("u", "beside", 0.3 * GATHER_S)
        + fusion("d", "done")
    )
    done = replay(module, MESH, CLOCK_GHZ)
    kernels_s = (0.4 + others_s + 0.3) * GATHER_S
    assert estimated_cycles(module) == pytest.approx(kernels_s * CLOCK_GHZ * 1e9, rel=1e-4)
    assert done.kernel_s == pytest.approx(kernels_s, rel=1e-4)
    assert done.collective_s == pytest.approx(GATHER_S)
    assert done.exposed_s == pytest.approx(0.3 * GATHER_S, rel=1e-4)
    assert done.step_s == pytest.approx(kernels_s + 0.3 * GATHER_S, rel=1e-4)


def test_one_in_a_single_fusion_is_waited_for():
    done = replay(program(fusion("v", "alone", 3 * GATHER_S)), MESH, CLOCK_GHZ)
    assert done.exposed_s == pytest.approx(GATHER_S)
    assert done.step_s == pytest.approx(4 * GATHER_S, rel=1e-4)


def test_what_the_link_carries_next_waits_for_one_that_rests():
    """A gather with a begin and an end of its own comes behind one in fusions that rests as long as another kernel."""
    gather = "(f32[1024,1024], f32[8192,1024]) all-gather-start(%p), channel_id=3, replica_groups={{0,1,2,3,4,5,6,7}}"
    module = program(
        fusion("s", "start")
        + f"%g = {gather}, dimensions={{0}}, use_global_device_ids=true\n"
        + fusion("x", "other", 0.5 * GATHER_S)
        + fusion("d", "done")
        + "%e = f32[8192,1024] all-gather-done(%g)\n"
    )
    done = replay(module, MESH, CLOCK_GHZ)
    assert done.step_s == pytest.approx(2.5 * GATHER_S, rel=1e-4)
    assert done.exposed_s == pytest.approx(2 * GATHER_S, rel=1e-4)


def test_devices_with_a_roofline_are_priced_by_it():
    """Without a clock, cycles do not count."""
    module = program(fusion("x", "other", 1.0))
    device = dataclasses.replace(MESH.device_type, memory_bandwidth_bytes_per_s=1e9)
    own = replay(module, dataclasses.replace(MESH, device_type=device)).step_s
    assert own < 0.1 < replay(module, MESH, CLOCK_GHZ).step_s
