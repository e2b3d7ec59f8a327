"""Steps between meshes, and the walk that a search takes over them."""

import math
import pathlib
import time

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard import PlanOptions
from autoshard.cluster import Slice
from autoshard.cluster.slices import AXIS_NAMES
from autoshard.compiler.schedule import Schedule
from autoshard.plans.found import NOT_FASTER, NOT_TRIED, PASSED_BY, open_bounds_s
from autoshard.plans.make import load_cluster
from autoshard.plans.mesh_steps import MeshSteps
from autoshard.plans.program_plan import MeshCandidate

CLUSTERS = pathlib.Path(__file__).parents[2] / "configs" / "clusters"


@pytest.fixture(scope="module")
def hardware() -> Slice:
    return load_cluster(CLUSTERS / "h100x1024.yaml").slices()[0]


def steps_of(hardware, shape, like=None):
    meshes = hardware.logical_meshes(3)
    at = hardware.logical_mesh(dict(zip(AXIS_NAMES[len(shape) - 1], shape, strict=True)))
    return [(step, mesh.shape) for step, mesh in MeshSteps([m for m in meshes if len(m.axes) == 3]).of(at, like)]


def test_a_step_moves_one_prime_factor(hardware):
    found = steps_of(hardware, (32, 4, 8))
    assert {shape for _, shape in found} == {(16, 8, 8), (16, 4, 16), (64, 2, 8), (32, 2, 16), (64, 4, 4), (32, 8, 4)}
    for (source, target), shape in found:
        ratios = [new / old for new, old in zip(shape, (32, 4, 8), strict=True)]
        assert ratios[source] == 1 / 2 and ratios[target] == 2 and math.prod(shape) == 1024


def test_steps_lead_from_fewer_axes_and_never_back(hardware):
    # 128 x 2 x 4 is not listed: it is the same as 128 x 4 x 2 by other names
    assert {shape for _, shape in steps_of(hardware, (128, 8))} == {(64, 2, 8), (128, 4, 2), (2, 128, 4)}
    assert [step for step, _ in steps_of(hardware, (32, 4, 8), like=(2, 1))][0] == (2, 1)
    assert steps_of(hardware, (1024,)) == []  # two axes lie between


def test_all_meshes_of_three_axes_can_be_reached(hardware):
    every = {m.shape for m in hardware.logical_meshes(3) if len(m.axes) == 3}
    reached, waiting = set(), [(128, 8)]
    while waiting:
        for _, shape in steps_of(hardware, waiting.pop()):
            if shape not in reached:
                reached.add(shape)
                waiting.append(shape)
    assert reached == every


def step(params, x):
    loss = lambda p: jnp.mean((x + jnp.tanh(x @ p["up"]) @ p["down"]).astype(jnp.float32) ** 2)
    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def planned(batch, **options):
    weights = {"up": (2048, 8192), "down": (8192, 2048)}
    params = {k: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for k, shape in weights.items()}
    options = PlanOptions(cache=False, schedule=Schedule.LEAST_MEMORY, **options)
    x = jax.ShapeDtypeStruct((batch, 2048), jnp.bfloat16)
    room = {"memory_budget_bytes": math.inf, "donate_argnums": 0}
    return autoshard.plan(step, params, x, cluster=CLUSTERS / "h100x64.yaml", options=options, **room)


def test_a_walk_from_two_axes_finds_three_that_are_faster():
    few, default, every = (planned(4096, max_mesh_axes=most) for most in (2, None, 3))
    assert len(few.axes) == 2 and len(default.axes) == 3 == len(every.axes)
    assert default.certificate.objective < (1 - PlanOptions().relative_gap) * few.certificate.objective
    assert default.certificate.objective >= every.certificate.bound
    meshes = [c.hardware for c in default.candidates]
    first = [c.hardware for c in few.candidates][: len({c.axes for c in few.candidates})]  # then orders of the best
    assert meshes[: len(first)] == first and len(set(meshes)) == len(meshes)
    best_s = {c.hardware: c.step_s for c in every.candidates if c.step_s is not None}
    assert all(c.bound_s <= best_s[c.hardware] * (1 + 1e-9) for c in default.candidates if c.hardware in best_s)
    assert default.certificate.bound <= default.certificate.objective


def test_how_far_a_walk_goes_does_not_depend_on_the_clock(monkeypatch):
    plan = planned(4096)
    monkeypatch.setattr(time, "perf_counter", lambda: 1000.0)  # on an infinitely fast machine
    same = planned(4096)
    of_meshes = lambda p: [(c.hardware, c.step_s, c.bound_s, c.verdict) for c in p.candidates]
    assert len(plan.axes) == 3 and of_meshes(same) == of_meshes(plan)


def test_there_is_no_walk_where_kernels_take_all_the_time():
    plan = planned(2**26)
    assert max(len(c.axes) for c in plan.candidates) == 2


def test_a_proof_is_not_about_meshes_that_were_passed_by():
    axes = (("data", 8),)
    settled, passed = MeshCandidate(axes, None, 2.0, NOT_FASTER), MeshCandidate(axes, 3.0, 0.0, PASSED_BY)
    assert open_bounds_s([settled, passed]) == [2.0]
    assert open_bounds_s([settled, MeshCandidate(axes, None, 0.0, NOT_TRIED)]) == [2.0, 0.0]
