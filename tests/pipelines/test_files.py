"""Files of plans in stages: what is written is read back, and nothing else is believed."""

import copy
import json

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

import autoshard
from autoshard import AutoshardError, Plan, StagedPlan
from autoshard.errors import FileFormatError
from autoshard.pipelines.plan.files import VERSION


@pytest.fixture(scope="module")
def saved(subject, tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "staged.json"
    subject.plan.save(path)
    return path


@pytest.fixture(scope="module")
def document(saved):
    return json.loads(saved.read_text())


def load(document, folder) -> StagedPlan:
    path = folder / "changed.json"
    path.write_text(json.dumps(document))
    return StagedPlan.load(path)


def test_a_plan_is_read_back_as_it_was(subject, saved, tmp_path):
    """That it runs, the tests of the trainer show, which reads every plan from a file."""
    loaded = StagedPlan.load(saved)
    assert loaded == subject.plan == autoshard.load(saved)
    assert (loaded.explain(), loaded.timeline) == (subject.plan.explain(), subject.plan.timeline)
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == saved.read_bytes()


def test_each_kind_of_file_is_told_from_the_other(subject, saved, tmp_path):
    with pytest.raises(FileFormatError, match="autoshard.StagedPlan.load"):
        Plan.load(saved)
    program = subject.plan.programs[0]
    program.save(tmp_path / "plan.json")
    assert autoshard.load(tmp_path / "plan.json") == program
    with pytest.raises(FileFormatError, match="autoshard.Plan.load"):
        StagedPlan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=VERSION + 1), f"version {VERSION + 1}, but this autoshard reads version {VERSION}"),
        (lambda d: d.update(format="other"), "lacks `"),
        (lambda d: d.update(surprise=1), "surprise"),
        (lambda d: d["layers"].update(surprise=1), "surprise"),
        (lambda d: d["programs"][0].update(version=1), "program 0` is a plan of version 1"),
        (lambda d: d["programs"].append(d["programs"][0]), "4 programs, of which 3 are run"),
        (lambda d: d["program_of"][1].__setitem__(0, 9), "stage 0 of pipeline 1 has program 9"),
        (lambda d: d["program_of"][0].pop(), "other programs"),
        (lambda d: d.update(batch_size=7), "add up to 6 examples, but it has 7"),
        (lambda d: d["arrangement"]["pipelines"][0].update(num_micro_batches=3), "add up to 8 examples"),
        (lambda d: d["arrangement"]["pipelines"][0].update(schedule="eager"), "schedule"),
        (lambda d: d["arrangement"]["pipelines"][0]["stages"][1].update(stop=3), "cover the 4 layers"),
        (lambda d: d["arrangement"]["pipelines"][0]["stages"][1].update(start=2), "cover the 4 layers"),
        (lambda d: d["arrangement"]["pipelines"][1]["submeshes"][0].update(slice=5), "slice 5, which is none"),
        (lambda d: d["arrangement"]["pipelines"][1]["submeshes"][0].update(first_device=0), "must lie within slice"),
        (lambda d: d["meshes"][1][0].update(first_device=0), "must lie within slice `fast`"),
        (lambda d: d["meshes"][1][0].update(axes=[["data", 2]]), "must lie within slice `fast`"),
        (lambda d: d["meshes"][1][0].update(axes=[["tensor", 1]]), "its program is for"),
        (lambda d: d["meshes"][0].pop(), "other meshes"),
        (lambda d: d["slices"][1].update(first_device=1), "must begin with device 2"),
        (lambda d: d["owners"].pop(), "parameters, but owners of"),
        (lambda d: d["owners"][0].update(stage=7), "lives on stage 7"),
        (lambda d: d["starts"].pop(), "must begin one after the other"),
        (lambda d: d["layers"]["activations"][0].update(source=9), "a layer is named"),
        (lambda d: d["durations"].pop(), "durations of 1 pipelines"),
        (lambda d: d["durations"][0]["stages"].pop(), "durations of 1"),
        (lambda d: d["durations"][0]["transfers"][0].update(target=5), "to a later one of 2"),
        (lambda d: d["durations"][0]["stages"][0].update(forward_s=-1.0), "forward_s of stage 0"),
    ],
)
def test_refusals(document, change, message, tmp_path):
    changed = copy.deepcopy(document)
    change(changed)
    with pytest.raises(FileFormatError, match=message):
        load(changed, tmp_path)


def test_two_submeshes_do_not_share_a_device(document, tmp_path):
    changed = copy.deepcopy(document)
    changed["arrangement"]["pipelines"][1]["submeshes"][0]["first_device"] = 0
    changed["meshes"][1][0]["first_device"] = 0
    with pytest.raises(FileFormatError, match="device 0 belongs to"):
        load(changed, tmp_path)


JSON = st.none() | st.booleans() | st.integers(-5, 10**4) | st.floats(allow_nan=False) | st.text(max_size=5)
JSON = JSON | st.lists(JSON, max_size=2) | st.dictionaries(st.text(max_size=3), JSON, max_size=2)


def paths_in(document, path=()):
    """The paths of everything inside a JSON document but for its programs, which are plan files of their own."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list) and key != "programs":
            yield from paths_in(value, (*path, key))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_changed_files_are_read_or_refused(document, tmp_path_factory, data):
    """Whatever stands anywhere in the file: the plan is refused in words, or can be used like any other."""
    changed = copy.deepcopy(document)
    *path, last = data.draw(st.sampled_from(list(paths_in(changed))))
    owner = changed
    for key in path:
        owner = owner[key]
    if data.draw(st.booleans()):
        owner[last] = data.draw(JSON)
    else:
        del owner[last]
    try:
        plan = load(changed, tmp_path_factory.getbasetemp())
    except AutoshardError:
        return
    assert plan.explain() and plan.step_s >= 0 and sum(plan.parts) == plan.batch_size
