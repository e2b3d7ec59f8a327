"""Verification end to end for CPUs, which need no wheels; for GPUs and TPUs where their compilers are installed."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from typer.testing import CliRunner

import autoshard
from autoshard.cli import app
from autoshard.cluster import Cluster
from autoshard.errors import FileFormatError, MissingExtraError, PlanMismatchError, VerificationError
from autoshard.hlo.collectives import CompiledCollective, Piece
from autoshard.hlo.module import Array
from autoshard.planner.estimate import CommunicationItem
from autoshard.verify.compile import _stderr_kept, _within
from autoshard.verify.devices import _is_installed
from autoshard.verify.figures import (
    BesideProducts,
    Flow,
    FlowTimes,
    MemoryFigures,
    Rematerialisation,
    ScheduledFlow,
    ScheduleFigures,
    StepTimes,
    Stray,
)
from autoshard.verify.rematerialised import rematerialisations
from autoshard.verify.report import Failure, Report
from autoshard.verify.strays import Origins, flows, strays
from autoshard.verify.targets import TARGETS, target_named
from autoshard.verify.tpus import V4, V5E, V5P
from autoshard.verify.verification import Verification

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
CLUSTER = CONFIGS / "clusters" / "cpux8.yaml"
BATCH = 1024
"""Large enough that sharing it out pays on CPUs."""
HAS_GPU_COMPILER = _is_installed("jax_plugins.xla_cuda13")
HAS_TPU_COMPILER = _is_installed("libtpu")


def step(params, batch):
    """Gradient descent of two layers, the second of which is applied twice in a loop."""

    def loss(p):
        hidden, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["inner"]), None), batch @ p["up"], None, length=2)
        return jnp.mean((hidden - 1.0) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def shapes(batch_size=BATCH):
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return {"up": f32(32, 256), "inner": f32(256, 256)}, f32(batch_size, 32)


@pytest.fixture(scope="module")
def plan():
    pins = {"params.up": P(None, "tensor"), "params.inner": P("tensor"), "batch": P("data")}
    mesh = {"data": 4, "tensor": 2}
    return autoshard.plan(step, *shapes(), cluster=CLUSTER, mesh=mesh, pins=pins, donate_argnums=0)


@pytest.fixture(scope="module")
def verified(plan) -> Verification:
    return plan.verify(step, *shapes(), target="cpu")


def test_the_rounding_of_sums_hides_nothing():
    assert StepTimes(1.2, 0.9, 0.1 + 0.2, 0.3).hidden_s == 0 and StepTimes(1.1, 0.9, 0.3, 0.2).hidden_s > 0.09


def test_the_compiled_program_confirms_the_plan(plan, verified):
    """XLA:CPU does what was planned: kinds, axes, bytes, and the turns of loops."""
    assert verified.target == "CPU-generic" and verified.axes == plan.axes
    assert verified.predicted_bytes == pytest.approx(plan.estimate.comm_bytes)
    assert verified.compiled_bytes == pytest.approx(verified.predicted_bytes, rel=0.01)
    assert {f.axes for f in verified.flows if f.compiled_bytes} <= {f.axes for f in verified.flows if f.predicted_bytes}
    assert verified.compiled_bytes > 0 and not verified.rematerialised
    # forward and both gradients of the inner product in each of two turns, and two products of the outer one
    assert verified.compiled_flops == pytest.approx(2 * BATCH * 256 * (2 * 3 * 256 + 2 * 32) / 8)
    assert verified.predicted_flops == verified.compiled_flops
    ours, theirs = verified.predicted_memory, verified.compiled_memory
    assert (ours.argument_bytes, ours.alias_bytes) == (theirs.argument_bytes, theirs.alias_bytes)
    assert theirs.argument_bytes == (32 * 256 + 256 * 256) * 4 / 2 + BATCH * 32 * 4 / 4


def test_a_function_that_changed_is_refused(plan):
    with pytest.raises(PlanMismatchError, match="leaf 2"):
        plan.verify(step, *shapes(32), target="cpu")


def test_the_plan_s_own_devices_are_the_default(plan):
    assert target_named(plan.device).name == "CPU-generic"
    with pytest.raises(VerificationError, match=r"'Abacus' is none of them\. .*--target.* h100,"):
        dataclasses.replace(plan, device="Abacus").verify(step, *shapes())


@pytest.mark.parametrize("name", ["v100-sxm2-32gb", "P100", "v100"])
def test_devices_that_cuda_has_dropped(name):
    with pytest.raises(VerificationError, match="CUDA 13 has dropped"):
        target_named(name)


def test_every_target_is_in_the_catalogue():
    types = Cluster.from_file(CLUSTER).slices()[0].device_type.name, *(t.name for t in TARGETS)
    catalogue = (pathlib.Path(autoshard.__file__).parent / "cluster" / "catalogue.yaml").read_text()
    assert all(f"\n  {name}:\n" in catalogue for name in types)
    names = [n for t in TARGETS for n in {t.name.lower(), *t.aliases}]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("target", "num_devices", "name"),
    [(V5E, 1, "v5e:1x1"), (V5E, 8, "v5e:2x4"), (V5E, 256, "v5e:16x16"), (V5P, 8, "v5p:2x2x2"), (V4, 4, "v4:2x2x1")],
)
def test_names_of_slices(target, num_devices, name):
    assert target.topology(num_devices) == name


@pytest.mark.parametrize(
    ("target", "is_installed", "extra"),
    [("h100", HAS_GPU_COMPILER, "verify-gpu"), ("tpu-v5e", HAS_TPU_COMPILER, "verify-tpu")],
)
def test_missing_compilers_are_named(plan, target, is_installed, extra):
    if is_installed:
        pytest.skip("the compiler is installed")
    with pytest.raises(MissingExtraError, match=re.escape(f"pip install 'autoshard[{extra}]'")):
        plan.verify(step, *shapes(), target=target)


@pytest.mark.parametrize(
    ("target", "is_installed"), [("h100", HAS_GPU_COMPILER), ("t4", HAS_GPU_COMPILER), ("tpu-v5e", HAS_TPU_COMPILER)]
)
def test_programs_of_other_compilers_are_read(plan, verified, target, is_installed, monkeypatch):
    if not is_installed:
        pytest.skip(f"the compiler for {target} is not installed")
    monkeypatch.setenv("XLA_FLAGS", "")  # libtpu ends a process that sets a flag which only XLA:CPU knows
    found = plan.verify(step, *shapes(), target=target)
    # XLA:TPU sends in bfloat16 what products read, at half of what a plan for CPUs counts
    least = 0.5 if target == "tpu-v5e" else 0.95
    assert least * found.predicted_bytes <= found.compiled_bytes <= 1.05 * found.predicted_bytes
    assert found.compiled_flops == verified.compiled_flops
    assert (found.estimated_cycles is not None) == (target == "tpu-v5e")


def test_only_the_plan_s_own_gpus_have_a_step_as_scheduled(plan, verified):
    """XLA:CPU has no schedule of collectives; what is predicted is told all the same."""
    schedule, e = verified.schedule, plan.estimate
    assert schedule.compiled is None and "XLA:CPU" in schedule.not_replayed and schedule.not_replayed in str(verified)
    assert (schedule.predicted.step_s, schedule.predicted.kernel_s) == (e.step_s, e.compute_s)
    assert {b.kind for b in schedule.beside_products} == {f.kind for f in verified.flows if f.compiled_count}
    assert not any(b.beside for b in schedule.beside_products)


@pytest.mark.skipif(not HAS_GPU_COMPILER, reason="needs XLA:GPU: pip install 'autoshard[verify-gpu]'")
def test_the_schedule_of_xla_gpu_is_replayed():
    cluster, pins = CONFIGS / "clusters" / "h100x8.yaml", {"batch": P("data"), "params.up": P(None, "data")}
    gpu_plan = autoshard.plan(step, *shapes(), cluster=cluster, mesh={"data": 8}, pins=pins, donate_argnums=0)
    found = gpu_plan.verify(step)
    schedule = found.schedule
    assert schedule.compiled is not None and not schedule.not_replayed
    times = schedule.compiled
    assert times.step_s == pytest.approx(times.kernel_s + times.exposed_s) and times.kernel_s > 0
    assert times.collective_s == pytest.approx(sum(f.time_s for f in schedule.flows))
    assert times.exposed_s == pytest.approx(sum(f.exposed_s for f in schedule.flows))
    assert sum(b.count for b in schedule.beside_products) >= len(schedule.flows) > 0
    assert times.exposed_s == pytest.approx(sum(f.compiled_exposed_s for f in schedule.flow_times))
    assert schedule.predicted.exposed_s == pytest.approx(sum(f.predicted_exposed_s for f in schedule.flow_times))
    assert {(f.kind, f.axes) for f in schedule.flow_times} == {(f.kind, f.axes) for f in found.flows}
    assert any("verify/test_verify.py:" in f.source for f in schedule.flows)
    assert "What kernels wait for" in str(found)


@pytest.mark.skipif(not HAS_GPU_COMPILER, reason="needs XLA:GPU: pip install 'autoshard[verify-gpu]'")
@pytest.mark.parametrize("asks_first", [False, True])
def test_gpus_are_compiled_for_where_jax_may_use_them_and_there_are_none(asks_first):
    """JAX then leaves its plugin out, since there is no cuDNN, before or when it is asked for the compiler."""
    first = "print(jax.devices())" if asks_first else ""
    program = f"""
