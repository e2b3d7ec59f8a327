"""Every form of the GPT, planned and run on eight CPU devices, trains as it does unsharded.

Forms run on two axes, but one of them on one, and one on three. Three run with `--exhaustive` only: each of their parts
is one of another form. Models have tests of their own, where the GPT with
untied embeddings is planned, too (tests/models/test_families.py), and so have strategies.

The plans are made for a device whose links cost next to nothing to start and whose arithmetic is slow, so that even a
tiny model is worth splitting in every way; on the real figures of any device it would be replicated.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autoshard_models import presets, train_step
from autoshard_models.gpt_linen import LinenGPTConfig

import autoshard
from autoshard.cluster import Cluster, DeviceType, Link, NodeGroup

SIZES = {"vocab_size": 64, "num_layers": 1, "embed_dim": 32, "num_heads": 8, "context_length": 16}
MESHES = {"1-D": {"data": 8}, "2-D": {"data": 2, "tensor": 4}, "3-D": {"data": 2, "fsdp": 2, "tensor": 2}}
FORMS = {
    "nnx": {},
    "nnx-remat-dropout": {"remat": True, "dropout_rate": 0.1},
    "linen": {"linen": True},
    "linen-scan": {"linen": True, "scan_layers": True, "num_layers": 2},
    "linen-scan-remat-dropout": {
        "linen": True,
        "scan_layers": True,
        "num_layers": 2,
        "remat": True,
        "dropout_rate": 0.1,
    },
}
CASES = [
    pytest.param("nnx", "2-D", marks=pytest.mark.exhaustive),
    pytest.param("nnx-remat-dropout", "2-D", marks=pytest.mark.exhaustive),
    pytest.param("linen", "2-D", marks=pytest.mark.exhaustive),
    ("linen-scan-remat-dropout", "2-D"),
    ("nnx-remat-dropout", "1-D"),
    ("linen-scan", "3-D"),
]
STEPS = 3


def slow_device_cluster() -> Cluster:
    """Eight devices for which splitting pays at any size."""
    device = DeviceType("slow", {"float32": 1e9}, 10**9, 1e9, 0.0, "made up for this test")
    link = Link(1e-12, 1e9, 0, "made up for this test")
    return Cluster("slow", (NodeGroup("slow", device, 1, 8, link),))


def functions_of(form: str) -> train_step.TrainFunctions:
    options = dict(FORMS[form])
    is_linen, scan = options.pop("linen", False), options.pop("scan_layers", False)
    config = presets.preset("tiny", **{**SIZES, **options})
    if is_linen:
        fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        config = LinenGPTConfig(**fields, scan_layers=scan)
    return train_step.build(config, train_step.adamw())


def batch_of(step: int) -> train_step.Batch:
    tokens = jax.random.randint(jax.random.key(step), (2, 8, SIZES["context_length"]), 0, SIZES["vocab_size"])
    return {"inputs": tokens[0], "targets": tokens[1]}


def numbers(tree) -> list[np.ndarray]:
    """The leaves as arrays; PRNG keys as their words."""
    plain = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(plain(x)) for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def reference() -> dict:
    """Form -> (initial state, state after each step, metrics of each step), unsharded; computed once a form."""
    return {}


def unsharded(form: str, cache: dict) -> list:
    if form not in cache:
        functions = functions_of(form)
        state, trail, step = functions.init(0), [], jax.jit(functions.step)
        for n in range(STEPS):
            state, metrics = step(state, batch_of(n))
            trail.append((numbers(state), numbers(metrics)))
        cache[form] = trail
    return cache[form]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "mesh"), CASES)
def test_planned_steps_equal_unsharded_steps(form, mesh, reference):
    functions = functions_of(form)
    shapes = jax.eval_shape(functions.init, 0)
    plan = autoshard.plan(
        functions.step,
        shapes,
        batch_of(0),
        cluster=slow_device_cluster(),
        mesh=MESHES[mesh],
        donate_argnums=0,
        options=autoshard.PlanOptions(relative_gap=0.05),  # good enough to be interesting
    )
    used = {axis for a in plan.arguments for entry in a.entries for axis in entry}
    assert used == set(MESHES[mesh])  # the plan does split the program over every axis
    state, step = plan.init(functions.init, 0), plan.jit(functions.step)
    for n, (expected_state, expected_metrics) in enumerate(unsharded(form, reference)):
        state, metrics = step(state, batch_of(n))
        for got, want in zip(numbers(metrics), expected_metrics, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5)
        for got, want in zip(numbers(state), expected_state, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-5)
