"""Products in pieces: equal to one device, whatever the mesh, the operand and the dimension whose pieces travel."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import Plan
from autoshard.hlo.compiled_schedule import replay
from autoshard.hlo.module import parse
from autoshard.planner.build import formulate
from autoshard.planner.program import prepare
from autoshard.plans.make import Origin, plan_of_choices
from autoshard.solver.problem import Certificate, Status
from autoshard.trace.trace import trace
from autoshard.verify.compile import compile_step
from autoshard.verify.devices import _is_installed, gpu_devices
from autoshard.verify.gpus import COMPILER_OPTIONS, H100

H100X8 = pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "h100x8.yaml"
D, F, BATCH, LENGTH = 32, 64, 8, 16


def _in_pieces(fn, args, mesh, cluster, seed) -> Plan:
    """A plan whose choices are drawn at random, but whose products run in pieces wherever they can."""
    traced = trace(fn, args, ())
    logical = cluster.slices()[0].logical_mesh(mesh)
    f = formulate(prepare(traced.graph), logical, None, [None] * len(traced.graph.arguments), decompose="any")
    rng, first, picks = np.random.default_rng(seed), len(traced.graph.arguments), []
    for n, node in enumerate(f.problem.nodes):
        able = range(len(node.costs))
        if n >= first:
            choices = f.tables[n - first].choices
            able = [k for k in able if choices[f.decisions[n].rows[k]].pieces is not None] or able
        picks.append(int(rng.choice(list(able))))
    certificate = Certificate(Status.FEASIBLE, 0.0, 0.0, 0.0, 0.0)
    return Plan.of(
        plan_of_choices(traced, f, picks, origin=Origin("random", cluster.name, ()), certificate=certificate)
    )


def pieces_of(plan: Plan):
    return [e.pieces for _, e in plan.shardings if e.pieces is not None]


def layer(params, x):
    """A perceptron and projections of one input into several heads."""

    def loss(p):
        heads = jnp.einsum("bsd,dhe->bhse", x, p["heads"])
        y = jnp.einsum("bhse,hed->bsd", jnp.tanh(heads), p["out"])
        return ((jnp.tanh((x + y) @ p["up"]) @ p["down"]) ** 2).sum()

    return jax.value_and_grad(loss)(params)


def _arguments(dtype):
    rng = np.random.default_rng(0)
    shapes = {"heads": (D, 8, 8), "out": (8, 8, D), "up": (D, F), "down": (F, D)}
    params = {k: jnp.asarray(rng.normal(size=s) / 8, dtype) for k, s in shapes.items()}
    return params, jnp.asarray(rng.normal(size=(BATCH, LENGTH, D)), dtype)


MESHES = {"tensor": 8}, {"data": 2, "tensor": 4}, {"a": 4, "b": 2}
OFTEN = {(0, 0), (1, 1), (2, 2), (1, 3)}
"""A plan or two of each mesh, in every run."""
CASES = [
    pytest.param(MESHES[n], seed, marks=[] if (n, seed) in OFTEN else pytest.mark.exhaustive)
    for n in range(3)
    for seed in range(4)
]


@pytest.mark.parametrize(("mesh", "seed"), CASES)
def test_products_in_pieces_equal_whole_ones(cluster, mesh, seed, tmp_path):
    args = _arguments(jnp.float32)
    plan = _in_pieces(layer, args, mesh, cluster, seed)
    assert len(pieces_of(plan)) >= 3, "little runs in pieces"
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    found, wanted = plan.jit(layer)(*args), layer(*args)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


def test_parts_of_sums_in_bfloat16_are_added_in_float32(cluster):
    """So that the error is that of one product, and not of one addition after another."""
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((64, 512), (512, 64)))
    product = lambda x, w: x @ w
    traced = trace(product, (x, w), ())
    f = formulate(
        prepare(traced.graph), cluster.slices()[0].logical_mesh({"tensor": 8}), None, [None] * 2, decompose="any"
    )
    (table,) = f.tables
    scattered = [k for k, c in enumerate(table.choices) if c.pieces is not None and not c.pieces.is_gathered]
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    for row in scattered:
        layouts = [f.argument_layouts[n].index(table.reads[n][row]) for n in range(2)]
        certificate = Certificate(Status.FEASIBLE, 0.0, 0.0, 0.0, 0.0)
        plan = Plan.of(
            plan_of_choices(
                traced, f, (*layouts, row), origin=Origin("test", cluster.name, ()), certificate=certificate
            )
        )
        found = np.asarray(plan.jit(product)(x, w), np.float64)
        # each of eight parts is rounded once to 8 bits, and their sum once more
        assert np.abs(found - exact).max() <= 2**-8 * (np.abs(exact).max() + 8 * np.sqrt(64) * 3)
    assert len(scattered) == 2


@pytest.mark.skipif(not _is_installed("jax_plugins.xla_cuda13"), reason="the compiler for GPUs is not installed")
def test_on_gpus_pieces_travel_while_products_run(monkeypatch):
    """XLA:GPU keeps the pieces: N products, and N - 1 transfers that most of them hide, of the bytes predicted."""
    monkeypatch.setenv("XLA_FLAGS", "")  # this test process sets one that only XLA:CPU knows
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    args = shape(8, 2048, 4096), shape(4096, 16384), shape(16384, 4096)
    perceptron = lambda x, up, down: jax.nn.gelu(x @ up) @ down
    pins = {"x": P(None, "tensor"), "up": P(None, "tensor"), "down": P("tensor", None)}
    options = autoshard.PlanOptions(decompose="faster", schedule=autoshard.Schedule.LATENCY_HIDING)
    plan = autoshard.plan(
        perceptron, *args, cluster=H100X8, mesh={"tensor": 8}, pins=pins, options=options, donate_argnums=0
    )
    assert isinstance(plan, Plan) and len(pieces_of(plan)) == 2
    piece_bytes = 2 * 8 * 256 * 4096
    flows = {(f.kind, f.axes): f for f in plan.verify(perceptron, *args, target="h100").flows}
    permutes = flows["collective-permute", ("tensor",)]
    assert permutes.predicted_bytes == permutes.compiled_bytes == 2 * 7 * piece_bytes

    choosing = plan.interface.choosing
    devices = gpu_devices(H100, 8, 8)
    compiled = compile_step(plan, perceptron, args, devices, COMPILER_OPTIONS, choosing=choosing)
    replayed = replay(parse(compiled.text), choosing.mesh)
    sent = [c for c in replayed.collectives if c.collective.kind == "collective-permute"]
    assert len(sent) == 14
    assert sum(c.hidden_s for c in sent) > 0.8 * sum(c.time_s for c in sent), "they run beside products"