import os, jax
{first}
from autoshard.verify.devices import gpu_devices
from autoshard.verify.gpus import H100
print(len(gpu_devices(H100, 16, 8)), jax.default_backend(), "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" in os.environ)
"""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    number, backend, is_changed = done.stdout.splitlines()[-1].split()
    assert (number, is_changed) == ("16", "False") and backend in ("cpu", "gpu")


@pytest.mark.skipif(not HAS_TPU_COMPILER, reason="needs XLA:TPU: pip install 'autoshard[verify-tpu]'")
def test_the_schedule_of_xla_tpu_is_replayed_by_its_own_cycles(monkeypatch):
    """Layers of stored shards, gathered beside the products before them, whose gradients are exchanged beside kernels:
    these take what XLA:TPU expects of them."""
    monkeypatch.setenv("XLA_FLAGS", "")  # libtpu ends a process that sets a flag which only XLA:CPU knows

    def trained(layers, batch):
        def loss(own):
            hidden = batch
            for layer in own:
                hidden = jnp.tanh(hidden @ layer)
            return jnp.mean(hidden**2)

        return [p - 0.1 * g for p, g in zip(layers, jax.grad(loss)(layers), strict=True)]

    args = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 4, jax.ShapeDtypeStruct((8192, 2048), jnp.float32)
    pins = {"batch": P("data"), "layers.*": P(None, "data")}
    tpu_plan = autoshard.plan(
        trained,
        *args,
        cluster=CONFIGS / "clusters" / "tpu-v5e-x8.yaml",
        mesh={"data": 8},
        pins=pins,
        donate_argnums=0,
    )
    assert tpu_plan.schedule is autoshard.Schedule.LATENCY_HIDING, "the default"
    found = tpu_plan.verify(trained, *args)
    times = found.schedule.compiled
    assert times is not None and found.estimated_cycles is not None and not found.schedule.not_replayed
    assert times.kernel_s == pytest.approx(found.estimated_cycles / 1.5e9)
    assert times.step_s == pytest.approx(times.kernel_s + times.exposed_s)
    beside = {b.kind: b.beside for b in found.schedule.beside_products}
    assert beside.keys() == {"all-gather", "all-to-all"} and beside["all-gather"] >= 2
    hidden = {f.kind for f in found.schedule.flows if f.hidden_s > 0.01 * f.time_s}
    assert hidden == {"all-gather", "all-to-all"}
    predicted = {f.kind for f in tpu_plan.estimate.communication if f.hidden_s > 0}
    assert predicted == hidden, "as the plan says"
    (exchanged,) = (f for f in found.flows if f.kind == "all-to-all")
    assert exchanged.compiled_bytes == pytest.approx(exchanged.predicted_bytes, rel=0.01)


@pytest.mark.skipif(not HAS_TPU_COMPILER, reason="needs XLA:TPU: pip install 'autoshard[verify-tpu]'")
def test_xla_tpu_reserves_what_is_predicted_where_it_hides_collectives(monkeypatch):
    """Checkpointed layers below many classes."""
    monkeypatch.setenv("XLA_FLAGS", "")  # libtpu ends a process that sets a flag which only XLA:CPU knows

    def trained(weights, batch):
        def loss(own):
            hidden = batch
            for first, second in own["layers"]:
                hidden = jax.checkpoint(lambda h, a, b: h + jnp.tanh(h @ a) @ b)(hidden, first, second)
            return -jnp.mean(jax.nn.log_softmax(hidden @ own["classes"])[:, 0])

        return jax.tree.map(lambda p, g: p - 0.1 * g, weights, jax.grad(loss)(weights))

    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    args = {"layers": [(bf16(2048, 2048),) * 2] * 6, "classes": bf16(2048, 32768)}, bf16(16384, 2048)
    settings = {"mesh": {"data": 8}, "pins": {"batch": P("data"), "weights.*": P(None, "data")}, "donate_argnums": 0}
    tpu_plan = autoshard.plan(trained, *args, cluster=CONFIGS / "clusters" / "tpu-v5e-x8.yaml", **settings)
    compiled = tpu_plan.verify(trained, *args)
    assert 0.9 <= compiled.reserved_bytes / tpu_plan.estimate.reserved_bytes <= 1.03
    assert compiled.compiled_bytes <= 1.05 * compiled.predicted_bytes


@pytest.mark.skipif(not HAS_GPU_COMPILER, reason="needs XLA:GPU: pip install 'autoshard[verify-gpu]'")
def test_exchanged_look_ups_send_what_is_predicted():
    """Ids and rows of a look-up and of its gradient; the rounds for what exceeds the slots are in the program, too."""

    def looked_up(table, weights, ids):
        loss = lambda t, w: jnp.mean(jnp.tanh(t[ids] @ w) ** 2)
        value, (t, w) = jax.value_and_grad(loss, (0, 1))(table, weights)
        return (table - 0.1 * t, weights - 0.1 * w), value

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    args = f32(1 << 23, 64), f32(64, 256), jax.ShapeDtypeStruct((1 << 16, 32), jnp.int32)
    options = autoshard.PlanOptions(lookups=autoshard.Lookups(ids=autoshard.IdDistribution(1.05)))
    cluster, settings = CONFIGS / "clusters" / "h100x16.yaml", {"mesh": {"data": 16}, "donate_argnums": (0, 1)}
    gpu_plan = autoshard.plan(looked_up, *args, cluster=cluster, options=options, **settings)
    assert any(e.exchange is not None for _, e in gpu_plan.shardings)
    (flow,) = [f for f in gpu_plan.verify(looked_up, *args).flows if f.kind == "all-to-all"]
    assert flow.predicted_count == flow.compiled_count >= 2
    assert flow.compiled_bytes == pytest.approx(flow.predicted_bytes, rel=1e-6)


def test_full_rematerialisation_is_caught():
    """A move of pieces that XLA's partitioner does not know (jax 0.10.2, and 0.12, which names the axes)."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("x", "y", "z"))

    def moved(v):
        with jax.named_scope("eqn5"):
            v = jnp.sin(v) * 2
        return jax.lax.with_sharding_constraint(v, NamedSharding(mesh, P(("y", "x", "z"))))

    lowered = jax.jit(moved, in_shardings=NamedSharding(mesh, P("x", "y"))).lower(jnp.zeros((24, 40)))
    with _stderr_kept() as log:
        lowered.compile()
    (found,) = rematerialisations(log(), Origins({5: "sin"}, {5: "here.py:1 (moved)"}))
    assert (found.operation, found.source, found.shape) == ("sin", "here.py:1 (moved)", "f32[12,20]")
    notations = ("{devices=[2,2,2]", "{devices=[8,1]"), ("[{'x'}, {'y'}]", "[{'y', 'x', 'z'}, {}]")
    assert any(before in found.before and after in found.after for before, after in notations)


