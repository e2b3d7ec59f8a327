"""Plans that keep state in host memory: they train as the plain step does, and everything else knows where it lies."""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard import Cluster, PlanOptions, TrainStep
from autoshard.checkpoints.checkpoints import Checkpoints
from autoshard.cluster import Host, Link
from autoshard.errors import ClusterError, ConfigError, MemoryBudgetError, StageError
from autoshard.files import write_text_atomically, yaml_text
from autoshard.report.write import write_report

CLUSTERS = pathlib.Path(__file__).parents[2] / "configs" / "clusters"
LATENCY_S, BYTES_PER_S = 1e-6, 1e10
WIDTH, BATCH = 512, 16
OPEN = PlanOptions(remat="as_written", micro_batches="as_written", mesh_limit_s=20, least_memory_s=0)
AS_WRITTEN = dataclasses.replace(OPEN, offload="never")
STATE = dataclasses.replace(AS_WRITTEN, offload="state")
MESHES = ({"data": 8}, {"data": 2, "tensor": 4})


def cluster_with(host: Host | None) -> dict:
    found = Cluster.from_file(CLUSTERS / "cpux8.yaml").to_dict()
    if host is not None:
        link = host.to_device and {"bandwidth_bytes_per_s": BYTES_PER_S, "latency_s": LATENCY_S, "source": "test"}
        own = {"num_cpus": host.num_cpus, "memory_bytes": host.memory_bytes, "source": "test"}
        found["version"] = 4
        found["groups"][0]["host"] = own | ({"to_device": link} if link else {})
    return found


@pytest.fixture(scope="module")
def cluster_of(tmp_path_factory):
    """Writes eight CPU devices with a host into a file: (whether its link is told, its memory)."""

    def made(has_link: bool = True, memory_bytes: float = 64e9, is_told: bool = True) -> str:
        link = Link(LATENCY_S, BYTES_PER_S, 0, "test") if has_link else None
        host = Host(2, int(memory_bytes), "test", to_device=link) if is_told else None
        path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
        write_text_atomically(path, yaml_text(cluster_with(host)))
        return str(path)

    return made


def loss_fn(params, batch, key):
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(jnp.square(x)), {}


def init():
    keys = jax.random.split(jax.random.key(0), 3)
    params = [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5, "b": jnp.zeros(WIDTH)} for k in keys]
    return STEP.init(params)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3, eps=1e-3),  # without it, rounding decides the sign of what is nearly zero
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3, eps=1e-3)),
    "momentum": optax.sgd(0.1, momentum=0.9),
}
STEP = TrainStep(loss_fn, OPTIMIZERS["adamw"])
REQUEST = {"donate_argnums": 0}
SHAPES = {"x": jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)}


def planned(cluster: str, step=STEP, mesh=MESHES[0], options=STATE, budget_bytes: float | None = None, **request):
    params = [{"w": jnp.zeros((WIDTH, WIDTH)), "b": jnp.zeros(WIDTH)}] * 3
    state = jax.eval_shape(step.init, params)
    return autoshard.plan(
        step,
        state,
        SHAPES,
        cluster=cluster,
        mesh=mesh,
        options=options,
        memory_budget_bytes=budget_bytes,
        **REQUEST,
        **request,
    )


def tightest(cluster: str, step=STEP, mesh=MESHES[0]):
    """A plan that keeps state on the host, since nothing fits without it."""
    budget_bytes = planned(cluster, step, mesh).estimate.peak_bytes
    while True:
        budget_bytes *= 0.85
        try:
            planned(cluster, step, mesh, AS_WRITTEN, budget_bytes)
        except MemoryBudgetError:
            return planned(cluster, step, mesh, STATE, budget_bytes)


