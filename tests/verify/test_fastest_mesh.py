"""Of several meshes whose plans are predicted to be nearly as fast, the one with the fastest compiled schedule."""

import math
import pathlib

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard import PlanOptions
from autoshard.compiler.schedule import Schedule
from autoshard.verify.devices import _is_installed

CLUSTERS = pathlib.Path(__file__).parents[2] / "configs" / "clusters"
needs_xla_gpu = pytest.mark.skipif(
    not _is_installed("jax_plugins.xla_cuda13"), reason="needs XLA:GPU: pip install 'autoshard[verify-gpu]'"
)


def step(params, x):
    """Gradient descent of two layers."""

    def loss(p):
        return jnp.mean((jnp.tanh(jnp.tanh(x @ p["up"]) @ p["down"]) - 1.0) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def planned(num_meshes, cluster, **options):
    """The plan over all meshes, of which so many are compiled."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    args = {"up": f32(2048, 4096), "down": f32(4096, 2048)}, f32(4096, 2048)
    options = PlanOptions(cache=False, compile_check=True, compile_check_meshes=num_meshes, **options)
    return autoshard.plan(step, *args, cluster=CLUSTERS / f"{cluster}.yaml", donate_argnums=0, options=options)


@needs_xla_gpu
def test_the_fastest_by_replay_is_taken(monkeypatch, tmp_path):
    """However far apart predictions are: what is proven is told by the bound over all meshes."""
    monkeypatch.setattr("autoshard.verify.fastest_mesh.NEAR", math.inf)
    first, plan = (planned(n, "h100x8", schedule=Schedule.LATENCY_HIDING, relative_gap=0.0) for n in (1, 3))
    assert not first.confirmation.meshes
    meshes = plan.confirmation.meshes
    assert 2 <= len(meshes) <= 3 and meshes[0].axes == first.axes and meshes[0].step_s <= min(m.step_s for m in meshes)
    fastest = min(meshes, key=lambda m: m.fastest.step_s)
    assert plan.axes == fastest.axes and plan.certificate.objective == pytest.approx(fastest.step_s)
    assert plan.certificate.bound == pytest.approx(first.certificate.bound)
    assert plan.certificate.gap == pytest.approx(1 - plan.certificate.bound / plan.certificate.objective)
    plan.save(tmp_path / "plan.json")
    assert autoshard.Plan.load(tmp_path / "plan.json").confirmation == plan.confirmation
    assert f"the fastest by replay of {len(meshes)} meshes" in " ".join(plan.explain(full=True).split())


def test_where_nothing_hides_the_best_by_prediction_is_kept():
    """XLA:CPU's programs are not replayed."""
    plan = planned(3, "cpux8")
    assert plan.confirmation.is_confirmed and not plan.confirmation.meshes
    assert plan.certificate.objective == min(c.step_s for c in plan.candidates if c.step_s is not None)