def test_a_compiler_that_takes_too_long_is_left():
    with pytest.raises(VerificationError, match=r"0\.1 s"):
        _within(0.1, lambda: __import__("time").sleep(1))
    with pytest.raises(ZeroDivisionError):
        _within(None, lambda: 1 / 0)


def item(kind, value, size_bytes, source, count=1.0, axes=("data",)):
    return CommunicationItem(kind, axes, value, (8, 8), source, size_bytes * count, 1e-6, count, 3)


def compiled(kind, pieces, times=1.0):
    made = tuple(Piece(Array("f32", (int(size) // 4,)), size, (equation,)) for size, equation in pieces)
    return CompiledCollective(kind, ("data",), 4, times, made, "name")


ORIGINS = Origins({1: "dot_general", 2: "add"}, {1: "model.py:1 (f)", 2: "model.py:2 (g)"})


def test_joined_and_repeated_collectives_find_their_counterparts():
    """Three layers predicted as three; the compiler runs a loop, and joins two kinds of gradients."""
    ours = [item("all-gather", f"w.{k}", 64.0, "model.py:1 (f)") for k in range(3)]
    ours += [item("all-reduce", "dot_general", 128.0, "model.py:1 (f)"), item("all-reduce", "add", 32.0, "")]
    theirs = [compiled("all-gather", [(64.0, 1)], times=3.0), compiled("all-reduce", [(32.0, 2), (128.0, 1)])]
    assert strays(ours, theirs, ORIGINS, ("data",)) == ()
    assert flows(ours, theirs, ("data",)) == (
        Flow("all-gather", ("data",), 3, 3, 192, 192),
        Flow("all-reduce", ("data",), 2, 1, 160, 160),
    )


def test_what_has_no_counterpart_is_named():
    """The line tells which of two collectives of equal size is absent; what is left of a loop is counted."""
    ours = [item("all-gather", "a", 64.0, "model.py:1 (f)"), item("all-gather", "b", 64.0, "model.py:2 (g)", 4.0)]
    theirs = [compiled("all-gather", [(64.0, 2)], times=3.0), compiled("all-to-all", [(16.0, 1)])]
    assert strays(ours, theirs, ORIGINS, ("data",)) == (
        Stray(True, "all-gather", ("data",), "a", (8, 8), "model.py:1 (f)", 1.0, 64.0),
        Stray(True, "all-gather", ("data",), "b", (8, 8), "model.py:2 (g)", 1.0, 64.0),
        Stray(False, "all-to-all", ("data",), "dot_general", (4,), "model.py:1 (f)", 1.0, 16.0),
    )


def test_arguments_have_the_plan_s_paths():
    piece = Piece(Array("f32", (4,)), 16.0, (), "inner[0].params[\\'up\\']")
    assert Origins({}, {}, ("state.step", "state.params.up", "batch")).name(piece) == "state.params.up"
    assert Origins({}, {}, ("other",)).name(piece) == piece.argument


MEMORY = MemoryFigures(4e9, 4e9, 4e9, 2e9, 6e9)
MADE = Verification(
    plan="autoshard",
    cluster="h100x8",
    target="H100-SXM",
    axes=(("data", 4), ("tensor", 2)),
    flows=(Flow("all-gather", ("data",), 2.0, 1.0, 2e9, 2e9), Flow("all-reduce", ("tensor",), 4.0, 2.0, 1e9, 1.01e9)),
    strays=(
        Stray(True, "all-reduce", ("tensor",), "dot_general", (64, 32), "model.py:3 (f)", 2.0, 1e6),
        Stray(False, "all-gather", ("tensor",), "state.params.up", (16,), "", 1.0, 1.1e7, True),
    ),
    rematerialised=(Rematerialisation("sin", "model.py:4 (g)", "f32[12,20]", "{a}", "{b}"),),
    predicted_memory=MEMORY,
    compiled_memory=dataclasses.replace(MEMORY, temporary_bytes=2.1e9, peak_bytes=6.1e9),
    reserved_bytes=6.2e9,
    predicted_flops=1e12,
    compiled_flops=1e12,
    estimated_cycles=None,
    compile_s=1.5,
    jax_version="0.10.2",
    schedule=ScheduleFigures(
        predicted=StepTimes(0.0105, 0.009, 0.005, 0.0015),
        compiled=StepTimes(0.011, 0.009, 0.005, 0.002),
        not_replayed="",
        flow_times=(
            FlowTimes("all-reduce", ("tensor",), 0.003, 0.0015, 0.003, 0.002),
            FlowTimes("all-gather", ("data",), 0.002, 0.0, 0.002, 0.0),
        ),
        flows=(
            ScheduledFlow("all-reduce", ("tensor",), "dot_general", "model.py:3 (f)", 4.0, 0.003, 0.002),
            ScheduledFlow("all-gather", ("data",), "state.params.up", "model.py:1 (f)", 2.0, 0.002, 0.0),
        ),
        beside_products=(BesideProducts("all-reduce", 4, 1), BesideProducts("all-gather", 2, 2)),
    ),
    predicted_reserved_bytes=6.1e9,
)
GOLDEN = """\
Plan `autoshard` for cluster `h100x8` on data=4, tensor=2, compiled for H100-SXM by XLA of jax 0.10.2

Collectives of one step: bytes that each device sends
collective  axes    predicted  times  compiled  times  difference
all-gather  data         2 GB      2      2 GB      1       +0.0%
all-reduce  tensor       1 GB      4   1.01 GB      2       +1.0%
together                 3 GB      6   3.01 GB      3       +0.3%

Memory and work of one device
                                predicted  compiled  difference
arguments                            4 GB      4 GB       +0.0%
outputs                              4 GB      4 GB       +0.0%
of these in place of arguments       4 GB      4 GB       +0.0%
temporaries                          2 GB    2.1 GB       +5.0%
reserved, with gaps                6.1 GB    6.2 GB       +1.6%
in use at the peak                   6 GB    6.1 GB       +1.7%
products and convolutions         1 TFLOP   1 TFLOP       +0.0%

One step as scheduled
                  predicted  compiled  difference
step                10.5 ms     11 ms       +4.8%
kernels                9 ms      9 ms       +0.0%
collectives            5 ms      5 ms       +0.0%
of these exposed     1.5 ms      2 ms      +33.3%
of these hidden      3.5 ms      3 ms      -14.3%
Collectives with a product between begin and end: 1 of 4 all-reduce, 2 of 2 all-gather

What kernels wait for, by kind and axes
collective  axes    predicted    of  compiled    of  difference
all-reduce  tensor     1.5 ms  3 ms      2 ms  3 ms      +33.3%
all-gather  data            0  2 ms         0  2 ms

What kernels wait for in the compiled schedule, by line
exposed  hidden  times  collective  axes    tensor       line
   2 ms    1 ms      4  all-reduce  tensor  dot_general  model.py:3 (f)

Predicted, and absent from the compiled program
sent  times  collective  axes    tensor             line
1 MB      2  all-reduce  tensor  dot_general 64x32  model.py:3 (f)

In the compiled program, and not predicted
 sent  times  collective  axes    tensor                                         line
11 MB      1  all-gather  tensor  state.params.up 16 (only sliced afterwards)  not told

XLA's partitioner knew no way between two layouts, gathered these tensors whole on every device, and cut them again
(full rematerialisation). Pin the tensor, or what makes it, to one of the two layouts:
  sin f32[12,20] at model.py:4 (g): from {a} to {b}

Confirmed.
"""


def test_the_account_for_people():
    words = lambda text: [line.split() for line in text.splitlines() if line.strip()]
    assert words(str(MADE)) == words(GOLDEN)
    assert "kernels" in str(dataclasses.replace(MADE, estimated_cycles=1e6))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"flows": (Flow("all-gather", ("data",), 1.0, 1.0, 1e9, 1.06e9),)}, "over data, 1 GB"),
        ({"flows": (Flow("all-gather", ("data",), 1.0, 1.0, 1e9, 1.04e9),)}, None),
        # all-gather and reduce-scatter instead of an all-reduce move the same
        ({"flows": (Flow("a", ("data",), 1.0, 0.0, 1e9, 0.0), Flow("b", ("data",), 0.0, 1.0, 0.0, 1e9))}, None),
        (
            {"flows": (*MADE.flows, Flow("all-gather", ("data", "tensor"), 0.0, 1.0, 0.0, 4e6))},
            "no collective over data+t",
        ),
        ({"flows": (*MADE.flows, Flow("all-gather", ("data", "tensor"), 0.0, 1.0, 0.0, 2e6))}, None),
        ({"compiled_memory": dataclasses.replace(MEMORY, peak_bytes=6.19e9)}, "6 GB of memory were predicted"),
        ({"reserved_bytes": 6.3e9}, "6.1 GB of memory were predicted with the gaps"),
        ({"reserved_bytes": 6.3e9, "predicted_reserved_bytes": None}, None),
        # a compiler that tells no peak
        ({"reserved_bytes": 6.25e9, "compiled_memory": dataclasses.replace(MEMORY, peak_bytes=6.25e9)}, None),
        ({"compiled_memory": dataclasses.replace(MEMORY, peak_bytes=3e9)}, None),
    ],
)
def test_tolerances_and_exit_status(change, told):
    changed = dataclasses.replace(MADE, **change)
    assert [told in text for text in changed.disagreements] == [True] * (told is not None)
    assert Report((changed,)).exit_status == (told is not None)
    assert Report((changed, Failure("v100", "too old"))).exit_status == 2


