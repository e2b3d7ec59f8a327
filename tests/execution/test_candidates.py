"""One program scheduled in several ways: how one is chosen, and what XLA:GPU makes of them without a GPU."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.cluster import Cluster
from autoshard.compiler.candidates import Candidate, candidate_options, pipelined_collectives, profile_option
from autoshard.compiler.schedule import Schedule
from autoshard.execution.candidates import CandidateFigures, Choosing, compile_candidates
from autoshard.hlo.compiled_schedule import replay
from autoshard.hlo.module import parse
from autoshard.verify.devices import _is_installed, devices_for
from autoshard.verify.gpus import COMPILER_OPTIONS, H100

H100X8 = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x8.yaml"
MESH = Cluster.from_file(H100X8).slices()[0].logical_mesh({"data": 8})
FIGURES = (
    CandidateFigures(Candidate.LEAST_MEMORY, 0.010, 0.004, 6e9),
    CandidateFigures(Candidate.XLA_COSTS, 0.008, 0.002, 8e9),
    CandidateFigures(Candidate.PLAN_COSTS, 0.007, 0.001, 9e9),
)
needs_xla_gpu = pytest.mark.skipif(
    not _is_installed("jax_plugins.xla_cuda13"), reason="needs XLA:GPU: pip install 'autoshard[verify-gpu]'"
)


@pytest.mark.parametrize(
    ("budget_bytes", "chosen"),
    [
        (None, Candidate.PLAN_COSTS),
        (9e9, Candidate.PLAN_COSTS),
        (8.5e9, Candidate.XLA_COSTS),
        (7e9, Candidate.LEAST_MEMORY),
        (1e9, Candidate.LEAST_MEMORY),  # nothing fits
    ],
)
def test_the_fastest_that_fits_is_taken(budget_bytes, chosen):
    choosing = Choosing(tuple(Candidate), MESH, budget_bytes)
    assert choosing.fastest(FIGURES).candidate is chosen
    assert choosing.fastest(FIGURES[::-1]).candidate is chosen


def test_where_none_fits_hardly_more_memory_is_no_reason_to_be_slow():
    """Of 2 GB allowed: 2.01 GB are needed at least, in 1.5 s; 5 MB more than that are hardly more, 20 MB are."""
    choosing = Choosing(tuple(Candidate), MESH, 2e9)
    least, hardly, more = (
        CandidateFigures(Candidate.LEAST_MEMORY, 1.5, 0.0, 2.01e9),
        CandidateFigures(Candidate.PLAN_COSTS, 1.0, 0.0, 2.015e9),
        CandidateFigures(Candidate.XLA_COSTS, 0.9, 0.0, 2.03e9),
    )
    assert choosing.fastest((least, hardly, more)) is hardly
    assert choosing.fastest((least, more)) is least
    assert choosing.fastest((dataclasses.replace(least, reserved_bytes=2e9), hardly)).candidate is least.candidate


def test_what_the_compiler_is_told():
    """The scheduler is off for the least memory, and on for all others; none keeps to less memory than the plan."""
    of = lambda candidate: candidate_options("cuda", candidate)
    least, by_xla = of(Candidate.LEAST_MEMORY), of(Candidate.XLA_COSTS)
    assert least.pop("xla_gpu_memory_limit_slop_factor") == by_xla["xla_gpu_memory_limit_slop_factor"] == 1000
    scattered_next = "xla_gpu_enable_pipelined_reduce_scatter"
    at_once_in_loops = {} if jax.__version_info__ >= (0, 11, 1) else {scattered_next: False}
    assert all(least.pop(option) == by_xla[option] for option in at_once_in_loops)
    assert len(least) == 2 and not any(least.values()) and all(by_xla[option] for option in least)
    assert of(Candidate.PLAN_COSTS) == by_xla and Candidate.PLAN_COSTS.by_plan_costs
    at_once = [c for c in Candidate if c.ordered_as is not c and not c.is_queued]
    queued = [c for c in Candidate if c.is_queued]
    of_plan = Candidate.PLAN_COSTS, Candidate.BY_TIME, Candidate.GATHERED_FREELY, Candidate.UNORDERED
    assert [c.ordered_as for c in at_once] == [c.ordered_as for c in queued] == list(of_plan)
    assert {c for c in Candidate if c.is_two_at_once} == {Candidate.TWO_AT_ONCE, *at_once}
    assert all(c.by_plan_costs for c in queued) and not any(c.is_bounded for c in (*at_once, *queued))
    assert {c.queueing for c in at_once} == {1.5} and all(c.by_plan_costs for c in at_once)
    assert {c.queueing for c in Candidate if not c.is_two_at_once} == {1.0}
    assert of(Candidate.PLAN_COSTS_AT_ONCE) == of(Candidate.TWO_AT_ONCE)
    assert {**of(Candidate.GATHERED_AT_ONCE), **at_once_in_loops} == of(Candidate.TWO_AT_ONCE)
    with_room = {c for c in Candidate if c.keeps_gathers or c.ordered_as is Candidate.BY_TIME}
    in_next = {c for c in Candidate if of(c).get(scattered_next)} - {Candidate.PIPELINED_LOOPS}
    assert in_next == (with_room if at_once_in_loops else set())
    in_flight = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
    assert of(Candidate.TWO_AT_ONCE) == {**by_xla, **in_flight}
    unordered = of(Candidate.UNORDERED)
    assert of(Candidate.UNORDERED_AT_ONCE) == {**unordered, **in_flight}
    assert of(Candidate.PLAN_COSTS_QUEUED) == {**by_xla, **dict.fromkeys(in_flight, 16)}
    assert {**of(Candidate.GATHERED_QUEUED), **at_once_in_loops} == of(Candidate.PLAN_COSTS_QUEUED)
    joined = {
        "xla_gpu_all_reduce_combine_threshold_bytes": 2**22,
        "xla_gpu_all_gather_combine_threshold_bytes": 2**20,
    }
    assert {unordered[option] for option in joined} == {30 * 2**20 + 7}
    told = set(by_xla)  # when the program is lowered; what is not told again stays as it is
    assert all(told <= set(of(candidate)) for candidate in Candidate if candidate is not Candidate.LEAST_MEMORY)
    merging = {"xla_gpu_dot_merger_threshold_mb": -1}
    assert {**unordered, **joined, **at_once_in_loops} == {**by_xla, **merging} != unordered
    pipelined = of(Candidate.PIPELINED_LOOPS)
    assert pipelined == {**by_xla, **pipelined_collectives(), "xla_gpu_enable_while_loop_double_buffering": True}
    gathers, on = (
        ("xla_gpu_pipeline_all_gather", "COLLECTIVE_PIPELINING_MODE_ON")
        if jax.__version_info__ >= (0, 11, 1)
        else ("xla_gpu_enable_pipelined_all_gather", True)
    )
    assert len(pipelined_collectives()) == 3 and pipelined[gathers] == on
    assert profile_option("a.pbtxt") == {"xla_gpu_pgle_profile_file_or_directory_path": "a.pbtxt"}


def step(weights, batch):
    def loss(w):
        hidden = batch
        for name in sorted(w):
            hidden = jnp.tanh(hidden @ w[name])
        return jnp.mean(hidden**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


@pytest.fixture(scope="module")
def plan():
    weights = {name: jax.ShapeDtypeStruct((4096, 4096), jnp.float32) for name in "abcdefgh"}
    batch = jax.ShapeDtypeStruct((16384, 4096), jnp.float32)
    pins = {"weights.*": P("data"), "batch": P("data")}
    options = autoshard.PlanOptions(schedule=Schedule.LATENCY_HIDING, cache=False)
    mesh = {"data": 8}
    return autoshard.plan(step, weights, batch, cluster=H100X8, mesh=mesh, pins=pins, donate_argnums=0, options=options)


@needs_xla_gpu
def test_candidates_are_compiled_and_replayed_without_a_gpu(plan, monkeypatch, tmp_path):
    """Latency hiding exposes less than the order of least memory; the profile is kept by its content."""
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path))
    run = plan.jit(step, devices_for(H100, plan.axes, 8))
    found = run.candidates()
    least, own, *_ = found
    figures = {c.figures.candidate: c.figures for c in found}
    waits = {c for c, f in figures.items() if f.exposed_s > 0.02 * f.step_s}
    of_plan = [c for c in Candidate if c.by_plan_costs and c is not Candidate.PIPELINED_LOOPS]  # there is no loop
    tried = [c for c in of_plan if not c.is_queued and (c.ordered_as is c or c.ordered_as in waits)]
    fastest = min([Candidate.LEAST_MEMORY, *tried], key=lambda c: figures[c].step_s)
    queued = [c for c in of_plan if c.is_queued and fastest in waits]  # all programs fit
    tried += [c for c in queued if c.ordered_as in (fastest.ordered_as, Candidate.BY_TIME) and c.ordered_as in waits]
    assert list(figures) == [Candidate.LEAST_MEMORY, *tried]
    for one in found:
        replayed = replay(parse(one.text), plan.logical_mesh)
        assert one.figures.step_s == replayed.step_s and one.figures.reserved_bytes == one.memory.total_bytes > 0
    assert own.figures.exposed_s < least.figures.exposed_s and own.figures.step_s < least.figures.step_s
    profiles = set(tmp_path.glob("*.pbtxt"))
    rounds = 3 * sum(c.is_queued for c in figures)  # two ways, each once more where it helps
    assert 0 <= len(profiles) - (len(found) - 1) <= rounds
    assert all(p.read_text().startswith("costs { name: ") for p in profiles)
    run.candidates()
    assert set(tmp_path.glob("*.pbtxt")) == profiles
    freely = [c.memory.peak_bytes for c in found if c.figures.candidate.keeps_gathers]
    assert min(freely) >= least.memory.peak_bytes


@needs_xla_gpu
def test_xla_reads_the_profile_and_hides_more_by_the_plan_s_costs():
    """XLA's own estimates of the links between two nodes are others; without loops, there is nothing to pipeline."""
    least, by_xla, by_plan = candidates_of(is_scanned=False)
    assert by_plan.candidate is Candidate.PLAN_COSTS
    assert by_plan.exposed_s < by_xla.exposed_s < least.exposed_s


