"""Plans by set of devices: made once, found again, replaced where they do not fit, and the same in all processes."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard.cluster import Cluster
from autoshard.cluster.detect import SeenDevice, cluster_from_seen
from autoshard.elastic import plan_store
from autoshard.elastic.plan_store import DeviceSet, mark_compiled, plan_folder, plan_for_devices
from autoshard.errors import ConfigError


def cpus(*per_process: int) -> Cluster:
    """CPU devices of several processes."""
    seen = [SeenDevice("cpu", number) for number, count in enumerate(per_process) for _ in range(count)]
    return Cluster(*cluster_from_seen(seen))


def product(x, y):
    return jnp.sum(x @ y)


def make_for(cluster: Cluster, width: int = 8):
    shapes = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 2
    return lambda: autoshard.plan(product, *shapes, cluster=cluster)


class Log(list):
    """Counts the plans that are made."""

    def wrap(self, make):
        return lambda: (self.append(1), make())[1]


def alone(decide):
    return decide()


def test_a_set_that_comes_back_has_the_plan_that_it_had(tmp_path):
    made = Log()
    four, two = cpus(2, 2), cpus(2)
    get = lambda cluster, n: plan_for_devices(
        tmp_path, DeviceSet.of(cluster, n), made.wrap(make_for(cluster)), lambda plan: None, alone
    )
    first, smaller, again = get(four, 2), get(two, 1), get(four, 2)
    assert [c.from_cache for c in (first, smaller, again)] == [False, False, True] and len(made) == 2
    assert first.plan.num_devices == 4 and smaller.plan.num_devices == 2
    assert again.plan == first.plan and again.path == first.path != smaller.path
    assert again.path == plan_folder(tmp_path, DeviceSet.of(four, 2)) / "plan.json"
    assert (tmp_path / "plan.json").read_bytes() == first.path.read_bytes()
    assert again.seconds < first.seconds


@pytest.mark.parametrize("damage", [None, b"{", b'{"format": "other"}'])
def test_a_plan_that_does_not_fit_is_made_anew_and_the_reason_told(tmp_path, damage):
    cluster, devices = cpus(2), DeviceSet.of(cpus(2), 1)
    old = plan_for_devices(tmp_path, devices, make_for(cluster), lambda plan: None, alone)
    if damage is not None:
        old.path.write_bytes(damage)
    fits = lambda plan: None if plan.programs[0].arguments[0].shape == (16, 16) else "another width"
    new = plan_for_devices(tmp_path, devices, make_for(cluster, 16), fits, alone)
    assert not new.from_cache and new.plan.programs[0].arguments[0].shape == (16, 16)
    assert new.reason == "another width" if damage is None else str(old.path) in new.reason
    assert plan_for_devices(tmp_path, devices, make_for(cluster), fits, alone).from_cache


def test_what_is_compiled_is_known_until_the_plan_changes(tmp_path):
    devices = DeviceSet.of(cpus(2), 1)
    get = lambda width, reason: plan_for_devices(
        tmp_path, devices, make_for(cpus(2), width), lambda plan: reason, alone
    )
    first = get(8, None)
    mark_compiled(first)
    again = get(8, None)
    assert (first.is_compiled, again.is_compiled) == (False, True)
    assert not get(16, "another width").is_compiled


def test_a_dry_run_leaves_the_plan_in_use(tmp_path):
    make = make_for(cpus(2))
    used = plan_for_devices(tmp_path, DeviceSet.of(cpus(2), 1), make, lambda plan: None, alone)
    ahead = plan_for_devices(tmp_path, DeviceSet.of(cpus(1, 1), 2), make, lambda plan: None, alone, is_dry_run=True)
    assert not ahead.from_cache and (tmp_path / "plan.json").read_bytes() == used.path.read_bytes()


def other_process(text: str):
    """A process that is told `text`."""
    return lambda decide: text


def test_all_processes_have_the_plan_of_the_first(tmp_path):
    """The others may see an older plan, or none, when the first has not yet decided."""
    devices, told = DeviceSet.of(cpus(2), 1), []
    first = plan_for_devices(
        tmp_path, devices, make_for(cpus(2)), lambda plan: None, lambda d: (told.append(d()), told[0])[1]
    )
    never = lambda: pytest.fail("only the first process makes plans")
    for fits in (lambda plan: None, lambda plan: "it differs here"):
        other = plan_for_devices(tmp_path, devices, never, fits, other_process(told[0]))
        assert other.plan == first.plan and not other.from_cache and other.seconds == first.seconds


@pytest.mark.slow
def test_a_plan_in_stages_is_kept_for_its_kinds_of_devices(tmp_path):
    """Two kinds of four devices each, as one is lost; what is read again runs and takes the same step."""
    step = autoshard.TrainStep(lambda params, batch, key: (jnp.mean(layers(params, batch) ** 2), None), optax.sgd(0.1))
    state = jax.eval_shape(lambda: step.init([jnp.ones((8, 8))] * 2))
    batch = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    stages = autoshard.StageOptions(num_stages=2, num_micro_batches=2)
    made = Log()

    def get(*devices_per_node: int):
        cluster = two_kinds(tmp_path / "cluster.yaml", *devices_per_node)
        make = lambda: autoshard.plan(step, state, batch, cluster=cluster, stages=stages, donate_argnums=0)
        fits = lambda plan: None if plan.num_devices == cluster.num_devices else "other devices"
        return plan_for_devices(tmp_path, DeviceSet.of(cluster, 2), made.wrap(make), fits, alone)

    whole, less = get(4, 4), get(4, 2)
    again = get(4, 4)
    assert len(made) == 2 and again.from_cache and whole.path == again.path != less.path
    again.plan.check(step, (state, batch))
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8) / 64
    taken = []
    for chosen in (whole, again):
        assert isinstance(chosen.plan, autoshard.StagedPlan)
        run = chosen.plan.jit(step)
        run.prepare(state, batch)
        own = chosen.plan.init(lambda: step.init([jnp.ones((8, 8))] * 2), run=run)
        taken.append(float(run(own, x)[1]["loss"]))
    assert taken[0] == taken[1] > 0


def layers(params, x):
    for weights in params:
        x = jnp.tanh(x @ weights)
    return x


def two_kinds(path: pathlib.Path, *devices_per_node: int) -> Cluster:
    """Nodes of CPUs that are joined differently, and so are slices of their own."""
    links = ("Shared-memory", "Ethernet-10G")
    groups = [
        f"  - {{name: g{n}, device_type: CPU-generic, num_nodes: 1, devices_per_node: {count}, intra_node: {links[n]}}}"
        for n, count in enumerate(devices_per_node)
    ]
    lines = ["format: autoshard-cluster", "version: 1", "name: two-kinds", "groups:", *groups]
    path.write_text("\n".join([*lines, "between_groups: Shared-memory", ""]))
    return Cluster.from_file(path)


def test_processes_that_do_not_see_one_folder_are_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_store, "_SEEN_WITHIN_S", 0.2)
    text = json.dumps({"sha256": "0" * 64, "from_cache": True, "is_compiled": False, "seconds": 0.1, "reason": ""})
    with pytest.raises(ConfigError, match="all processes need the same folder"):
        plan_for_devices(tmp_path, DeviceSet.of(cpus(2), 1), make_for(cpus(2)), lambda p: None, other_process(text))


def test_sets_have_names_of_their_own_that_stay_in_the_folder():
    long = DeviceSet(tuple((1, n, "H100-SXM") for n in range(1, 30)), 4)
    odd = [DeviceSet(((1, 2, kind),), 1) for kind in ("../../x", "a/b", "a b", "a_b", "A100\x00")]
    plain = [DeviceSet(((4, 2, "CPU-generic"),), 4), DeviceSet(((2, 4, "CPU-generic"),), 4)]
    more = [DeviceSet(((2, 4, "CPU-generic"),), 2), DeviceSet(((1, 8, "A"), (1, 8, "B")), 2)]
    swapped = DeviceSet(((1, 8, "B"), (1, 8, "A")), 2)
    names = [s.name for s in (long, *odd, *plain, *more, swapped)]
    assert len(set(names)) == len(names) and all(len(name) < 100 for name in names)
    assert all(pathlib.PurePath(name).name == name and "." not in name for name in names)
    assert plain[0].name == "4-processes_4x2xCPU-generic"
    assert str(plain[0]) == "4 x 2 x CPU-generic in 4 processes"
