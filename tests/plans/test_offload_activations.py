"""Plans that keep residuals in host memory: they train as the plain step does, and everything else knows of it."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard import Cluster, PlanOptions, TrainStep
from autoshard.errors import MemoryBudgetError, StageError
from autoshard.files import write_text_atomically, yaml_text
from autoshard.report.write import write_report

CLUSTERS = pathlib.Path(__file__).parents[2] / "configs" / "clusters"
LATENCY_S, BYTES_PER_S = 1e-6, 1e10
WIDTH, BATCH, LAYERS = 128, 16384, 8
SHAPES = {"x": jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)}


def loss_fn(params, batch, key):
    x = batch["x"]
    for up, down in params:
        x = x + jnp.tanh(x @ up) @ down
    return jnp.mean(jnp.square(x)), {}


STEP = TrainStep(loss_fn, optax.sgd(0.1))


def params_of(key):
    draw = lambda key: jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH
    return [tuple(map(draw, jax.random.split(k))) for k in jax.random.split(key, LAYERS)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Eight CPU devices with a host, in a file."""
    found = Cluster.from_file(CLUSTERS / "cpux8.yaml").to_dict()
    link = {"bandwidth_bytes_per_s": BYTES_PER_S, "latency_s": LATENCY_S, "source": "test"}
    found["version"] = 4
    found["groups"][0]["host"] = {"num_cpus": 2, "memory_bytes": 64e9, "source": "test", "to_device": link}
    path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    write_text_atomically(path, yaml_text(found))
    return str(path)


def planned(cluster, offload="activations", budget_bytes=None, remat="as_written", step=STEP, **request):
    options = PlanOptions(
        offload=offload, remat=remat, micro_batches="as_written", mesh_limit_s=20, least_memory_s=0, cache=False
    )
    state = jax.eval_shape(step.init, jax.eval_shape(params_of, jax.random.key(0)))
    return autoshard.plan(
        step,
        state,
        SHAPES,
        cluster=cluster,
        mesh={"data": 8},
        options=options,
        memory_budget_bytes=budget_bytes,
        donate_argnums=0,
        **request,
    )


@pytest.fixture(scope="module")
def tight(cluster):
    """A plan with its form searched, in memory in which no form fits with all on the devices."""
    budget_bytes = planned(cluster, "never", remat="search").estimate.reserved_bytes
    while True:
        budget_bytes *= 0.8
        try:
            planned(cluster, "never", budget_bytes, "search")
        except MemoryBudgetError:
            return planned(cluster, "activations", budget_bytes, "search")


def test_what_fits_stays_on_the_devices(cluster):
    asked, plain = planned(cluster), planned(cluster, "never")
    assert not asked.estimate.host_copies and asked.shardings == plain.shardings
    assert asked.estimate.step_s == plain.estimate.step_s


@pytest.mark.slow
@pytest.mark.host_memory
def test_three_steps_are_those_of_the_plain_step(tight):
    assert tight.estimate.residual_copies
    params = params_of(jax.random.key(0))
    run, plain = tight.jit(STEP), jax.jit(STEP)
    state, whole = tight.init(STEP.init, params, run=run), STEP.init(params)
    rng = np.random.default_rng(0)
    for _ in range(3):
        batch = {"x": rng.standard_normal((BATCH, WIDTH)).astype(np.float32)}
        state, metrics = run(state, batch)
        whole, expected = plain(whole, batch)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_it_is_told(tight, tmp_path):
    shard_bytes = 4 * BATCH * WIDTH / 8
    assert tight.estimate.peak_bytes <= tight.budget_bytes
    for copy in tight.estimate.residual_copies:
        assert copy.wire_bytes == 2 * shard_bytes and copy.source
        assert copy.time_s == pytest.approx(2 * (LATENCY_S + shard_bytes / BYTES_PER_S))
    text = " ".join(tight.explain(full=True).split())
    assert "of residuals per device in host memory" in text and "Residuals in host memory between the passes" in text
    assert "copied to the host before" in text and "copied back from the host" in text
    path = tmp_path / "plan.json"
    tight.save(path)
    loaded = autoshard.Plan.load(path)
    assert loaded.shardings == tight.shardings and loaded.estimate == tight.estimate
    write_report(path, tmp_path / "report.html")
    assert "residual copies" in (tmp_path / "report.html").read_text()


def test_nothing_to_offload_is_said(cluster):
    step = TrainStep(lambda params, batch, key: (jnp.mean(batch["x"] @ params[0][0]), {}), optax.sgd(0.1))
    plan = planned(cluster, step=step)
    assert any("found no activation that could lie in host memory" in warning for warning in plan.warnings)


def test_stages_do_not_take_it(cluster):
    with pytest.raises(StageError, match="offload='activations'"):
        autoshard.plan(
            STEP,
            jax.eval_shape(STEP.init, jax.eval_shape(params_of, jax.random.key(0))),
            SHAPES,
            cluster=cluster,
            options=PlanOptions(offload="activations"),
            stages=autoshard.StageOptions(),
        )
