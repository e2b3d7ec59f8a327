"""Plan files: what is written is read back, and nothing else is believed."""

import copy
import dataclasses
import json
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from autoshard import AutoshardError, Plan
from autoshard.errors import FileFormatError
from autoshard.plans.files import VERSION


@pytest.fixture(scope="module")
def saved(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    return path


@pytest.fixture(scope="module")
def document(saved):
    return json.loads(saved.read_text())


def load(document, folder) -> Plan:
    path = folder / "changed.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return Plan.load(path)


def test_a_plan_is_read_back_as_it_was(plan, saved, tmp_path):
    loaded = Plan.load(saved)
    assert loaded == plan
    assert loaded.explain() == plan.explain()
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == saved.read_bytes()


def test_infinities_are_read_back(plan, tmp_path):
    """The bound of a mesh that was ruled out may be infinite, and so may a gap."""
    odd = dataclasses.replace(
        plan,
        budget_bytes=None,
        certificate=dataclasses.replace(plan.certificate, gap=math.inf, bound=-math.inf),
        candidates=tuple(dataclasses.replace(c, bound_s=math.inf, step_s=None) for c in plan.candidates),
    )
    odd.save(tmp_path / "odd.json")
    assert Plan.load(tmp_path / "odd.json") == odd


@pytest.mark.parametrize("version", [3, 4, 5, 6])
def test_plans_of_earlier_versions_are_refused_and_told_to_plan_again(document, version, tmp_path):
    """Before version 7 a plan did not say what is recomputed, before 6 which schedule it assumes, before 5 in which
    order its operations run."""
    before = {**copy.deepcopy(document), "version": version}
    del before["schedule"]
    if version < 5:
        for _, equation in before["shardings"]:
            equation["again"] = equation.pop("delayed")
    with pytest.raises(FileFormatError, match=rf"version {version}, but .* reads version {VERSION} only.* Plan again"):
        load(before, tmp_path)


def test_a_plan_read_from_a_file_runs(plan, saved, train, shapes):
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype), shapes())
    expected = jax.jit(train)(*args)
    loaded = Plan.load(saved)
    assert loaded.in_specs == {a.name: s for a, s in zip(plan.arguments, jax.tree.leaves(plan.in_specs), strict=True)}
    found = loaded.jit(train)(*args)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=VERSION + 1), f"version {VERSION + 1}, but this autoshard reads version {VERSION}"),
        (lambda d: d.pop("version"), "version None"),
        (lambda d: d.update(format="other"), "not an autoshard plan"),
        (lambda d: d.update(surprise=1), "surprise"),
        (lambda d: d["estimate"].update(surprise=1), "estimate.surprise"),
        (lambda d: d["output_steps"].pop(), "outputs, but steps of"),
        (lambda d: d["output_steps"][0].append([[]] * 7), "has shape"),
        (lambda d: d.pop("axes"), "axes"),
        (lambda d: d["arguments"][0].update(shape=[3, 3, 3]), "has shape"),
        (lambda d: d.update(axes=[["data", 0]]), "at least 1"),
        (lambda d: d.update(axes=d["axes"] + d["axes"]), "distinct names"),
        (lambda d: d.update(device="Abacus"), "Abacus on .* has the hardware"),
        (lambda d: d["logical_mesh"]["axes"][0].update(size=3), "must multiply to its size 3"),
        (lambda d: d["logical_mesh"]["device_type"].update(memory_bandwidth_bytes_per_s=-1.0), "memory_bandwidth"),
        (lambda d: d["equation_order"].append(10**6), "does not describe"),
        (lambda d: d["shardings"].append([10**6, d["shardings"][0][1]]), "shardings for equation 1000000"),
        (lambda d: d["arguments"][0].update(entries=[["nowhere"]] * len(d["arguments"][0]["shape"])), "nowhere"),
    ],
)
def test_refusals(document, change, message, tmp_path):
    changed = copy.deepcopy(document)
    change(changed)
    with pytest.raises(FileFormatError, match=message):
        load(changed, tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"autoshard-plan"', "\x00", '{"format": "autoshard-plan"}'])
def test_other_files_are_refused(text, tmp_path):
    with pytest.raises(FileFormatError):
        load(text, tmp_path)


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(FileFormatError, match="nowhere.json"):
        Plan.load(tmp_path / "nowhere.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**12) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(document, path=()):
    """The paths of everything inside a JSON document."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_changed_files_are_read_or_refused(document, tmp_path_factory, data):
    """Whatever stands at a place of the file: the plan is refused in words, or can be used like any other."""
    changed = copy.deepcopy(document)
    every = list(places(changed))
    for _ in range(data.draw(st.integers(1, 2))):
        *path, last = data.draw(st.sampled_from(every))
        owner = changed
        try:
            for key in path:
                owner = owner[key]
            action = data.draw(st.sampled_from(["replace", "remove", "copy"]))
            if action == "replace":
                owner[last] = data.draw(JSON)
            elif action == "remove":
                del owner[last]
            elif isinstance(owner, list):
                owner.append(copy.deepcopy(owner[last]))
        except (KeyError, IndexError, TypeError):
            continue  # the place is gone
    try:
        plan = load(changed, tmp_path_factory.getbasetemp())
    except AutoshardError:
        return
    assert plan.explain() and plan.in_specs is not None and plan.num_devices >= 1


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cut=st.floats(0, 1), noise=st.text(max_size=3))
def test_damaged_files_are_refused(saved, tmp_path_factory, cut, noise):
    text = saved.read_text()
    at = int(cut * (len(text) - 1))
    with pytest.raises(FileFormatError):
        load(text[:at] + noise, tmp_path_factory.getbasetemp())