def test_json_is_read_back(verified, tmp_path):
    report = Report((verified, MADE, Failure("v100", "too old")))
    report.save(tmp_path / "verified.json")
    assert Report.load(tmp_path / "verified.json") == report
    (tmp_path / "other.json").write_text('{"format": "other"}')
    with pytest.raises(FileFormatError, match="not the JSON of a verification"):
        Report.load(tmp_path / "other.json")


def invoke(*args):
    return CliRunner().invoke(app, ["verify", *map(str, args)])


@pytest.mark.parametrize("mode", ["auto", pytest.param("pipelined", marks=pytest.mark.exhaustive)])
def test_a_saved_plan_with_tables_in_host_memory_is_verified(mode, tmp_path):
    """What runs on the devices, the step over the rows of a batch; the configuration tells how it is cut out."""
    path, json_file = tmp_path / "plan.json", tmp_path / "verified.json"
    tables = "model.overrides={table_rows: [1000000000, 30, 8], embed_dim: 128, bottom_dims: [128], num_numbers: 4}"
    where = str(CONFIGS / "clusters" / "h100x8_cpu.yaml") if mode == "auto" else str(CLUSTER)
    options = [tables, f"execution.mode={mode}", "--mesh", "data=8", "--cluster", where, "--out", str(path)]
    made = CliRunner().invoke(app, ["plan", str(CONFIGS / "dlrm_tiny.yaml"), *options])
    assert made.exit_code == 0, made.output
    plan = autoshard.load(path)
    over_rows = plan.over_rows if mode == "auto" else plan
    assert isinstance(plan, autoshard.HostTablesPlan if mode == "auto" else autoshard.Plan)
    done = invoke(path, "--target", "cpu", "--json", json_file)
    (found,) = Report.load(json_file).outcomes
    assert found.target == "CPU-generic", done.output
    assert found.predicted_bytes == pytest.approx(over_rows.estimate.comm_bytes)
    assert found.compiled_bytes == pytest.approx(found.predicted_bytes, rel=0.05)