def numbers(leaf) -> np.ndarray:
    """A leaf of a state as NumPy has it; keys as their words."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def names_in_host(plan) -> set[str]:
    return {a.name for a in plan.arguments if a.in_host}


@pytest.mark.host_memory
@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "mesh"),
    [
        pytest.param(optimizer, mesh, marks=[] if n % 2 == k else pytest.mark.exhaustive)
        for n, optimizer in enumerate(OPTIMIZERS)
        for k, mesh in enumerate(MESHES)
    ],
    ids=str,
)
def test_three_steps_are_those_of_the_plain_step(cluster_of, mesh, optimizer):
    step = TrainStep(loss_fn, OPTIMIZERS[optimizer])
    plan = tightest(cluster_of(), step, mesh)
    assert names_in_host(plan) and all(".opt_state." in name for name in names_in_host(plan))
    params = [
        {"w": jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5, "b": jnp.zeros(WIDTH)}
        for k in jax.random.split(jax.random.key(0), 3)
    ]
    run, plain = plan.jit(step), jax.jit(step)
    state, whole = plan.init(step.init, params, run=run), step.init(params)
    rng = np.random.default_rng(0)
    for _ in range(3):
        batch = {"x": rng.standard_normal((BATCH, WIDTH)).astype(np.float32)}
        state, metrics = run(state, batch)
        whole, expected = plain(whole, batch)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    leaves = jax.tree.leaves(state)
    for planned_leaf, leaf, other in zip(plan.arguments, leaves, jax.tree.leaves(whole), strict=False):
        np.testing.assert_allclose(numbers(leaf), numbers(other), rtol=2e-4, atol=2e-6, err_msg=planned_leaf.name)
        assert leaf.sharding.memory_kind == ("pinned_host" if planned_leaf.in_host else "device"), planned_leaf.name


def test_what_fits_stays_on_the_devices(cluster_of):
    asked, plain = planned(cluster_of()), planned(cluster_of(), options=AS_WRITTEN)
    assert not names_in_host(asked) and not asked.estimate.host_copies and not asked.warnings
    assert [a.entries for a in asked.arguments] == [a.entries for a in plain.arguments]
    assert asked.shardings == plain.shardings and asked.estimate.step_s == plain.estimate.step_s


@pytest.fixture(scope="module")
def tight(cluster_of):
    return tightest(cluster_of())


def test_it_is_told(tight):
    copied_bytes = 2 * 4 * WIDTH * WIDTH / 8  # of each, in and out; sharded over all eight devices
    copies = tight.estimate.host_copies
    assert {c.value for c in copies} == names_in_host(tight)
    for c in copies:
        assert c.wire_bytes == copied_bytes
        assert c.time_s == pytest.approx(2 * LATENCY_S + copied_bytes / BYTES_PER_S) and c.hidden_s == 0
    text = " ".join(tight.explain(full=True).split())
    assert "of state per device in host memory" in text and "10 GB/s" in text
    assert "State in host memory, copied to the device for its update and back" in text
    assert "copied from the host when" in text
    assert tight.estimate.peak_bytes <= tight.budget_bytes


def test_where_nothing_fits_otherwise_it_is_done_unasked(cluster_of, tight):
    unasked = planned(cluster_of(), options=OPEN, budget_bytes=tight.budget_bytes)
    asked = planned(cluster_of(), options=dataclasses.replace(OPEN, offload="all"), budget_bytes=tight.budget_bytes)
    assert names_in_host(unasked) and names_in_host(unasked) == names_in_host(asked)
    assert unasked.estimate == asked.estimate
    (warning,) = (w for w in unasked.warnings if w not in asked.warnings)
    assert "fits the memory of the devices alone" in warning and 'offload="never"' in warning
    held_kb = len(names_in_host(unasked)) * 4 * WIDTH * WIDTH / 8 / 1e3  # shards of moments over eight devices
    assert f"{held_kb:.3g} kB of each" in warning
    plain = planned(cluster_of(), options=OPEN)
    assert not names_in_host(plain) and not plain.warnings


@pytest.mark.parametrize("known", [{"is_told": False}, {"has_link": False}], ids=["no host", "no link"])
def test_hosts_that_are_not_described_are_not_tried(cluster_of, tight, known):
    with pytest.raises(MemoryBudgetError, match="No plan") as told:
        planned(cluster_of(**known), options=OPEN, budget_bytes=tight.budget_bytes)
    assert "in the memory of the hosts" not in str(told.value)


def test_what_does_not_fit_with_hosts_either_is_said_with_the_memory_that_would_do_there(cluster_of, tight):
    told_bytes = []
    for options in (OPEN, dataclasses.replace(OPEN, offload="never")):
        with pytest.raises(MemoryBudgetError, match="No plan") as told:
            sought = dataclasses.replace(options, least_memory_s=10.0)
            planned(cluster_of(), options=sought, budget_bytes=tight.budget_bytes / 10)
        assert ("with optimizer state and activations in the memory of the hosts" in str(told.value)) == (
            options is OPEN
        )
        told_bytes.append(int(re.search(r"memory_budget_bytes=(\d+)", str(told.value))[1]))
    with_hosts_bytes, without_bytes = told_bytes
    assert with_hosts_bytes < without_bytes


def test_shardings_tell_the_memory(tight):
    shardings = jax.tree.leaves(tight.in_shardings(argument=0))
    told = {a.name for a, s in zip(tight.arguments, shardings, strict=False) if s.memory_kind == "pinned_host"}
    assert told == names_in_host(tight)


@pytest.mark.host_memory
def test_files_keep_it(tight, tmp_path):
    tight.save(tmp_path / "plan.json")
    assert autoshard.Plan.load(tmp_path / "plan.json") == autoshard.Plan.load(tmp_path / "plan.json")
    assert names_in_host(autoshard.Plan.load(tmp_path / "plan.json")) == names_in_host(tight)
    run = autoshard.Plan.load(tmp_path / "plan.json").jit(STEP)
    state, _ = run(init(), {"x": np.ones((BATCH, WIDTH), np.float32)})
    assert "pinned_host" in {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)}


@pytest.mark.host_memory
def test_checkpoints_restore_into_host_memory(tight, tmp_path):
    run = tight.jit(STEP)
    state, _ = run(init(), {"x": np.ones((BATCH, WIDTH), np.float32)})
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        restored = checkpoints.restore(like)
    assert restored is not None
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(restored.state), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(numbers(one), numbers(other))


@pytest.mark.host_memory
def test_other_plans_know_it(tight, cluster_of, tmp_path):
    """Reports, differences and verification of such a plan."""
    plain = planned(cluster_of())
    assert str(plain.diff(tight))
    assert tight._repr_html_()
    tight.save(tmp_path / "plan.json")
    write_report(tmp_path / "plan.json", tmp_path / "report.html")
    assert "host copies" in (tmp_path / "report.html").read_text()
    found = tight.verify(STEP, target="cpu")
    assert found.predicted_memory.host_bytes == sum(c.wire_bytes for c in tight.estimate.host_copies) / 2


def test_hosts_must_be_described(cluster_of):
    with pytest.raises(ClusterError, match="has no `host`"):
        planned(cluster_of(is_told=False))
    with pytest.raises(ClusterError, match="without `to_device`"):
        planned(cluster_of(has_link=False))


def test_tpus_are_refused():
    with pytest.raises(ClusterError, match="is not for TPUs"):
        planned(str(CLUSTERS / "tpu-v5e-x8.yaml"))


def test_host_memory_is_finite(cluster_of, tight):
    small = cluster_of(memory_bytes=1e6)
    plan = planned(small, budget_bytes=tight.budget_bytes)
    assert any("in the memory of each host, which has 1 MB" in warning for warning in plan.warnings)


def test_nothing_to_offload_is_said(cluster_of):
    plan = planned(cluster_of(), TrainStep(loss_fn, optax.sgd(0.1)))
    assert any("found no state that could lie in host memory" in warning for warning in plan.warnings)


def test_what_excludes_it(cluster_of, tight):
    with pytest.raises(ConfigError, match="received 'everything'"):
        planned(cluster_of(), options=PlanOptions(offload="everything"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="exclude each other"):
        planned(cluster_of(), options=PlanOptions(offload="state", adaptive=True))
    with pytest.raises(StageError, match="is for plans of one program"):
        planned(cluster_of(), mesh=None, stages=autoshard.StageOptions())
    with pytest.raises(ConfigError, match="keeps some in the memory of the hosts"):
        tight.jit(STEP, balance=autoshard.Balance())