@needs_xla_gpu
def test_collectives_of_scanned_layers_hide_in_the_iteration_before():
    *others, by_plan, pipelined = candidates_of(is_scanned=True)
    assert pipelined.candidate is Candidate.PIPELINED_LOOPS
    assert pipelined.exposed_s < 0.7 * by_plan.exposed_s
    assert pipelined.step_s < min(f.step_s for f in (*others, by_plan))
    assert pipelined.reserved_bytes > by_plan.reserved_bytes


def candidates_of(is_scanned: bool) -> tuple[CandidateFigures, ...]:
    """Figures of fully sharded layers, written by hand over two nodes: unrolled, or scanned and recomputed."""
    axes = (("data", 16),)
    mesh = jax.sharding.Mesh(np.array(devices_for(H100, axes, 8), dtype=object), ("data",))
    whole, split, stacked = (NamedSharding(mesh, spec) for spec in (P(), P("data"), P(None, "data")))

    def layer(hidden, w):
        gathered = jax.lax.with_sharding_constraint(w, whole)
        return jax.lax.with_sharding_constraint(jnp.tanh(hidden @ gathered), split), None

    def train(weights, batch):
        def loss(weights):
            hidden = batch
            if is_scanned:
                hidden, _ = jax.lax.scan(jax.checkpoint(layer), batch, weights)
            else:
                for w in weights:
                    hidden, _ = layer(hidden, w)
            return jnp.mean(hidden**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    weights = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 8
    weights = jax.ShapeDtypeStruct((8, 2048, 2048), jnp.float32) if is_scanned else weights
    shardings = stacked if is_scanned else [split] * 8
    lowered = jax.jit(train, in_shardings=(shardings, split), out_shardings=shardings, donate_argnums=0).lower(
        weights, jax.ShapeDtypeStruct((65536, 2048), jnp.float32)
    )
    links = Cluster.from_file(H100X8.with_name("h100x16.yaml")).slices()[0].logical_mesh(dict(axes))
    choosing = Choosing((Candidate.XLA_COSTS, Candidate.PLAN_COSTS, Candidate.PIPELINED_LOOPS), links, None)
    compile_as = lambda _, options: lowered.compile(compiler_options={**COMPILER_OPTIONS, **options})
    return tuple(c.figures for c in compile_candidates(compile_as, "cuda", choosing))


def test_a_plan_for_the_least_memory_is_compiled_in_one_way(plan):
    least = autoshard.PlanOptions(cache=False, schedule=Schedule.LEAST_MEMORY)
    args = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    other = autoshard.plan(lambda w: w["w"] * 2, args, cluster=H100X8, mesh={"data": 8}, options=least)
    assert other.compile_candidates == ()
    bounded = Candidate.PLAN_COSTS, Candidate.PLAN_COSTS_AT_ONCE, Candidate.PIPELINED_LOOPS
    queued = tuple(c for c in Candidate if c.is_queued)
    assert plan.compile_candidates == (*bounded, *BY_TIME, *FREED, *UNORDERED, *queued) and len(queued) == 4


def test_one_device_is_compiled_once_for_each_way():
    """Nothing is sent, so that no profile is made of a compile of its own."""
    one = Cluster.from_file(H100X8.with_name("h100x1.yaml")).slices()[0].logical_mesh({"data": 1})
    lowered = jax.jit(lambda x: jnp.tanh(x) * 2).lower(jnp.ones(8))
    compiled = []

    def compile_as(candidate, options):
        compiled.append(candidate)
        return lowered.compile()

    found = compile_candidates(compile_as, "cuda", Choosing((Candidate.UNORDERED,), one, None))
    assert compiled == [c.figures.candidate for c in found] == [Candidate.LEAST_MEMORY, Candidate.UNORDERED]


ORDERED = Candidate.PLAN_COSTS, Candidate.PLAN_COSTS_AT_ONCE
BY_TIME = Candidate.BY_TIME, Candidate.BY_TIME_AT_ONCE
FREED = Candidate.GATHERED_FREELY, Candidate.GATHERED_AT_ONCE
UNORDERED = Candidate.UNORDERED, Candidate.UNORDERED_AT_ONCE


@needs_xla_gpu
@pytest.mark.parametrize("ways", [ORDERED, BY_TIME, FREED, UNORDERED], ids=lambda ways: ways[0].name.lower())
@pytest.mark.parametrize(("shape", "waits"), [((64, 64), True), ((2**20, 1024), False)])
def test_two_collectives_are_in_flight_where_a_program_waits(shape, waits, ways):
    """A sum over all devices of what a product makes, waited for at once: long beside a small product, and nothing
    beside a large one. The second program is the first by another schedule: its names are known. The orders that bound
    the memory are those of the program of least memory, whose names serve."""
    axes = (("data", 8),)
    mesh = jax.sharding.Mesh(np.array(devices_for(H100, axes, 8), dtype=object), ("data",))
    split = NamedSharding(mesh, P("data"))
    summed = jax.jit(lambda x: jnp.tanh(x.T @ x).sum(), in_shardings=split).lower(
        jax.ShapeDtypeStruct((8 * shape[0], shape[1]), jnp.float32)
    )
    compiled = []

    def compile_as(candidate, options):
        compiled.append(candidate)
        return summed.compile(compiler_options={**COMPILER_OPTIONS, **options})

    found = compile_candidates(compile_as, "cuda", Choosing(ways, MESH, None))
    tried = [c.figures.candidate for c in found]
    one_at_a_time, at_once = ways
    figures = found[1].figures
    assert (figures.exposed_s > 0.02 * figures.step_s) == waits
    assert tried == [Candidate.LEAST_MEMORY, *ways[: 1 + waits]]
    assert compiled.count(one_at_a_time) == 2 - (ways is ORDERED) and compiled.count(at_once) == waits