def test_a_saved_plan_is_verified_alone(tmp_path):
    """Planned by the command line, whose configuration it carries; one target fails, and the other is kept."""
    path, json_file = tmp_path / "plan.json", tmp_path / "verified.json"
    options = ["--mesh", "data=8", "--cluster", str(CLUSTER), "--out", str(path)]
    made = CliRunner().invoke(app, ["plan", str(CONFIGS / "dlrm_tiny.yaml"), "data.batch_size=65536", *options])
    assert made.exit_code == 0, made.output
    done = invoke(path, "--target", "abacus", "--target", "cpu", "--json", json_file)
    assert done.exit_code == 2 and "abacus" in done.stderr and "Traceback" not in done.stderr
    found, failed = Report.load(json_file).outcomes
    assert found.target == "CPU-generic" and found.compiled_bytes > 0
    assert found.predicted_bytes == pytest.approx(autoshard.Plan.load(path).estimate.comm_bytes)
    assert str(found) in done.stdout and failed.target == "abacus"

    late = invoke(path, "--time-limit", "0.2")
    assert late.exit_code == 2 and "--time-limit" in late.stderr

    dataclasses.replace(autoshard.Plan.load(path), configuration=None).save(path)
    bare = invoke(path)
    assert bare.exit_code == 2 and "--config" in bare.stderr
    path.write_text(path.read_text()[:-10])
    damaged = invoke(path)
    assert damaged.exit_code == 2 and "JSON" in damaged.stderr
